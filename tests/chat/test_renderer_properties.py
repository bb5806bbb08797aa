"""Random conversations, templates and tokenizers, played by the engine: every row is exact."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat.renderer import Renderer
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.tools import make_tools
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import fix_tokenizer, qwen_like_tokenizer
from agentrl.types import Outcome, Task


def echo(text: str, repeat: int = 1) -> str:
    """Say it again.

    Args:
        text: What to say.
        repeat: How often.
    """
    return text * repeat


SCHEMAS = [tool.schema for tool in make_tools([echo]).values()]
WORDS = st.text('ab é\n.:<>|"{}東🙂', max_size=9)
FIXED = st.text('ab é.:<>|"{}', max_size=9)  # what the vocabulary of FIX.tok has


def cases():
    for template, seed in itertools.product(("qwen3", "qwen2_5", "compact"), (None, 3, 4, 5)):
        yield pytest.param(qwen_like_tokenizer(template, seed=seed), id=f"{template}-{seed}")
    for template in ("t0", "grouped", "think"):
        yield pytest.param(fix_tokenizer(template), id=template)


@pytest.mark.parametrize("reasoning", ["keep", "fork"])
@pytest.mark.parametrize("tokenizer", list(cases()))
@settings(max_examples=5)
@given(data=st.data())
def test_rows_are_exact_whatever_is_said(tokenizer, reasoning, data):
    words = FIXED if "<e>" in tokenizer.get_vocab() else WORDS
    renderer = Renderer(tokenizer, tools=True, reasoning=reasoning)
    system = data.draw(st.none() | words)
    prompt = [] if system is None else [{"role": "system", "content": system}]
    prompt.append({"role": "user", "content": data.draw(words)})
    stop = renderer._end.text
    qwen = stop == "<|im_end|>"

    def written(calls):
        thought, content = data.draw(st.just("") | words.map("<think>{}</think>".format)), data.draw(words)
        made = [json.dumps({"name": "echo", "arguments": {"text": text}}, ensure_ascii=False) for text in calls]
        opening, closing = ("<tool_call>\n", "\n</tool_call>") if qwen else ("<call>", "</call>")
        return tokenizer.encode(thought + content + "".join(f"{opening}{call}{closing}" for call in made) + stop)

    rounds = data.draw(st.lists(st.lists(words, min_size=1, max_size=3), max_size=3))
    script = [*map(written, rounds), written([])]
    generator = ScriptedGenerator([script])
    engine = RolloutEngine(generator, renderer, tools=[echo])
    [trajectory] = engine.run([Task("g", 0, 1, prompt)])
    engine.close()

    assert trajectory.outcome is Outcome.FINISHED
    assert_row_invariants(trajectory, generator.calls)
    assert [call.sample.ids for call in generator.calls] == script
    trained = [t for row in trajectory.rows for t, m in zip(row.completion_ids, row.loss_mask, strict=True) if m]
    assert trained == [token for turn in script for token in turn]
    if reasoning == "keep":
        assert trajectory.forks == []
    check_against_the_template(renderer, trajectory)


def check_against_the_template(renderer, trajectory):
    """All but the sampled turns is what the template writes at that place, token for token.

    The text of the row and that of the template are cut at the ends of turns; the pieces of the template come from one
    encoding of the whole conversation.
    """
    encode, stop = renderer._suffixes.encode_all, renderer._end.id
    for row in trajectory.rows:
        turns = [turn for turn in trajectory.turns if trajectory.rows[turn.row] == row]
        answered = trajectory.turns.index(turns[-1])
        messages, assistants = list(trajectory.prompt), 0
        for message in trajectory.completion:
            assistants += message["role"] == "assistant"
            if assistants > answered:
                break
            messages.append(message)
        context = encode(renderer._template.render(messages, SCHEMAS, True))
        given = (row.prompt_ids + row.completion_ids)[: len(row.prompt_ids) + turns[-1].start]
        header = encode(renderer._template.generation_prompt)
        for ours, whole in zip(_pieces(given, stop), _pieces(context, stop), strict=True):
            glue = _without_turn(ours, header)
            assert glue == whole[: len(glue)]


def _pieces(ids, stop):
    """Cut after each stop id."""
    pieces = [[]]
    for token in ids:
        pieces[-1].append(token)
        if token == stop:
            pieces.append([])
    return pieces


def _without_turn(piece, header):
    """A piece up to the header of the sampled turn in it."""
    size = len(header)
    starts = (start for start in range(len(piece) - size) if piece[start : start + size] == header)
    return piece[: next(starts, len(piece))]
