"""Episodes whose chat template rewrites earlier turns: with `reasoning="fork"` they go on in new rows."""

import pytest

from agentrl.chat.renderer import Renderer
from agentrl.errors import ConfigurationError, GenerationError, TemplateError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.limits import Limits
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import AB, fix_tokenizer
from agentrl.types import FinishReason, Limit, Outcome, Sample
from tests.rollout.helpers import QUESTION, Counter, call, encode, tasks, turn

THINKING = [
    turn("<think>why</think>" + call("inc")),
    turn("<think>so</think>" + call("inc")),
    turn("<think>r</think>2"),
]


def play(script, *, template="think", reasoning="fork", limits=None):
    generator = ScriptedGenerator([script])
    renderer = Renderer(fix_tokenizer(template), tools=True, reasoning=reasoning)
    engine = RolloutEngine(generator, renderer, environments=Counter, limits=limits)
    [trajectory] = engine.run(tasks(1))
    engine.release([trajectory])
    engine.close()
    assert_row_invariants(trajectory, generator.calls)
    return trajectory, generator


def sampled_tokens(trajectory):
    return [
        token
        for row in trajectory.rows
        for token, sampled in zip(row.completion_ids, row.loss_mask, strict=True)
        if sampled
    ]


def test_the_model_sees_what_its_template_shows_and_every_sampled_token_is_in_one_row_c02():
    trajectory, generator = play(THINKING)
    tokenizer = fix_tokenizer("think")
    messages = [*QUESTION, *trajectory.completion]
    schemas = [tool.schema for tool in _tools()]
    for given, size in zip(generator.calls, (1, 3, 5), strict=True):
        text = tokenizer.apply_chat_template(messages[:size], tools=schemas, tokenize=False, add_generation_prompt=True)
        assert given.ids == encode(text)
    assert "why" not in tokenizer.decode(generator.calls[2].ids)
    assert len(trajectory.rows) == 3
    assert [t.row for t in trajectory.turns] == [0, 1, 2]
    assert sampled_tokens(trajectory) == [token for ids in THINKING for token in ids]
    assert trajectory.sampled_length == sum(map(len, THINKING))
    assert trajectory.reward == 2.0


def _tools():
    from agentrl.rollout.tools import make_tools

    return make_tools([Counter().inc]).values()


def test_a_row_goes_on_where_the_template_keeps_it():
    """Without reasoning nothing is rewritten; with it in the second turn alone, one fork comes after that."""
    trajectory, _ = play([turn(call("inc")), turn("2")])
    assert trajectory.forks == []
    trajectory, _ = play([turn(call("inc")), turn("<think>why</think>" + call("inc")), turn("2")])
    assert [t.row for t in trajectory.turns] == [0, 0, 1]


@pytest.mark.parametrize("template", ["t0", "grouped"])
def test_a_template_that_keeps_everything_never_forks(template):
    forked, _ = play(THINKING, template=template)
    kept, _ = play(THINKING, template=template, reasoning="keep")
    assert forked.forks == []
    assert (forked.completion_ids, forked.loss_mask) == (kept.completion_ids, kept.loss_mask)


def test_sampled_ids_stay_in_their_row_where_encoding_again_would_change_them_b01():
    """The rewritten context is encoded anew; it is a prompt there, and nothing of it is trained."""
    odd = [197, 198]  # "ab", which encodes as one token
    trajectory, _ = play([[*encode("<think>r</think>"), *odd, *turn(call("inc"))], turn("ab")])
    assert trajectory.completion_ids[16:18] == odd
    assert AB in trajectory.forks[0].prompt_ids


def test_keeping_gives_one_row_with_the_reasoning_in_it():
    trajectory, generator = play(THINKING, reasoning="keep")
    assert trajectory.forks == []
    assert "why" in fix_tokenizer().decode(generator.calls[2].ids)


@pytest.mark.parametrize("reasoning", ["keep", "fork"])
def test_the_completion_budget_counts_each_sampled_and_result_token_once(reasoning):
    """The same episode ends at the same place in both modes."""
    suffix = len(encode("<b>user<r>1</r><e><b>assistant|"))
    budget = len(THINKING[0]) + suffix + len(THINKING[1]) + suffix
    trajectory, _ = play(THINKING, reasoning=reasoning, limits=Limits(max_completion_length=budget))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TRUNCATED, Limit.COMPLETION)
    assert len(trajectory.turns) == 2
    trajectory, generator = play([*THINKING[:2], turn("2")], reasoning=reasoning, limits=Limits(budget + 2))
    assert trajectory.outcome is Outcome.FINISHED
    assert generator.calls[2].params.max_tokens == 2


def test_the_context_limit_counts_the_row_that_the_model_reads():
    """What forks dropped leaves room; a rewritten context that is too long ends the episode before the fork."""
    _, generator = play(THINKING)
    longest = max(len(given.ids) + len(given.sample.ids) for given in generator.calls)
    kept, _ = play(THINKING, reasoning="keep")
    assert longest < len(kept.prompt_ids) + len(kept.completion_ids)
    assert play(THINKING, limits=Limits(max_context=longest))[0].outcome is Outcome.FINISHED
    short, _ = play(THINKING, limits=Limits(max_context=len(generator.calls[2].ids)))
    assert (short.outcome, short.limit, len(short.turns)) == (Outcome.TRUNCATED, Limit.CONTEXT, 2)


def test_a_template_that_cannot_show_tools_is_refused_for_forks():
    tokenizer = fix_tokenizer("think")
    tokenizer.chat_template = tokenizer.chat_template.replace("+ calls(message)", "")
    with pytest.raises(TemplateError, match="does not show names of called tools"):
        Renderer(tokenizer, tools=True, reasoning="fork")


@pytest.mark.parametrize("prompt", ["Q", [*QUESTION, {"role": "assistant", "content": "<think>hm"}]])
def test_a_prompt_that_cannot_be_rendered_again_is_refused_for_forks(prompt):
    renderer = Renderer(fix_tokenizer("think"), tools=True, reasoning="fork")
    with pytest.raises(ConfigurationError, match='reasoning="keep"'):
        renderer.continuation(prompt, [{"role": "assistant", "content": ""}], [], [2], None)


class Replayable(Counter):
    replayable = True


def recorded(folder, script, *, resume=False):
    """Play one episode with a journal; gives back it and what the generator was given, which breaks when asked more."""
    turns = iter(script)

    def play_back(session, ids, params):
        if (sampled := next(turns, None)) is None:
            raise GenerationError("the generator is gone")
        return Sample(sampled, [-0.25 - index / 8 for index in range(len(sampled))], FinishReason.STOP)

    journal = Journal(folder)
    journal.begin_run({}, resume=resume)
    journal.open_window(kind="train", step=0, identity=0, policy="p")
    generator = ScriptedGenerator(play_back)
    renderer = Renderer(fix_tokenizer("think"), tools=True, reasoning="fork")
    engine = RolloutEngine(generator, renderer, environments=Replayable, journal=journal)
    try:
        [trajectory] = engine.run(tasks(1))
        engine.release([trajectory])
    finally:
        engine.close()
        journal.close()
    return trajectory, generator.calls


def test_a_forked_episode_is_read_back_row_by_row_and_goes_on_in_the_right_row_c02(tmp_path):
    """Cut off after any of its turns but the last, it is resumed in its row and is the episode that was not cut off."""
    whole, calls = recorded(tmp_path / "whole", THINKING)
    assert len(whole.rows) == 3
    with Records(tmp_path / "whole") as records:
        again = records.rollout(whole.record).trajectory()
    assert again.rows == whole.rows
    assert [(t.row, t.start, t.stop) for t in again.turns] == [(t.row, t.start, t.stop) for t in whole.turns]
    assert again.completion == whole.completion
    for kept in (1, 2):
        folder = tmp_path / f"cut{kept}"
        with pytest.raises(GenerationError):
            recorded(folder, THINKING[:kept])
        resumed, asked = recorded(folder, THINKING[kept:], resume=True)
        assert [call.ids for call in asked] == [call.ids for call in calls[kept:]]
        assert resumed.rows == whole.rows
        assert [t.row for t in resumed.turns] == [0, 1, 2]
        with Records(folder) as records:
            assert records.rollout(resumed.record).trajectory().rows == whole.rows
            assert len(records.summaries(superseded=True)) == 1
