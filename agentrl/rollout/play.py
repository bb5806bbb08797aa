"""Episodes that are being played while whoever asked for them does something else."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from agentrl.types import Task, Trajectory


@dataclass(eq=False, slots=True)
class Play:
    """Episodes under way; made by `RolloutEngine.start`.

    Attributes:
        tasks: What is played.
        finished: The trajectories of those that have ended, by position; grows.
        future: Done when all have ended, or when one error has ended them.
    """

    tasks: list[Task]
    finished: dict[int, Trajectory] = field(default_factory=dict)
    future: Future[list[Trajectory]] = field(default_factory=Future)
