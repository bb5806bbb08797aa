"""Environments whose tools are known at run time only: `tool_schemas` and `call_tool`."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ToolDefinitionError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.environments import EnvironmentSpec
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome
from tests.rollout.helpers import call, renderer, tasks, turn


def description(name: str, **properties: str) -> dict[str, Any]:
    """As an MCP server lists a tool."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"name": name, "description": f"Does {name}.", "inputSchema": schema | {"required": list(properties)}}


class Remote:
    """Its first tool is always there; a task adds one of its own."""

    def __init__(self) -> None:
        self.tool_schemas = [description("add", amount="integer")]

    def reset(self, tool: str = "") -> None:
        self.total = 0
        self.tool_schemas = [description("add", amount="integer")] + ([description(tool)] if tool else [])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        if name != "add":
            return f"{name} of this task"
        self.total += arguments["amount"]
        return f"total {self.total}"

    def get_reward(self) -> float:
        return float(self.total)


class SyncRemote(Remote):
    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:  # type: ignore[override]
        self.total += arguments.get("amount", 0)
        return f"total {self.total}"


def play(environment: type, script: list[list[int]], **columns: Any) -> Any:
    turns = iter(script)
    generator = ScriptedGenerator(lambda *_: next(turns))
    engine = RolloutEngine(generator, renderer(), environments=environment)
    try:
        (trajectory,) = engine.run(tasks(1, **columns))
        engine.release([trajectory])
    finally:
        engine.close()
    assert_row_invariants(trajectory, generator.calls)
    return trajectory


@pytest.mark.parametrize("environment", [Remote, SyncRemote])
def test_described_tools_are_called_with_their_arguments(environment):
    trajectory = play(environment, [turn(call("add", '{"amount": 2}')), turn(call("add", '{"amount": 3}')), turn("ok")])
    assert [t.results[0].content for t in trajectory.turns[:2]] == ["total 2", "total 5"]
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.reward == 5.0


def test_a_task_has_tools_of_its_own_after_reset():
    trajectory = play(Remote, [turn(call("look")), turn("ok")], tool="look")
    assert trajectory.turns[0].results[0].content == "look of this task"
    other = play(Remote, [turn(call("look")), turn("ok")])
    assert other.turns[0].results[0].failed
    assert "there is no tool named 'look'" in other.turns[0].results[0].content


class Browser(Remote):
    closed = 0

    def close(self) -> None:
        type(self).closed += 1


def test_a_tool_may_have_the_name_of_a_method_that_is_none():
    """A server may well offer `close`; it is the server's, and the environment's own is not called for it."""
    trajectory = play(Browser, [turn(call("close")), turn("ok")], tool="close")
    assert trajectory.turns[0].results[0].content == "close of this task"
    assert Browser.closed == 1


def test_their_arguments_are_checked_against_the_schema():
    trajectory = play(Remote, [turn(call("add", '{"amount": "much"}')), turn("ok")])
    assert trajectory.turns[0].results[0].failed
    assert trajectory.reward == 0.0


class Half(Remote):
    call_tool = None  # type: ignore[assignment]


class Twice(Remote):
    def __init__(self) -> None:
        self.tool_schemas = [description("add"), description("add")]


class AlsoAMethod(Remote):
    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: How much.
        """
        return ""


@pytest.mark.parametrize(
    ("environment", "text"),
    [(Half, "only one of `tool_schemas` and `call_tool"), (Twice, "second tool called 'add'"), (AlsoAMethod, "second")],
)
def test_what_cannot_be_offered_is_refused_when_the_environment_is_made(environment, text):
    with pytest.raises(ToolDefinitionError, match=text.replace("`", ".").replace("(", ".")):
        EnvironmentSpec.of(environment())
