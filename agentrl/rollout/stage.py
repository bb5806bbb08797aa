"""What all episodes of an engine share, whoever owns their loop."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl.chat.renderer import Renderer
from agentrl.generation.base import UNBOUNDED_TURN, Generator, SamplingParams
from agentrl.rollout.busy import Busy
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.limits import Limits, Progress, room
from agentrl.rollout.pool import EnvironmentPool
from agentrl.rollout.tools import Tool, ToolRunner
from agentrl.types import Task, derive_seed


@dataclass(frozen=True, slots=True)
class Stage:
    """Where episodes are played.

    Attributes:
        generator: Samples turns.
        renderer: Turns messages into ids and sampled ids into messages.
        limits: The limits of every episode.
        sampling: How to draw; `max_tokens` and `seed` are set for each turn.
        runner: Runs tool calls.
        tools: The standalone tools.
        environments: Where instances come from, None without environments.
        cancelled: Set when all episodes are to end.
        asking: Measures how long the generator has something to do.
        journal: Where turns are kept, None for nowhere.
    """

    generator: Generator
    renderer: Renderer
    limits: Limits
    sampling: SamplingParams
    runner: ToolRunner
    tools: Mapping[str, Tool]
    environments: EnvironmentPool | None
    cancelled: threading.Event
    asking: Busy
    journal: Journal | None = None

    def turn_params(self, task: Task, turn: int, progress: Progress) -> SamplingParams:
        """How to draw a turn: within the room that is left, with a seed that only this turn has.

        Args:
            task: What the rollout has to do.
            turn: The number of turns that were sampled before.
            progress: Where the episode stands.
        """
        left = room(self.limits, progress)
        return replace(
            self.sampling,
            max_tokens=UNBOUNDED_TURN if left is None else left,
            seed=derive_seed(task.seed, task.member, turn),
        )
