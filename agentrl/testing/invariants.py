"""The row invariants that every trajectory must keep (design, invariants 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.testing.scripted import SampleCall
from agentrl.types import Row, Trajectory


def assert_row_invariants(trajectory: Trajectory, calls: Sequence[SampleCall] = ()) -> None:
    """Assert that a trajectory is aligned and token-exact, in each of its rows.

    Args:
        trajectory: The trajectory.
        calls: The sample calls that made it, in order, as a `ScriptedGenerator` recorded them.

    Raises:
        AssertionError: The row, its mask or its logprobs do not match what was sampled.
    """
    assert not calls or len(calls) == len(trajectory.turns), f"{len(calls)} calls but {len(trajectory.turns)} turns"
    assert [turn.row for turn in trajectory.turns] == sorted(turn.row for turn in trajectory.turns)
    for number, row in enumerate(trajectory.rows):
        turns = [index for index, turn in enumerate(trajectory.turns) if turn.row == number]
        spans = [(trajectory.turns[index].start, trajectory.turns[index].stop) for index in turns]
        _assert_row(row, spans, [calls[index] for index in turns] if calls else [])


def _assert_row(row: Row, spans: list[tuple[int, int]], calls: Sequence[SampleCall]) -> None:
    ids, mask, logprobs = row.completion_ids, row.loss_mask, row.logprobs
    assert len(ids) == len(mask) == len(logprobs), f"lengths differ: {len(ids)}, {len(mask)}, {len(logprobs)}"
    expected = [0] * len(ids)
    for start, stop in spans:
        expected[start:stop] = [1] * (stop - start)
    assert mask == expected, f"mask {mask} is not 1 exactly on the sampled spans {spans}"
    assert all(logprob == 0.0 for logprob, sampled in zip(logprobs, mask, strict=True) if not sampled)
    if ids:
        assert mask[-1] == 1, "a row ends with a sampled id"
    whole = row.prompt_ids + ids
    for call, (start, stop) in zip(calls, spans if calls else [], strict=True):
        given = len(row.prompt_ids) + start
        assert call.ids == whole[:given], f"the turn at {start} was sampled from other ids than the row's"
        assert ids[start:stop] == call.sample.ids, f"the turn at {start} is not what was sampled"
        assert logprobs[start:stop] == call.sample.logprobs, f"logprobs of the turn at {start} differ"
