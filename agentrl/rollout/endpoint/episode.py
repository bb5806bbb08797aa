"""One attempt of a program at one task: the counterpart of `agentrl.rollout.episode` where the program owns the loop.

With a journal, the trajectory is durable before it is given back. Single turns are not: the program's own state is
nowhere recorded, so it could not go on from them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agentrl.errors import EnvironmentFailure
from agentrl.rollout.calling import DeadlineExceeded
from agentrl.rollout.endpoint.caller import Caller
from agentrl.rollout.endpoint.programs import Agent
from agentrl.rollout.endpoint.server import Endpoint
from agentrl.rollout.failures import failure_of
from agentrl.rollout.stage import Stage
from agentrl.rollout.threads import Threads
from agentrl.types import Limit, Outcome, Task, Trajectory

Ending = tuple[Outcome, dict[str, Any]]


class AgentEpisode:
    """Plays once.

    Args:
        stage: What all episodes share.
        task: What to do.
        session: What the generator's sessions of this attempt are named after.
        agent: The program.
        endpoint: Serves it.
        threads: Where a sync program runs.
        attempt: Attempts before it.
    """

    def __init__(
        self,
        stage: Stage,
        task: Task,
        session: str,
        agent: Agent,
        endpoint: Endpoint,
        threads: Threads,
        attempt: int = 0,
    ) -> None:
        self.stage, self.task, self.session, self.attempt = stage, task, session, attempt
        self.agent, self.endpoint, self.threads = agent, endpoint, threads

    async def play(self) -> Trajectory:
        """Run the program to its end, or to the end of its time.

        Raises:
            GenerationError: The generator broke.
        """
        started = time.time()
        caller = Caller(self.stage, self.task, self.session)
        base_url, key = self.endpoint.open(caller)
        program = asyncio.create_task(self.agent.run(base_url, key, self.task, self.threads))
        try:
            outcome, fields = await self._ending(program, caller)
        finally:
            program.cancel()
            await self.endpoint.shut(key)
            await asyncio.gather(program, return_exceptions=True)
        trajectory = caller.recording.trajectory(self.task, outcome, **fields)
        if self.stage.journal is not None:
            await self.stage.journal.keep([trajectory], started=started, attempt=self.attempt)
        return trajectory

    async def _ending(self, program: asyncio.Task[tuple[float | None, dict[str, Any]]], caller: Caller) -> Ending:
        seconds = self.stage.limits.rollout_timeout
        ends: list[asyncio.Future[Any]] = [program, caller.over]
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if caller.over.done():
            caller.over.result()
            return Outcome.CANCELLED, {"limit": Limit.CANCELLED}
        played = bool(caller.recording.rows)
        if not program.done():
            if played:
                return Outcome.TIMEOUT, {"limit": Limit.ROLLOUT_TIME}
            late = f"the rollout's time ran out before its first turn was sampled (rollout_timeout={seconds:g})"
            return self._failed(DeadlineExceeded(late))
        if (error := program.exception()) is not None:
            if played and caller.limit is not None:
                return Outcome.TRUNCATED, {"limit": caller.limit}
            return self._failed(error)
        if not played:
            return self._failed(EnvironmentFailure("the program ended without a turn of the model"))
        reward, extra = program.result()
        outcome = Outcome.FINISHED if caller.limit is None else Outcome.TRUNCATED
        return outcome, {"limit": caller.limit, "reward": reward, "extra": extra}

    def _failed(self, error: BaseException) -> Ending:
        return Outcome.ENV_FAILURE, {"failure": failure_of(f"the agent {self.agent.name}", error)}
