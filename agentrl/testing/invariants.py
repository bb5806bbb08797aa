"""The row invariants that every trajectory must keep (design, invariants 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.testing.scripted import SampleCall
from agentrl.types import Trajectory


def assert_row_invariants(trajectory: Trajectory, calls: Sequence[SampleCall] = ()) -> None:
    """Assert that a trajectory is aligned and token-exact.

    Args:
        trajectory: The trajectory.
        calls: The sample calls that made it, in order, as a `ScriptedGenerator` recorded them.

    Raises:
        AssertionError: The row, its mask or its logprobs do not match what was sampled.
    """
    ids, mask, logprobs = trajectory.completion_ids, trajectory.loss_mask, trajectory.logprobs
    assert len(ids) == len(mask) == len(logprobs), f"lengths differ: {len(ids)}, {len(mask)}, {len(logprobs)}"
    spans = [(turn.start, turn.stop) for turn in trajectory.turns]
    expected = [0] * len(ids)
    for start, stop in spans:
        expected[start:stop] = [1] * (stop - start)
    assert mask == expected, f"mask {mask} is not 1 exactly on the sampled spans {spans}"
    assert all(logprob == 0.0 for logprob, sampled in zip(logprobs, mask, strict=True) if not sampled)
    if ids:
        assert mask[-1] == 1, "a row ends with a sampled id"
    if not calls:
        return
    assert len(calls) == len(spans), f"{len(calls)} sample calls but {len(spans)} turns"
    row = trajectory.prompt_ids + ids
    for call, (start, stop) in zip(calls, spans, strict=True):
        given = len(trajectory.prompt_ids) + start
        assert call.ids == row[:given], f"the turn at {start} was sampled from other ids than the row's"
        assert ids[start:stop] == call.sample.ids, f"the turn at {start} is not what was sampled"
        assert logprobs[start:stop] == call.sample.logprobs, f"logprobs of the turn at {start} differ"
