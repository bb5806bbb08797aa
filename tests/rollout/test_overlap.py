"""The order in which rollouts that are ready together get to run."""

from __future__ import annotations

from agentrl.generation.base import SamplingParams
from agentrl.rollout.engine import RolloutEngine
from agentrl.testing.scripted import ScriptedGenerator
from tests.rollout.helpers import call, renderer, tasks, turn

ROLLOUTS = 8


def test_tools_start_before_later_rollouts_are_sampled() -> None:
    """Rendering and parsing of later rollouts must hide behind the tools of earlier ones."""
    events: list[str] = []

    def policy(session: str, ids: list[int], params: SamplingParams) -> list[int]:
        first = session not in sampled
        sampled.add(session)
        events.append("sample")
        return turn(call("look") * 3 if first else "ok")

    async def look() -> str:
        """Look around."""
        events.append("tool")
        return "x"

    sampled: set[str] = set()
    engine = RolloutEngine(ScriptedGenerator(policy), renderer(), tools=[look])
    engine.run(tasks(ROLLOUTS))
    engine.close()
    assert events.count("tool") == 3 * ROLLOUTS
    assert events[:5].count("tool") == 3  # those of the first rollout; at most one other was sampled meanwhile
