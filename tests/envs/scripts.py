"""Playing a script through an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Trajectory
from tests.rollout.helpers import renderer, tasks

NO_RETRY = FailurePolicy(retries=0, delay=0, max_rate=1.0)


def play(factory: Callable[[], Any], script: Sequence[list[int]], rollouts: int = 1) -> list[Trajectory]:
    """Let each rollout sample the turns of a script, one after the other."""
    turns: dict[str, int] = {}

    def sample(session: str, ids: list[int], params: Any) -> list[int]:
        turns[session] = turns.get(session, -1) + 1
        return list(script[turns[session]])

    engine = RolloutEngine(ScriptedGenerator(sample), renderer(), environments=factory, failures=NO_RETRY)
    try:
        trajectories = engine.run(tasks(rollouts))
        engine.release(trajectories)
    finally:
        engine.close()
    for trajectory in trajectories:
        assert_row_invariants(trajectory)
    return trajectories
