"""Rows are shared out so that the step is short, and every row is trained once."""

from __future__ import annotations

import itertools
import random

import pytest

from agentrl.testing.models import tiny_model
from agentrl.training.balance import Costs, RowSize, assign, plan_window
from agentrl.training.batching import Layout


def draw(groups: int, size: int, seed: int) -> list[RowSize]:
    """Groups with prompts of 100 to 800 tokens."""
    chance = random.Random(seed)
    return [
        RowSize(str(group), prompt, chance.randint(50, 900), 50)
        for group in range(groups)
        for prompt in [chance.randint(100, 800)]
        for _ in range(size)
    ]


def busiest(plan: list[list[list[int]]], rows: list[RowSize], costs: Costs) -> float:
    return max(sum(costs([rows[r] for r in part]) for part in parts) for parts in plan)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(("processes", "batches"), [(1, 1), (1, 4), (4, 1), (2, 8), (4, 4), (3, 5)])
def test_every_row_is_trained_once_and_no_micro_batch_is_empty(layout, processes, batches):
    rows = draw(8, 4, seed=processes + batches)
    costs = Costs(layout, pair=1e-3, target=0.5)
    plan = assign(rows, costs, processes=processes, batches=batches)
    assert [len(parts) for parts in plan] == [batches] * processes
    assert sorted(itertools.chain(*itertools.chain(*plan))) == list(range(len(rows)))
    assert all(itertools.chain(*plan))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("seed", range(5))
def test_processes_have_about_the_same_work(layout, seed):
    """16 groups on 4 processes: at most a tenth above the mean, and never above what was played."""
    rows = draw(16, 8, seed)
    costs = Costs(layout)
    plan = assign(rows, costs, processes=4, batches=2)
    played = [[list(range(p * 32 + b * 16, p * 32 + b * 16 + 16)) for b in range(2)] for p in range(4)]
    work = [sum(costs([rows[r] for r in part]) for part in parts) for parts in plan]
    assert max(work) <= busiest(played, rows, costs)
    assert max(work) < 1.1 * sum(work) / 4


def test_the_best_assignment_of_a_small_step_is_nearly_found():
    """Against all assignments of 8 rows to 2 processes."""
    rows = draw(8, 1, seed=3)
    costs = Costs(Layout.PACKED)
    best = min(
        busiest([[list(chosen)], [[r for r in range(8) if r not in chosen]]], rows, costs)
        for count in range(1, 8)
        for chosen in itertools.combinations(range(8), count)
    )
    assert busiest(assign(rows, costs, processes=2, batches=1), rows, costs) < 1.15 * best


def test_padded_rows_lie_beside_rows_of_their_length():
    rows = [RowSize(str(r), 10, length, 1) for r, length in enumerate([500, 20, 480, 10])]
    plan = assign(rows, Costs(Layout.PADDED), processes=1, batches=2)
    assert sorted(map(sorted, plan[0])) == [[0, 2], [1, 3]]


def test_a_group_with_a_shared_prompt_stays_together():
    rows = [RowSize(group, 500, 50, 10) for group in "abab"]
    plan = assign(rows, Costs(Layout.SHARED), processes=1, batches=2)
    assert sorted(map(sorted, plan[0])) == [[0, 2], [1, 3]]


def test_rows_stay_where_they_were_played_if_nothing_is_gained():
    rows = [RowSize("a", 5, 5, 5)] * 8
    assert assign(rows, Costs(Layout.SHARED), processes=2, batches=2) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_costs_by_hand():
    """Two layers of width 32; the head counts apart."""
    model = tiny_model("qwen3")
    head = 64 * 32
    layers = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n and "lm_head" not in n)
    costs = Costs.of(model, Layout.SHARED)
    assert costs.pair == pytest.approx(2 * 2 * 32 / layers, rel=0.01)
    assert costs.target == pytest.approx(head / layers, rel=0.01)
    rows = [RowSize("a", 3, 2, 1), RowSize("a", 3, 4, 2)]
    pairs = 3**2 / 2 + (5**2 - 3**2) / 2 + (7**2 - 3**2) / 2
    assert costs(rows) == pytest.approx(3 + 2 + 4 + costs.pair * pairs + costs.target * 3)
    padded = Costs(Layout.PADDED, costs.pair, costs.target)
    assert padded(rows) == pytest.approx(2 * (7 + costs.pair * 7**2 / 2) + costs.target * 3)
    packed = Costs(Layout.PACKED, costs.pair, costs.target)
    assert packed(rows) == pytest.approx(12 + costs.pair * (5**2 + 7**2) / 2 + costs.target * 3)


def test_rows_of_a_window_stay_in_their_optimizer_step():
    """Two processes of 4 micro-batches of 2 rows, two of which make a step."""
    rows = draw(4, 4, seed=1)
    plan = plan_window(rows, Costs(Layout.PACKED), processes=2, batches=4, size=2, together=2)
    assert [len(parts) for parts in plan] == [4, 4]
    first = itertools.chain(*(part for parts in plan for part in parts[:2]))
    assert sorted(first) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="1 rows do not fill 2 micro-batches"):
        assign([RowSize("a", 1, 1, 1)], Costs(Layout.PACKED), processes=2, batches=1)
