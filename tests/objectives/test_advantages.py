"""Advantages against hand-computed numbers and a plain Python reference."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from agentrl.objectives.advantages import (
    SCALES,
    combine_rewards,
    flat_rows,
    gdpo_advantages,
    grpo_advantages,
    reward_statistics,
    rloo_advantages,
)

NAN = math.nan


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def one_group(size: int) -> torch.Tensor:
    return torch.full((size,), 7)


def assert_close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, vector(*expected), atol=1e-5, rtol=0)


class TestCombineRewards:
    def test_weighted_sum(self):
        rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        assert_close(combine_rewards(rewards, vector(0.7, 0.3)), [0.7, 0.3])

    def test_missing_entries_are_left_out(self):
        total = combine_rewards(torch.tensor([[1.0, NAN], [NAN, NAN], [NAN, 0.0]]), vector(2.0, 1.0))
        assert total[0] == 2.0
        assert total[1].isnan()
        assert total[2] == 0.0


class TestH01UnscoredRows:
    rewards = vector(1, 0, NAN, 1)

    def test_grpo(self):
        assert_close(grpo_advantages(self.rewards, one_group(4), "none"), [1 / 3, -2 / 3, 0, 1 / 3])
        assert_close(grpo_advantages(self.rewards, one_group(4), "group"), [0.57725, -1.15450, 0, 0.57725])

    def test_rloo(self):
        assert_close(rloo_advantages(self.rewards, one_group(4)), [0.5, -1, 0, 0.5])

    def test_logged_mean_is_over_the_scored(self):
        assert reward_statistics(self.rewards, one_group(4)).mean == pytest.approx(2 / 3)

    @pytest.mark.parametrize("rewards", [[NAN] * 4, [1, NAN, NAN, NAN]])
    def test_nothing_to_compare_with(self, rewards):
        for scale in SCALES:
            assert_close(grpo_advantages(vector(*rewards), one_group(4), scale), [0, 0, 0, 0])
        for normalize in (False, True):
            assert_close(rloo_advantages(vector(*rewards), one_group(4), normalize), [0, 0, 0, 0])
        described = reward_statistics(vector(*rewards), one_group(4))
        assert math.isfinite(described.mean)
        assert (described.std, described.frac_zero_std) == (0, 1)


def test_h02_groups_of_one():
    rewards, groups = vector(0.3, 0.9), torch.tensor([0, 1])
    for scale in SCALES:
        assert_close(grpo_advantages(rewards, groups, scale), [0, 0])
    assert_close(rloo_advantages(rewards, groups), [0, 0])
    described = reward_statistics(rewards, groups)
    assert described.mean == pytest.approx(0.6)
    assert described.frac_zero_std == 1


def test_h02_a_single_value_with_batch_scaling():
    assert_close(grpo_advantages(vector(0.3), one_group(1), "batch"), [0])
    assert reward_statistics(vector(0.3), one_group(1)).std == 0


def test_h10_one_group():
    assert_close(grpo_advantages(vector(1, 1, 0, 0), one_group(4), "none"), [0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [0.5, -0.5, 5, -5]),
        ("group", [0.70701, -0.70701, 0.70710, -0.70710]),
        ("batch", [0.10296, -0.10296, 1.02958, -1.02958]),
    ],
)
def test_h12_scales(scale, expected):
    assert_close(grpo_advantages(vector(1, 0, 10, 0), torch.tensor([0, 0, 1, 1]), scale), expected)


def test_h13_failed_rollout_contributes_nothing():
    assert_close(grpo_advantages(vector(1, NAN, 0), one_group(3), "none"), [0.5, 0, -0.5])


class TestH14EqualRewards:
    groups = torch.tensor([0, 0, 1, 1])

    def test_one_group_of_two(self):
        rewards = vector(1, 1, 0, 1)
        assert_close(grpo_advantages(rewards, self.groups, "none"), [0, 0, -0.5, 0.5])
        assert reward_statistics(rewards, self.groups).frac_zero_std == 0.5

    def test_all_groups(self):
        rewards = vector(1, 1, 0, 0)
        assert grpo_advantages(rewards, self.groups, "group").abs().max() == 0
        assert reward_statistics(rewards, self.groups).frac_zero_std == 1

    def test_rounding_is_not_a_signal(self):
        for reward in (0.1, 1 / 3, 12.7):
            rewards = torch.full((7,), reward)
            assert grpo_advantages(rewards, one_group(7)).abs().max() == 0
            assert rloo_advantages(rewards, one_group(7)).abs().max() == 0


def test_unknown_scale_is_named():
    with pytest.raises(ValueError, match=r"'rows'.*group, batch, none"):
        grpo_advantages(vector(1), one_group(1), "rows")


def test_inputs_are_left_alone():
    rewards = vector(1, NAN, 0)
    rloo_advantages(rewards, one_group(3), normalize=True)
    assert rewards[0] == 1
    assert rewards[1].isnan()


# An independent reference: loops over dictionaries of lists.


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def loop_grpo(rewards: list[float], groups: list[int], scale: str) -> list[float]:
    scored = [r for r in rewards if not math.isnan(r)]
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        if math.isnan(reward):
            result.append(0.0)
            continue
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        divisor = {"none": 1.0, "group": deviation(members) + 1e-4, "batch": deviation(scored) + 1e-4}[scale]
        result.append((reward - sum(members) / len(members)) / divisor)
    return result


def loop_rloo(rewards: list[float], groups: list[int], normalize: bool) -> list[float]:
    result: list[float | None] = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [
            r
            for j, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if j != i and g == group and not math.isnan(r)
        ]
        if math.isnan(reward):
            result.append(None)
        else:
            result.append(reward - sum(others) / len(others) if others else 0.0)
    if normalize:
        known = [a for a in result if a is not None]
        mean, std = sum(known) / len(known), deviation(known)
        result = [None if a is None else (a - mean) / (std + 1e-4) for a in result]
    return [0.0 if a is None else a for a in result]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_and_group_sizes_match_loops(seed):
    rng = random.Random(seed)
    groups = [g for g in range(5) for _ in range(rng.randint(1, 6))]
    rng.shuffle(groups)
    rewards = [NAN if rng.random() < 0.2 else rng.uniform(-2, 2) for _ in groups]
    rewards[0] = 1.0
    rewards_R, group_R = vector(*rewards), torch.tensor(groups) * 1000 - 7
    for scale in SCALES:
        expected = vector(*loop_grpo(rewards, groups, scale))
        torch.testing.assert_close(grpo_advantages(rewards_R, group_R, scale), expected, atol=2e-4, rtol=1e-4)
    for normalize in (False, True):
        expected = vector(*loop_rloo(rewards, groups, normalize))
        actual = rloo_advantages(rewards_R, group_R, normalize)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def loop_gdpo(rewards: list[list[float]], weights: list[float], groups: list[int]) -> list[float]:
    sums: list[float] = []
    for row, group in zip(rewards, groups, strict=True):
        total = 0.0
        for f, weight in enumerate(weights):
            if math.isnan(row[f]):
                continue
            members = [r[f] for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r[f])]
            total += weight * (row[f] - sum(members) / len(members)) / (deviation(members) + 1e-4)
        sums.append(NAN if all(math.isnan(value) for value in row) else total)
    known = [s for s in sums if not math.isnan(s)]
    mean, std = sum(known) / len(known), deviation(known)
    return [0.0 if math.isnan(s) else (s - mean) / (std + 1e-4) for s in sums]


@pytest.mark.parametrize("seed", range(10))
def test_gdpo_matches_loops(seed):
    """H01: also with rewards that did not apply, rows that nothing scored and groups of one."""
    rng = random.Random(seed)
    groups = [g for g in range(4) for _ in range(rng.randint(1, 5))]
    rng.shuffle(groups)
    weights = [1.0, 0.3, -2.0]
    scales = [1.0, 100.0, 0.01]
    rewards = [[NAN if rng.random() < 0.2 else rng.uniform(-1, 1) * s for s in scales] for _ in groups]
    rewards[0] = [0.1, NAN, 0.0]
    rewards[-1] = [NAN] * 3
    actual = gdpo_advantages(torch.tensor(rewards, dtype=torch.float64), vector(*weights), torch.tensor(groups))
    torch.testing.assert_close(actual, vector(*loop_gdpo(rewards, weights, groups)), atol=1e-4, rtol=1e-4)


def test_gdpo_tells_apart_what_has_the_same_sum():
    """Two ways to a total of 1: to GRPO they are the same, to GDPO the rarer one is worth more."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    grpo = grpo_advantages(rewards.sum(1), one_group(4))
    gdpo = gdpo_advantages(rewards, vector(1, 1), one_group(4))
    assert grpo[0] == grpo[1]
    assert gdpo[0] > gdpo[1] + 0.1


def test_gdpo_with_nothing_scored_is_zero():
    assert_close(gdpo_advantages(torch.full((3, 2), NAN), vector(1, 1), one_group(3)), [0, 0, 0])


def test_a_group_is_flat_when_no_column_spreads():
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    values = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 1], [NAN, 5], [3, NAN]])
    assert flat_rows(values, groups).tolist() == [True, True, False, False, True, True]
    assert flat_rows(values.sum(1, keepdim=True), groups).tolist() == [True] * 6
