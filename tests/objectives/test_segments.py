"""Reductions over rows and selections."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.objectives.segments import mean_over, row_counts, row_means, row_sums

ROWS = torch.tensor([0, 0, 2, 2, 2])
VALUES = torch.tensor([1.0, 3.0, 2.0, 4.0, 6.0])


def test_row_without_tokens_is_zero():
    assert row_counts(ROWS, 4).tolist() == [2, 0, 3, 0]
    assert row_sums(VALUES, ROWS, 4).tolist() == [4, 0, 12, 0]
    assert row_means(VALUES, ROWS, 4).tolist() == [2, 0, 4, 0]


def test_no_tokens_at_all():
    empty = torch.zeros(0, dtype=torch.int64)
    assert row_counts(empty, 2).tolist() == [0, 0]
    assert row_means(torch.zeros(0), empty, 2).tolist() == [0, 0]


def test_gradients_reach_the_values():
    values = VALUES.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: row_means(v, ROWS, 4), values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_i06_nothing_leaks_from_outside_the_mask(bad):
    values = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    mean = mean_over(values, torch.tensor([1, 0, 1]))
    assert mean.item() == 2
    mean.backward()
    assert values.grad.tolist() == [0.5, 0, 0.5]


def test_a03_tool_tokens_take_no_part():
    mask = torch.tensor([1, 1, 0, 0, 1])
    for tool in (5.0, 500.0):
        loss = torch.tensor([1.0, 1.0, tool, tool, 1.0], requires_grad=True)
        mean = mean_over(loss, mask)
        mean.backward()
        assert mean.item() == 1
        assert loss.grad[2:4].tolist() == [0, 0]


def test_mean_over_nothing_is_zero_with_a_graph():
    values = torch.tensor([math.nan], requires_grad=True)
    mean = mean_over(values, torch.tensor([False]))
    mean.backward()
    assert mean.item() == 0
    assert values.grad.tolist() == [0]
