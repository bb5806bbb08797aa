"""Rollouts that have a sandbox each, played by the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.envs.sandbox import SandboxEnvironment, SandboxPool
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.environments import EnvironmentSpec
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome
from tests.envs.sandbox.conftest import Place
from tests.rollout.helpers import call, renderer, run_and_close, tasks, turn


class Counting(SandboxEnvironment):
    """The file `number` holds a number; one more is right."""

    view = None

    async def reset(self, number: int, **columns: Any) -> str:
        await super().reset()
        await self.sandbox.put(str(number).encode(), "number")
        self.number = number
        return "?"

    async def get_reward(self) -> float:
        return float(await self.sandbox.get("number") == str(self.number + 1).encode())


def test_its_methods_are_the_tools_and_none_leaves_one_out(place: Place) -> None:
    pool = SandboxPool(place.backend, place.spec())
    assert sorted(EnvironmentSpec.of(SandboxEnvironment(pool)).tools) == ["bash", "edit", "python", "view"]
    assert sorted(EnvironmentSpec.of(Counting(pool)).tools) == ["bash", "edit", "python"]


@pytest.mark.usefixtures("clean")
def test_each_rollout_has_a_sandbox_of_its_own(place: Place) -> None:
    turns = [
        turn(call("bash", json.dumps({"command": "n=$(cat number); ls /tmp/mine; touch /tmp/mine"}))),
        turn(call("bash", json.dumps({"command": "echo -n $((n+1)) > number"}))),
        turn(call("python", json.dumps({"code": "open('number').read()"}))),
        turn("ok"),
    ]
    left: dict[Any, list[Any]] = {}
    generator = ScriptedGenerator(lambda session, ids, params: left.setdefault(session, list(turns)).pop(0))
    rows = [task for number in (3, 5) for task in tasks(2, number=number)]
    with SandboxPool(place.backend, place.spec(), warm=1) as pool:
        engine = RolloutEngine(generator, renderer(), environments=lambda: Counting(pool))
        trajectories = run_and_close(engine, rows)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 4
    shown = [result.content for trajectory in trajectories for t in trajectory.turns for result in t.results]
    assert sum("No such file" in str(content) for content in shown) == 4
    assert {content for content in shown if str(content).startswith("'")} == {"'4'", "'6'"}


@pytest.mark.usefixtures("clean")
def test_a_sandbox_that_dies_is_no_reward_and_leaves_nothing(place: Place) -> None:
    """I4: what killed the sandbox is not the model's reward."""
    turns = [turn(call("bash", json.dumps({"command": "kill -9 -1; sleep 9"}))), turn("ok")]
    left: dict[Any, list[Any]] = {}
    generator = ScriptedGenerator(lambda session, ids, params: left.setdefault(session, list(turns)).pop(0))
    failures = FailurePolicy(delay=0, retries=1, max_rate=1.0)
    with SandboxPool(place.backend, place.spec(), warm=0) as pool:
        engine = RolloutEngine(generator, renderer(), environments=lambda: Counting(pool), failures=failures)
        (trajectory,) = run_and_close(engine, tasks(1, number=1))
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert trajectory.reward is None
