"""Drawing a generation batch: what was played and what it earned, and drawing again what teaches nothing.

Dynamic sampling (Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476, section 3.2): a group whose members all earned
the same has advantages of zero and only dilutes the batch. It is replaced by a group of another prompt, which is played
at once with all others of its round, up to a stated number of rounds. What is still flat after the last round stays, so
that every step has its full size and every process the same number of rows. The prompts of the replacements are a
function of the seed, the window and the round; the order in which windows take their own prompts is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentrl.training.arguments import RolloutConfig
from agentrl.training.data import Schedule, Shape, Stream, make_tasks
from agentrl.training.finished import FinishedRow
from agentrl.training.metrics import RolloutRecord
from agentrl.types import Task, Trajectory

Redraw = Callable[[Sequence[int], int], list[Task]]
"""From the positions of groups in their window, and the number of the round, to this process's new tasks for them."""


def redraw_from(
    schedule: Schedule | Stream, window: tuple[int, int], shape: Shape, args: RolloutConfig
) -> Redraw | None:
    """Where a window's other prompts come from; None when dynamic sampling is off."""
    if not args.dynamic_sampling_max_rounds:
        return None
    assert isinstance(schedule, Schedule), "refused for a dataset without a length"

    def tasks(positions: Sequence[int], number: int) -> list[Task]:
        again = schedule.redraw(window, positions, number)
        return make_tasks(again, shape, seed=args.seed, redraw=number)

    return tasks


@dataclass(slots=True)
class Draw:
    """Rollouts of this process and what they earned, in row order.

    Attributes:
        trajectories: One a row.
        rewards: For each row one entry a reward source, None where it does not apply.
        records: The rows summarised.
        columns: What reward functions logged with `log_extra`, one entry a row.
        own_metrics: What reward functions logged with `log_metric`.
    """

    trajectories: list[Trajectory]
    rewards: list[list[float | None]]
    records: list[RolloutRecord]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    own_metrics: list[tuple[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, finished: Iterable[FinishedRow]) -> Draw:
        """Make a draw of rollouts that a checkpoint has kept."""
        rows = list(finished)
        names = dict.fromkeys(name for row in rows for name in row.columns)
        columns = {name: [row.columns.get(name) for row in rows] for name in names}
        return cls([r.trajectory for r in rows], [r.rewards for r in rows], [r.record for r in rows], columns)

    def rows(self) -> list[FinishedRow]:
        """The rows one by one."""
        return [
            FinishedRow(*row, {name: values[index] for name, values in self.columns.items() if index < len(values)})
            for index, row in enumerate(zip(self.trajectories, self.rewards, self.records, strict=True))
        ]

    @classmethod
    def join(cls, count: int, parts: Sequence[tuple[Sequence[int], Draw]]) -> Draw:
        """Put draws together that have `count` rows between them, each with the places of its rows."""
        if len(parts) == 1:
            return parts[0][1]
        whole = cls(*([None] * count for _ in range(3)))  # type: ignore[arg-type]
        for rows, part in parts:
            whole.replace(rows, part)
        return whole

    def replace(self, rows: Sequence[int], other: Draw) -> None:
        """Put the rows of another draw in the place of some of these."""
        count = len(self.trajectories)
        for name in self.columns.keys() | other.columns.keys():
            theirs = other.columns.get(name, [None] * len(rows))
            _put(self.columns.setdefault(name, [None] * count), rows, theirs[: len(rows)])
        _put(self.trajectories, rows, other.trajectories)
        _put(self.rewards, rows, other.rewards)
        _put(self.records, rows, other.records)
        self.own_metrics += other.own_metrics


@dataclass(slots=True)
class Discarded:
    """What was drawn again, over all processes: nothing that was played leaves the books.

    Attributes:
        rounds: Rounds played.
        groups: Groups replaced.
        tokens: Prompt and sampled tokens of the rows replaced.
        totals: Rewards of those rows, NaN where nothing scored one.
    """

    rounds: int = 0
    groups: int = 0
    tokens: int = 0
    totals: list[float] = field(default_factory=list)

    def add(self, records: Sequence[RolloutRecord], totals: Sequence[float]) -> None:
        """Count the rows that a round replaces."""
        self.rounds += 1
        self.groups += len({record.group for record in records})
        self.tokens += sum(record.tokens for record in records)
        self.totals += totals

    def metrics(self, kept: Sequence[float]) -> dict[str, float]:
        """Return the `dynamic_sampling/*` metrics, given the rewards of the rows that are trained on."""
        scored = [total for total in (*kept, *self.totals) if not math.isnan(total)]
        return {
            "dynamic_sampling/rounds": self.rounds,
            "dynamic_sampling/groups_redrawn": self.groups,
            "dynamic_sampling/reward": fmean(scored) if scored else 0.0,
        }


def _put(mine: list[Any], rows: Sequence[int], theirs: Sequence[Any]) -> None:
    for row, value in zip(rows, theirs, strict=True):
        mine[row] = value
