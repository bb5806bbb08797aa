"""Whole rows: prompt, sampled turns and suffixes, against a full render of the same conversation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat.prefix import tool_call
from agentrl.chat.renderer import Renderer
from agentrl.testing.tokenizers import AB, EOS, fix_tokenizer, qwen_like_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
RENDERERS = {
    "qwen3": Renderer(qwen_like_tokenizer(), tools=True),
    "qwen3 quiet": Renderer(qwen_like_tokenizer(), tools=True, template_kwargs={"enable_thinking": False}),
    "qwen2_5": Renderer(qwen_like_tokenizer("qwen2_5"), tools=True),
    "compact": Renderer(qwen_like_tokenizer("compact"), tools=True),
    "t0": Renderer(fix_tokenizer("t0"), tools=True),
    "grouped": Renderer(fix_tokenizer("grouped"), tools=True),
}


def test_sampled_ids_are_kept_where_encoding_again_would_change_them_b01():
    renderer = RENDERERS["t0"]
    sampled = [197, 198, EOS]
    turn = renderer.parse(sampled, TOOLS)
    prompt = renderer.prompt_ids([{"role": "user", "content": "q"}], TOOLS)
    suffix = renderer.suffix_ids(EOS, turn.message, [{"role": "tool", "content": "7"}], TOOLS)
    row = prompt + sampled + suffix
    assert row[len(prompt) :][:3] == sampled
    assert AB not in row[len(prompt) :]
    assert turn.message["content"] == "ab"


def test_a_row_is_the_full_render_with_one_newline_at_each_seam_b02():
    renderer = RENDERERS["t0"]
    question, result = {"role": "user", "content": "q"}, {"role": "tool", "content": "7"}
    sampled = [*renderer._tokenizer.encode("hi"), EOS]
    turn = renderer.parse(sampled, TOOLS)
    row = renderer.prompt_ids([question], TOOLS) + sampled
    row += renderer.suffix_ids(EOS, turn.message, [result], TOOLS)
    assert row == renderer.prompt_ids([question, turn.message, result], TOOLS)


WORDS = st.text("ab é.", min_size=1, max_size=6).map(str.strip).filter(bool)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 99) | WORDS, st.lists, max_leaves=4)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "look_up"]), st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=2)),
    min_size=1,
    max_size=3,
)
ROUNDS = st.lists(st.tuples(st.just("") | WORDS, st.none() | WORDS, CALLS), max_size=3)


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=25)
@given(system=st.none() | WORDS, question=WORDS, rounds=ROUNDS, results=st.lists(WORDS, min_size=9, max_size=9))
def test_header_sampled_ids_and_suffix_are_the_full_render(name, system, question, rounds, results):
    """Turns as the template writes them: what the model samples is what a full render has at its place."""
    renderer = RENDERERS[name]
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    row = renderer.prompt_ids(messages, TOOLS)
    number = 0
    for content, reasoning, calls in rounds:
        thought = {"reasoning_content": reasoning} if reasoning is not None and name != "qwen3 quiet" else {}
        made = [tool_call(number + index, *item) for index, item in enumerate(calls)]
        turn = {"role": "assistant", "content": content, **thought, "tool_calls": made}
        answers = [
            {"role": "tool", "name": item["function"]["name"], "tool_call_id": item["id"], "content": text}
            for item, text in zip(made, results[number:], strict=False)
        ]
        sampled = sample(renderer, messages, turn)
        parsed = renderer.parse(sampled, TOOLS, first_call=number)
        assert parsed.message["tool_calls"] == made
        assert parsed.message["content"] == content
        row += sampled + renderer.suffix_ids(sampled[-1], parsed.message, answers, TOOLS)
        messages += [turn, *answers]
        number += len(made)
        full = renderer._template.render(messages, TOOLS, True)
        assert row == renderer._tokenizer.encode(full, add_special_tokens=False)


def sample(renderer, messages, turn):
    """The ids that a model which writes exactly like its template samples."""
    header = renderer._template.render(messages, TOOLS, True)
    whole = renderer._template.render([*messages, turn], TOOLS, False)
    assert whole.startswith(header)
    text = whole[len(header) :].rstrip("\n")
    return renderer._tokenizer.encode(text, add_special_tokens=False)
