"""Playing a recorded rollout's actions again, and where what comes of them differs from the record.

Only what belongs to the environment is done again: `reset` and the calls of its tools. Standalone tools keep no state
of the rollout, so their recorded answers stand.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rollout.journal.records import RolloutRecord, State, TurnRecord
from agentrl.rollout.journal.values import dumps
from agentrl.rollout.loop import LoopThread
from agentrl.rollout.policy import ToolPolicy
from agentrl.rollout.pool import CLOSE_SECONDS, EnvironmentPool, Factory
from agentrl.rollout.threads import Threads
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
        return f"{turn}{self.place} gave {reprlib.repr(self.seen)}, the record has {reprlib.repr(self.recorded)}"


class Diverged(Exception):  # noqa: N818 (a finding, not an error)
    """A recorded rollout cannot be continued: its environment does not do again what it did."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


def replay(
    record: RolloutRecord, environments: Factory | Mapping[str, Factory], *, timeout: float | None = 600.0
) -> Difference | None:
    """Play a recorded rollout's actions against a fresh instance of its environment, without a model.

    Args:
        record: The rollout.
        environments: Makes the environment, or several by name, of which the rollout's is taken.
        timeout: Seconds that making the instance, `reset`, `get_reward` and each call may take, None for ever.

    Returns:
        The first difference: of the prompt after `reset`, of the answer to a call, of the reward. None if the
        environment does all of it again.

    Raises:
        EnvironmentFailure: The environment broke.
        ConfigurationError: It is no environment, there is none of the rollout's name, or a program of the user's played
            the rollout.
    """
    record.check_replayable()
    loop, threads = LoopThread(), Threads()
    try:
        pool = EnvironmentPool(environments, threads, timeout=timeout)
        runner = ToolRunner(threads, policy=ToolPolicy(timeout=timeout))
        try:
            return loop.run(_replay(record, pool, runner))
        finally:
            loop.run_for(CLOSE_SECONDS, pool.close(), "closing the environment")
    finally:
        loop.close()
        threads.close()


async def _replay(record: RolloutRecord, pool: EnvironmentPool, runner: ToolRunner) -> Difference | None:
    instance = await pool.acquire(record.task.environment)
    prompt = await pool.reset(instance, record.task)
    if dumps(prompt) != dumps(record.prompt):
        return Difference("reset", record.prompt, prompt)
    difference = await reenact(record.turns, pool.bound_tools(instance), runner, record.task)
    summary = record.summary
    rewarded = summary.state is State.ENDED and summary.outcome is not None and summary.outcome.is_signal
    if difference is not None or not rewarded:
        return difference
    listed = [turn.turn.listed_reward for turn in record.turns]
    recorded = summary.reward if None in listed or not listed else listed
    seen = await pool.get_reward(instance, turns=len(record.turns))
    return None if seen == recorded else Difference("get_reward", recorded, seen)


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
