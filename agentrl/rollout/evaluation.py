"""What a number of finished rollouts says of a policy: rewards, pass@k with intervals, outcomes, cost.

Pure functions of trajectories. Rollouts of one task are no independent draws, tasks are: intervals count tasks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.types import Outcome, Trajectory

Z = statistics.NormalDist().inv_cdf(0.975)
"""Half the width of a 95% interval in standard errors."""

BINS = 10


class Estimate(NamedTuple):
    """A mean over tasks with its 95% interval."""

    value: float
    low: float
    high: float


class Bin(NamedTuple):
    """Rewards from `low` to `high`: both included, or all equal."""

    low: float
    high: float
    episodes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What the rollouts took.

    Attributes:
        seconds: From the beginning to the end of all.
        prompt_tokens: Of all first prompts; None where only a server knows.
        sampled_tokens: Tokens that the model drew.
        other_tokens: Tokens of tool results and glue; None where only a server knows.
        sampling_seconds: Spent waiting for turns, summed over rollouts.
        tool_seconds: Spent in tools, summed over calls.
    """

    seconds: float
    prompt_tokens: int | None
    sampled_tokens: int
    other_tokens: int | None
    sampling_seconds: float
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A summary of rollouts.

    Attributes:
        tasks: Distinct tasks.
        episodes: Rollouts.
        scored: Rollouts that have a reward.
        reward: Mean over tasks of the mean reward of their rollouts; None if nothing was scored.
        passes: Pass@k by k, over the tasks with at least k scored rollouts.
        histogram: How often which reward came up.
        outcomes: How often which outcome came up.
        turns: Mean number of sampled turns.
        tool_calls: Answered calls.
        tool_failures: Those of them that failed.
        cost: What it took.
    """

    tasks: int
    episodes: int
    scored: int
    reward: Estimate | None
    passes: dict[int, Estimate]
    histogram: list[Bin]
    outcomes: dict[Outcome, int]
    turns: float
    tool_calls: int
    tool_failures: int
    cost: Cost


def evaluate(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], *, seconds: float, success: float = 1.0
) -> Evaluation:
    """Summarise rollouts.

    Args:
        trajectories: R rollouts.
        rewards: The total reward of each; None: not scored.
        seconds: How long all of it took.
        success: A rollout passes if its reward is at least this.

    Raises:
        ValueError: There are no rollouts, or not as many rewards.
    """
    if not trajectories:
        raise ValueError("there are no rollouts")
    groups: dict[str, list[float]] = defaultdict(list)
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        if reward is not None:
            groups[trajectory.task.group].append(reward)
    known = [reward for reward in rewards if reward is not None]
    sampled = sum(t.sampled_length for t in trajectories)
    return Evaluation(
        tasks=len({t.task.group for t in trajectories}),
        episodes=len(trajectories),
        scored=len(known),
        reward=mean_interval([statistics.fmean(group) for group in groups.values()]),
        passes=_passes(list(groups.values()), success),
        histogram=histogram(known),
        outcomes=dict(Counter(t.outcome for t in trajectories).most_common()),
        turns=statistics.fmean(len(t.turns) for t in trajectories),
        tool_calls=sum(t.tool_calls for t in trajectories),
        tool_failures=sum(t.tool_failures for t in trajectories),
        cost=Cost(
            seconds=seconds,
            prompt_tokens=sum(len(t.prompt_ids) for t in trajectories),
            sampled_tokens=sampled,
            other_tokens=sum(len(row.completion_ids) for t in trajectories for row in t.rows) - sampled,
            sampling_seconds=sum(turn.seconds for t in trajectories for turn in t.turns),
            tool_seconds=sum(r.seconds for t in trajectories for turn in t.turns for r in turn.results),
        ),
    )


def pass_at_k(played: int, passed: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of k rollouts of a task passes: 1 - C(n-c, k) / C(n, k).

    (Chen et al. 2021, Evaluating Large Language Models Trained on Code, https://arxiv.org/abs/2107.03374, equation 1.)

    Args:
        played: Rollouts of the task, n.
        passed: Those that passed, c.
        k: At most n.

    Raises:
        ValueError: There are fewer than k rollouts.

    Example:
        >>> pass_at_k(4, 2, 2)  # one of the six pairs has no passing rollout
        0.8333333333333334
    """
    if not 1 <= k <= played:
        raise ValueError(f"pass@{k} of {played} rollouts")
    return 1.0 - math.comb(played - passed, k) / math.comb(played, k)


def wilson_interval(mean: float, count: int, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953).

    It holds for the mean of independent values in [0, 1] as well, such as pass@k of tasks: no distribution on [0, 1]
    varies more than the one on {0, 1} with the same mean. Unlike a bootstrap it has a width when all values are equal.

    Args:
        mean: The mean of the values.
        count: How many they are, at least 1.
        z: Half the width in standard errors.
    """
    scale = 1 + z * z / count
    centre = (mean + z * z / (2 * count)) / scale
    half = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> Estimate | None:
    """The mean of independent values with a normal interval, which is infinite for a single one; None for none."""
    if not values:
        return None
    mean = statistics.fmean(values)
    half = Z * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


def histogram(values: Sequence[float]) -> list[Bin]:
    """One bin for each value where they are few, else `BINS` of equal width."""
    counts = Counter(values)
    if len(counts) <= BINS:
        return [Bin(value, value, counts[value]) for value in sorted(counts)]
    low, width = min(values), (max(values) - min(values)) / BINS
    placed = Counter(min(int((value - low) / width), BINS - 1) for value in values)
    return [Bin(low + i * width, low + (i + 1) * width, placed[i]) for i in range(BINS)]


def _passes(groups: Sequence[Sequence[float]], success: float) -> dict[int, Estimate]:
    """Pass@k for the powers of two, and for the whole group."""
    largest = max(map(len, groups), default=0)
    powers = {2**i for i in range(largest.bit_length()) if 2**i <= largest}
    passes = {}
    for k in sorted(powers | {largest} - {0}):
        values = [pass_at_k(len(g), sum(r >= success for r in g), k) for g in groups if len(g) >= k]
        mean = statistics.fmean(values)
        passes[k] = Estimate(mean, *wilson_interval(mean, len(values)))
    return passes
