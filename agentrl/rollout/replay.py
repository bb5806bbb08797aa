"""Playing a recorded rollout's actions again, and where what comes of them differs from the record.

Only what belongs to the environment is done again: `reset` and the calls of its tools. Standalone tools keep no state
of the rollout, so their recorded answers stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rollout.journal.records import TurnRecord
from agentrl.rollout.journal.values import dumps
from agentrl.rollout.tools import Tool, ToolRunner
from agentrl.types import Task, ToolResult


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay parts from its record.

    Attributes:
        place: What was played again: the prompt, a call, the reward.
        recorded: What came of it.
        seen: What came of it now.
        turn: The turn, None for what belongs to none.
    """

    place: str
    recorded: Any
    seen: Any
    turn: int | None = None

    def __str__(self) -> str:
        turn = "" if self.turn is None else f"turn {self.turn}: "
        return f"{turn}{self.place} gave {self.seen!r}, the record has {self.recorded!r}"


class Diverged(Exception):  # noqa: N818 (a finding, not an error)
    """A recorded rollout cannot be continued: its environment does not do again what it did."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


async def reenact(
    turns: Sequence[TurnRecord], tools: Mapping[str, Tool], runner: ToolRunner, task: Task
) -> Difference | None:
    """Run the recorded calls of an environment's tools, and compare the answers with those recorded.

    Args:
        turns: The record.
        tools: What the rollout may call, environment methods bound to an instance that was just reset.
        runner: Runs the calls.
        task: What the rollout had to do, for messages.

    Returns:
        The first difference, None if there is none: the instance is then as it was.

    Raises:
        EnvironmentFailure: A tool said that its environment broke.
    """
    for number, record in enumerate(turns):
        owned = [answer for answer in record.turn.results if _is_environments(tools.get(answer.call.name))]
        if late := next((answer for answer in owned if answer.timed_out), None):
            return Difference(late.call.name, "no answer in time", "nothing: it may have done anything", number)
        seen = await runner.run([answer.call for answer in owned], tools, task)
        for old, new in zip(owned, seen, strict=True):
            if (difference := compare_answers(old, new, number)) is not None:
                return difference
    return None


def compare_answers(old: ToolResult, new: ToolResult, turn: int) -> Difference | None:
    """The difference between two answers to one call; times do not count."""
    place = f"{old.call.name}({', '.join(f'{k}={v!r}' for k, v in old.call.arguments.items())})"
    for name in ("content", "failed", "done", "reward"):
        recorded, seen = getattr(old, name), getattr(new, name)
        if dumps(recorded) != dumps(seen):
            return Difference(place if name == "content" else f"{place}: {name}", recorded, seen, turn)
    return None


def _is_environments(tool: Tool | None) -> bool:
    return tool is not None and tool.instance is not None
