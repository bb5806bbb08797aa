"""Which rows share a micro-batch, and which process trains them: as equal in work as whole rows allow. Pure.

What an optimizer step learns is a sum over its rows, so they may lie in any of its micro-batches on any of its
processes. Rows are lined up so that those which save each other work stand side by side (the same prompt where prompts
are shared, about the same length where rows are padded), and the line is cut into stretches whose dearest one is as
cheap as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from agentrl.training.batching import Layout

Parts = list[list[int]]
"""Micro-batches as lists of row numbers."""


class RowSize(NamedTuple):
    """What a row costs by: its group, and its tokens in prompt, completion (tool tokens included) and targets."""

    group: str
    prompt: int
    completion: int
    targets: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a forward pass cost, relative to a token's way through the layers.

    A token is multiplied with every weight of the layers, a pair of positions with the width of every layer twice (for
    the weights and for the values; Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, table 1), a target with the LM
    head.

    Attributes:
        layout: How the rows will lie.
        pair: Cost of a position's look at another one.
        target: Cost of a target.
    """

    layout: Layout
    pair: float = 0.0
    target: float = 0.0

    @classmethod
    def of(cls, model: Any, layout: Layout) -> Costs:
        """The costs of a model."""
        config = model.config.get_text_config(decoder=True)
        head = config.vocab_size * config.hidden_size
        width = 2 * config.num_hidden_layers * config.hidden_size
        layers = max(model.num_parameters(exclude_embeddings=True) - head, width)
        return cls(layout, width / layers, head / layers)

    def __call__(self, rows: Sequence[RowSize]) -> float:
        """The cost of a micro-batch."""
        *_, cost = 0.0, *self.growing(rows)
        return cost

    def growing(self, rows: Iterable[RowSize]) -> Iterator[float]:
        """The cost of a micro-batch of the first row, of the first two, and so on."""
        own = targets = 0.0
        longest = 0
        groups: set[str] = set()
        for count, row in enumerate(rows, start=1):
            length = row.prompt + row.completion
            targets += self.target * row.targets
            if self.layout is Layout.PADDED:
                longest = max(longest, length)
                own = count * self._tokens(0, longest)
            elif self.layout is Layout.PACKED or row.group not in groups:
                own += self._tokens(0, length)
            else:
                own += self._tokens(row.prompt, length)
            groups.add(row.group)
            yield targets + own

    def _tokens(self, start: int, stop: int) -> float:
        """The cost of the tokens of a row from one position to another, with all that they look back at."""
        return stop - start + self.pair * (stop**2 - start**2) / 2


def assign(rows: Sequence[RowSize], costs: Costs, *, processes: int, batches: int) -> list[Parts]:
    """Share out the rows of a step, given in the order in which the processes played them.

    Args:
        rows: The rows of all processes, at least one for each micro-batch.
        costs: What they cost.
        processes: Number of processes.
        batches: Micro-batches of each.

    Returns:
        The micro-batches of each process: as played, dealt out anew, or lined up and cut anew, whatever makes the step
        shortest (its busiest process counts, then its largest micro-batch). No micro-batch is empty.

    Raises:
        ValueError: There are fewer rows than micro-batches.
    """
    count = processes * batches
    if len(rows) < count:
        raise ValueError(f"{len(rows)} rows do not fill {count} micro-batches")

    def growing(part: Sequence[int]) -> Iterator[float]:
        return costs.growing(rows[r] for r in part)

    def cost(part: Sequence[int]) -> float:
        return costs([rows[r] for r in part])

    def length(plan: list[Parts]) -> tuple[float, float]:
        each = [[cost(part) for part in parts] for parts in plan]
        return max(map(sum, each)), max(map(max, each))

    bounds = [len(rows) * k // count for k in range(count + 1)]
    played = [list(range(*ends)) for ends in pairwise(bounds)]
    as_played = [played[p * batches : (p + 1) * batches] for p in range(processes)]
    if count == 1:
        return as_played
    line = sorted(range(len(rows)), key=_place_in_line(rows, costs.layout))
    dealt = [_deal(sorted(parts, key=cost, reverse=True), processes) for parts in (played, _cut(line, count, growing))]
    return min(as_played, *dealt, key=length)


def plan_window(
    rows: Sequence[RowSize], costs: Costs, *, processes: int, batches: int, size: int, together: int
) -> list[Parts]:
    """Share out the rows of a window, whose micro-batches may belong to several optimizer steps.

    Args:
        rows: The rows in the order played, the same number for each process.
        costs: What they cost.
        processes: Number of processes.
        batches: Micro-batches of each.
        size: Rows of a micro-batch.
        together: Successive micro-batches that are sure to belong to one optimizer step.

    Returns:
        The micro-batches of each process.
    """
    plan: list[Parts] = [[] for _ in range(processes)]
    for first in range(0, batches * size, together * size):
        starts = [process * batches * size + first for process in range(processes)]
        numbers = [start + row for start in starts for row in range(together * size)]
        step = assign([rows[number] for number in numbers], costs, processes=processes, batches=together)
        for done, parts in zip(plan, step, strict=True):
            done += [[numbers[row] for row in part] for part in parts]
    return plan


def _place_in_line(rows: Sequence[RowSize], layout: Layout) -> Callable[[int], Any]:
    if layout is Layout.PADDED:
        return lambda r: rows[r].prompt + rows[r].completion
    first: dict[str, int] = {}
    for r, row in enumerate(rows):
        first.setdefault(row.group, r)
    return lambda r: first[rows[r].group]


def _deal(parts: Parts, processes: int) -> list[Parts]:
    """Deal micro-batches, dearest first, to and fro; those that processes run at the same time cost about the same."""
    plan: list[Parts] = [[] for _ in range(processes)]
    for start in range(0, len(parts), processes):
        turn = plan if start // processes % 2 == 0 else plan[::-1]
        for process, part in zip(turn, parts[start : start + processes], strict=True):
            process.append(part)
    return plan


Growing = Callable[[Sequence[int]], Iterator[float]]
"""From rows to the costs of the first, the first two, and so on."""


def _cut(line: Sequence[int], count: int, growing: Growing) -> Parts:
    """Cut a line into stretches so that the dearest one is nearly as cheap as possible.

    The limit that a greedy walk can keep with `count` stretches is found by bisection.
    """
    low = 0.0
    *_, high = growing(line)
    best = _walk(line, count, high, growing)
    assert best is not None
    for _ in range(20):  # a millionth of the whole
        limit = (low + high) / 2
        if (parts := _walk(line, count, limit, growing)) is None:
            low = limit
        else:
            high, best = limit, parts
    return best


def _walk(line: Sequence[int], count: int, limit: float, growing: Growing) -> Parts | None:
    """Cut a line into exactly `count` stretches of at most `limit`, None if that takes more."""
    parts: Parts = []
    start = 0
    for left in range(count, 0, -1):
        last = len(line) - left + 1  # a row is left for each of the others
        within = list(takewhile(lambda cost: cost <= limit, growing(line[start:last])))
        if not within:
            return None
        parts.append(list(line[start : start + len(within)]))
        start += len(within)
    return parts if start == len(line) else None
