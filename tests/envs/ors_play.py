"""Plays scripted episodes on ORS servers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from agentrl.envs import ORS
from agentrl.generation.base import SamplingParams
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Task, Trajectory
from tests.envs.servers import ServerProcess
from tests.rollout.helpers import call, renderer, turn

Says = str | Callable[[], str]


def use(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return call(name, json.dumps(arguments))


class Stage:
    """An engine on an ORS environment whose model says the same in every attempt.

    Args:
        ors: The environment.
        retries: Attempts after the first.
        settings: For the engine.
    """

    def __init__(self, ors: ORS, *, retries: int = 0, **settings: Any) -> None:
        self.says: Sequence[Says] = []
        self._spoken: defaultdict[str, int] = defaultdict(int)
        self._ors = ors
        self.engine = RolloutEngine(
            ScriptedGenerator(self._speak),
            renderer(),
            environments=ors,
            failures=FailurePolicy(retries=retries, delay=0.01, max_rate=1.0),
            **settings,
        )

    def _speak(self, session: str, ids: list[int], params: SamplingParams) -> list[int]:
        said = self.says[self._spoken[session]]
        self._spoken[session] += 1
        return turn(said() if callable(said) else said)

    def play(self, *says: Says, task: dict[str, Any] | None = None, count: int = 1) -> list[Trajectory]:
        """Play rollouts in which the model says this, turn by turn; a function is asked when its turn comes."""
        self.says = says
        columns = {"task": json.dumps(task or {})}
        trajectories = self.engine.run([Task("g", member, 7, None, columns) for member in range(count)])
        for trajectory in trajectories:
            assert_row_invariants(trajectory)
        self.engine.release(trajectories)
        return trajectories

    def close(self) -> None:
        self.engine.close()


def play(ors: ORS, *says: Says, task: dict[str, Any] | None = None, **settings: Any) -> Trajectory:
    """One rollout on an engine of its own."""
    stage = Stage(ors, **settings)
    try:
        (trajectory,) = stage.play(*says, task=task)
    finally:
        stage.close()
    return trajectory


def state(server: ServerProcess) -> dict[str, Any]:
    """What the server tells about itself."""
    return httpx.get(f"{server.url}/health/sessions", trust_env=False).json()


def contents(trajectory: Trajectory) -> list[Any]:
    """What the model was told, call by call."""
    return [result.content for turn in trajectory.turns for result in turn.results]
