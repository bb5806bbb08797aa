"""What is said of a number of rollouts: pass@k, intervals, histogram."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from agentrl.rollout.evaluation import evaluate, histogram, mean_interval, pass_at_k, wilson_interval
from agentrl.types import FinishReason, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn


@pytest.mark.parametrize(("played", "passed"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(played, passed):
    results = [i < passed for i in range(played)]
    for k in range(1, played + 1):
        subsets = list(itertools.combinations(results, k))
        assert pass_at_k(played, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(played, passed, played + 1)


def test_wilson_interval_is_where_the_score_test_just_accepts():
    """The bounds p solve |mean - p| = z sqrt(p (1 - p) / n)."""
    for mean, count in [(0.3, 20), (0.5, 3), (0.9, 50)]:
        for p in wilson_interval(mean, count, 1.96):
            assert abs(mean - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / count))
    assert wilson_interval(1.0, 5)[1] == 1.0
    assert wilson_interval(1.0, 5)[0] < 0.6


def test_intervals_of_shares_cover_the_truth():
    """Values of tasks between 0 and 1, drawn again and again: at least 95% of the intervals hold their mean."""
    draw = random.Random(0)
    covered = 0
    for _ in range(2000):
        values = [pass_at_k(4, sum(draw.random() < 0.3 for _ in range(4)), 2) for _ in range(12)]
        low, high = wilson_interval(sum(values) / len(values), len(values))
        covered += low <= 1 - 0.7**2 <= high
    assert covered / 2000 >= 0.95


def test_one_task_says_nothing_of_the_spread():
    assert mean_interval([]) is None
    assert mean_interval([2.0]) == (2.0, -math.inf, math.inf)


def test_few_values_have_a_bin_each_and_many_share():
    assert [tuple(b) for b in histogram([1.0, 0.0, 1.0])] == [(0.0, 0.0, 1), (1.0, 1.0, 2)]
    bins = histogram([float(i) for i in range(101)])
    assert len(bins) == 10
    assert sum(b.episodes for b in bins) == 101
    assert (bins[0].low, bins[-1].high) == (0.0, 100.0)


def test_unscored_rollouts_count_as_episodes_only():
    def rollout(group: str, outcome: Outcome = Outcome.FINISHED) -> Trajectory:
        answer = ToolResult(ToolCall("c", "press"), "x", failed=True, seconds=2.0)
        turn = Turn(0, 2, FinishReason.STOP, (answer,), seconds=1.5)
        return Trajectory(
            Task(group, 0, 1), "p", [1, 2, 3], "c", [1, 2, 9], [1, 1, 0], [0.0] * 3, outcome, turns=[turn]
        )

    rollouts = [rollout("a"), rollout("a"), rollout("b"), rollout("b", Outcome.ENV_FAILURE)]
    report = evaluate(rollouts, [1.0, 0.0, 1.0, None], seconds=3.0)
    assert (report.tasks, report.episodes, report.scored) == (2, 4, 3)
    assert report.reward.value == 0.75  # the mean of 0.5 and 1.0: tasks count alike
    assert report.passes[1].value == 0.75
    assert report.passes[2].value == 1.0  # of the first task alone
    assert report.outcomes == {Outcome.FINISHED: 3, Outcome.ENV_FAILURE: 1}
    assert (report.cost.sampled_tokens, report.cost.other_tokens, report.cost.prompt_tokens) == (8, 4, 12)
    assert (report.cost.sampling_seconds, report.cost.tool_seconds, report.tool_failures) == (6.0, 8.0, 4)
    nothing = evaluate(rollouts[3:], [None], seconds=1.0)
    assert (nothing.reward, nothing.passes, nothing.histogram) == (None, {}, [])
