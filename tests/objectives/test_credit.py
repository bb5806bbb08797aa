"""Returns of turns against hand-computed numbers and a plain sum."""

from __future__ import annotations

import math
import random

import pytest
import torch

from agentrl.objectives.advantages import SCALES, grpo_advantages
from agentrl.objectives.credit import returns_to_go

NAN = math.nan


def test_by_hand():
    """Discount 0.5: 4 + 8 = 12 at the last turn, 2 + 6 before, 1 + 4 at first; an ended one repeats its last turn."""
    returns = returns_to_go([[1.0, 2.0, 4.0], [3.0], []], torch.tensor([8.0, 1.0, 7.0]), 0.5)
    assert returns.tolist() == [[5.0, 8.0, 12.0], [4.0, 4.0, 4.0], [7.0, 7.0, 7.0]]


def test_what_is_not_scored_has_no_return():
    returns = returns_to_go([[1.0, 2.0], [0.0]], torch.tensor([NAN, 1.0]), 1.0)
    assert returns[0].isnan().all()
    assert returns[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_against_a_double_loop(discount):
    rng = random.Random(0)
    turns = [[rng.uniform(-1, 1) for _ in range(rng.randint(1, 5))] for _ in range(8)]
    outcome = [rng.uniform(-1, 1) for _ in turns]
    returns = returns_to_go(turns, torch.tensor(outcome, dtype=torch.float64), discount)
    for row, (rewards, last) in enumerate(zip(turns, outcome, strict=True)):
        received = [*rewards[:-1], rewards[-1] + last]
        for k in range(returns.shape[1]):
            first = min(k, len(received) - 1)
            expected = sum(discount ** (j - first) * received[j] for j in range(first, len(received)))
            assert returns[row, k].item() == pytest.approx(expected)


@pytest.mark.parametrize("scale", SCALES)
def test_outcomes_alone_give_every_turn_the_advantage_of_the_whole(scale):
    """Without rewards by turn and discount, credit by turn is credit by trajectory, whatever the numbers of turns."""
    outcome, groups = torch.tensor([1.0, 0.0, 1.0, NAN, 0.5, 2.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    returns = returns_to_go([[0.0] * n for n in (1, 3, 2, 2, 4, 1)], outcome, 1.0)
    whole = grpo_advantages(outcome, groups, scale)
    for k in range(4):
        assert torch.equal(grpo_advantages(returns[:, k], groups, scale), whole)
