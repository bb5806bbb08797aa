"""Finished rollouts that wait to be trained on, as a checkpoint keeps them.

They were paid for, and an asynchronous run has many of them at any time. Each process writes its own, rewarded, as
lines of JSON; a resumed run finds a rollout by its group and its place in it, whichever process plays that by now.

The journal has these rollouts too, and cannot serve instead: it gives back what ended after the checkpoint. A
checkpoint has to be whole by itself: it may be resumed elsewhere, by other numbers of processes (each reads its own
journal only), without a journal or with a pruned one. And these are rewarded: their environments are gone, and what
reward functions logged with `log_extra` is nowhere else.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.training.checkpoints import restored
from agentrl.training.data import Shape
from agentrl.training.metrics import RolloutRecord
from agentrl.types import Task, Trajectory

logger = logging.getLogger(__name__)

Place = tuple[str, int]
"""A group, and which of its members."""


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """A rollout and what it earned.

    Attributes:
        trajectory: The rollout; its environment is gone.
        rewards: One entry a reward source.
        record: Its summary.
        columns: What reward functions logged about it with `log_extra`.
    """

    trajectory: Trajectory
    rewards: list[float | None]
    record: RolloutRecord
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Where it belongs."""
        return self.trajectory.task.group, self.trajectory.task.member

    def of(self, task: Task) -> FinishedRow:
        """The same with its task as the dataset gives it, which is not written."""
        return replace(self, trajectory=replace(self.trajectory, task=task))


def save_finished(folder: str | Path, rows: Iterable[FinishedRow], shape: Shape) -> None:
    """Write this process's rollouts; the file is there whole or not at all.

    A rollout with something in it that is no JSON (an image, say) is left out, and played again after resuming.
    """
    path = Path(folder) / f"finished-{shape.rank}.jsonl"
    temporary = path.with_suffix(".part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(_groups(shape)) + "\n")
        for row in rows:
            try:
                file.write(json.dumps(_plain(row)) + "\n")
            except TypeError as error:
                logger.warning("a finished rollout of group %s is not saved: %s", row.record.group, error)
    os.replace(temporary, path)


def load_finished(folder: str | Path, shape: Shape) -> dict[Place, FinishedRow]:
    """Read the rollouts of all processes; none where groups are other ones by now."""
    rows: dict[Place, FinishedRow] = {}
    for path in sorted(Path(folder).glob("finished-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            if (groups := json.loads(next(file))) != _groups(shape):
                logger.warning(
                    "%s was written with %s, and now it is %s; its rollouts are played again",
                    path,
                    groups,
                    _groups(shape),
                )
                continue
            for line in file:
                row = restored(FinishedRow, json.loads(line))
                rows[row.place] = row
    return rows


def _plain(row: FinishedRow) -> dict[str, Any]:
    trajectory = row.trajectory
    lean = replace(
        trajectory,
        task=replace(trajectory.task, prompt=None, columns={}),
        turns=[replace(turn, results=()) for turn in trajectory.turns],  # counted in the record
        environment=None,
        extra={},
    )
    return asdict(replace(row, trajectory=lean))


def _groups(shape: Shape) -> dict[str, int]:
    """What has to be the same for a group's name to mean the same group."""
    return {"prompts": shape.prompts, "generations": shape.generations}
