"""Playing a script through an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Trajectory
from tests.envs.playing import engine
from tests.rollout.helpers import tasks


def play(factory: Callable[[], Any], script: Sequence[list[int]], rollouts: int = 1) -> list[Trajectory]:
    """Let each rollout sample the turns of a script, one after the other."""
    turns: dict[str, int] = {}

    def sample(session: str, ids: list[int], params: Any) -> list[int]:
        turns[session] = turns.get(session, -1) + 1
        return list(script[turns[session]])

    player = engine(ScriptedGenerator(sample), factory)
    try:
        trajectories = player.run(tasks(rollouts))
        player.release(trajectories)
    finally:
        player.close()
    for trajectory in trajectories:
        assert_row_invariants(trajectory)
    return trajectories
