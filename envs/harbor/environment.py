"""One environment instance: episodes of Harbor tasks, each in a sandbox of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.envs.harbor.agent import Agent
from agentrl.envs.harbor.errors import Fault, HarborFailure
from agentrl.envs.harbor.rewards import Rewards, combine, passes, score
from agentrl.envs.harbor.sandboxes import Home, Source
from agentrl.envs.harbor.task import HarborTask, Healthcheck, Step
from agentrl.envs.harbor.verifier import forget, verify
from agentrl.errors import ConfigurationError, EnvironmentFailure, EpisodeDone

SETUP_SECONDS = 600.0
SETUP = 'test ! -f setup.sh || { sh setup.sh; status=$?; rm -f setup.sh; exit "$status"; }'

OVER = "The time for this part of the task is over."
NEXT = "The next part of the task:"


class HarborEnvironment:
    """Plays Harbor tasks; made by `Harbor`.

    Args:
        tasks: The tasks, by what the dataset's column `task` says.
        source: Where sandboxes come from.
        tools: Names of the tools that the model has.
        reward_key: The reward that counts.
        timeout: Seconds of one call of `bash` or `python`.
        max_output: Bytes of output that one call shows.

    Attributes:
        tool_schemas: The tools of the present task; one of several steps has `submit` in any case.
        rewards: All rewards of the episode that was verified last, by name.
    """

    def __init__(
        self,
        tasks: Mapping[str, HarborTask],
        source: Source,
        tools: Sequence[str],
        reward_key: str,
        timeout: float,
        max_output: int,
    ) -> None:
        self._tasks = tasks
        self._source = source
        self._names = tuple(tools)
        self._key = reward_key
        self._agent = Agent(timeout, max_output)
        self._turn = asyncio.Lock()
        self._home: Home | None = None
        self._left: float | None = None
        self.tool_schemas = self._agent.schemas(self._names)
        self.rewards: Rewards = {}

    async def reset(self, task: str) -> str:
        """Start a task's sandbox; gives its first instruction."""
        await self.close()
        if task not in self._tasks:
            raise ConfigurationError(f"task={task!r} is none of this Harbor's {len(self._tasks)} tasks; use tasks()")
        self._task = self._tasks[task]
        several = len(self._task.steps) > 1
        self.tool_schemas = self._agent.schemas((*self._names, "submit") if several else self._names)
        self._verdicts: list[Rewards] = []
        self._ended = self._moving = False
        self._number = 0
        self.rewards = {}
        self._home = await self._source.start(self._task.place)
        self._agent.forget()
        await _check_health(self._home, self._task.place.healthcheck)
        await self._begin(self._home)
        return self._step.instruction

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool. The calls of one turn run one after the other, as the model wrote them.

        The seconds that a task gives its agent are those of its tools. How long the model thinks depends on what else
        this machine does, and is limited by the trainer's `rollout_timeout`.
        """
        async with self._turn:
            self._require_home()
            if self._ended:
                raise ValueError("the task is over; the call was not made")
            if name == "submit":
                return await self._submit()
            answer = await self._act(name, arguments)
            return await self._submit(OVER) if answer is None else answer

    async def get_reward(self) -> float:
        """Run the verifier; gives the reward that counts.

        Steps that the model did not come to are verified too, with nothing done in them: leaving a step out earns no
        more than failing it.
        """
        while not self._ended:
            await self._advance()
        self.rewards = combine(self._verdicts, self._task.strategy)
        await self.close()
        return score(self.rewards, self._key)

    async def close(self) -> None:
        """Stop the sandbox."""
        home, self._home = self._home, None
        if home is not None:
            try:
                await self._agent.leave()
            finally:
                await home.sandbox.stop()

    @property
    def _step(self) -> Step:
        return self._task.steps[self._number]

    async def _act(self, name: str, arguments: dict[str, Any]) -> str | None:
        """Run a tool of the agent within its time; None if that is over."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await self._agent.call(name, arguments)
        except TimeoutError:
            return None
        finally:
            if self._left is not None:
                self._left = max(0.0, self._left - (time.monotonic() - began))

    async def _submit(self, note: str = "") -> str:
        """End the present step; gives the instruction of the next, or ends the episode."""
        if self._number + 1 < len(self._task.steps):
            await self._advance()
            if not self._ended:
                return f"{note}\n{NEXT}\n\n{self._step.instruction}".strip()
        raise EpisodeDone(note or "The task is over.")  # what is left to verify is verified by `get_reward`

    async def _advance(self) -> None:
        """Verify the present step, and begin the next if there is one that may be played."""
        home = self._require_home()
        self._moving = True
        rewards = await verify(self._step, home, self._source)
        self._verdicts.append(rewards)
        last = self._number + 1 == len(self._task.steps)
        if last or not passes(rewards, self._step.min_reward, self._key):
            self._ended = True
        else:
            self._number += 1
            await forget(home)
            await self._begin(home)
        self._moving = False

    async def _begin(self, home: Home) -> None:
        """Put a step's files in place, and let the agent in."""
        step = self._step
        if step.workdir is not None:
            await home.fill(step.workdir)
            result = await home.exec(SETUP, timeout=SETUP_SECONDS)
            if not result.ok:
                raise HarborFailure(Fault.SETUP, f"{step.name}: setup.sh ended with exit code {result.exit_code}")
        await _check_health(home, step.healthcheck)
        await self._agent.enter(home.of(step.user))
        self._left = step.timeout

    def _require_home(self) -> Home:
        if self._home is None:
            raise EnvironmentFailure("there is no sandbox")
        if self._moving:
            raise EnvironmentFailure(
                "the verifier between two steps was interrupted; give it time with the trainer's `tool_timeout`"
            )
        return self._home


async def _check_health(home: Home, check: Healthcheck | None) -> None:
    """Wait until a check succeeds.

    Raises:
        HarborFailure: It failed too often after `start_period`.
    """
    if check is None:
        return
    began, failures = time.monotonic(), 0
    while True:
        result = await home.exec(check.command, timeout=check.timeout)
        if result.ok:
            return
        starting = time.monotonic() - began < check.start_period
        failures += not starting
        if failures >= max(1, check.retries):
            raise HarborFailure(
                Fault.HEALTHCHECK, f"{check.command!r} failed {failures} times, last with exit code {result.exit_code}"
            )
        await asyncio.sleep(check.start_interval if starting else check.interval)
