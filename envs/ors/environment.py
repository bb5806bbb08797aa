"""One environment instance: an episode of a task on an ORS server, under the contract of `rollout.environments`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

from agentrl.envs.ors.server import Server
from agentrl.envs.ors.session import Session
from agentrl.envs.ors.wire import MODEL_MISTAKES, Content, Output, Refusal, Terminal, ToolList, read_json
from agentrl.errors import EnvironmentFailure, EpisodeDone


class ORSEnvironment:
    """Plays tasks of an ORS environment; made by `ORS`.

    Args:
        server: Where.
        prefix: Path of the environment there.
        tools: The tools that all of its tasks share.
        reward: How the rewards of an episode's calls become one: their sum, or the last of them.

    Attributes:
        tool_schemas: The tools of the present task.
        rewards: What the calls of the episode have been rewarded with, in order.
        finished: Whether the environment has ended the episode.
    """

    def __init__(self, server: Server, prefix: str, tools: ToolList, reward: Literal["sum", "last"]) -> None:
        self._server = server
        self._prefix = prefix
        self._how = reward
        self._session: Session | None = None
        self._terminal: Terminal | None = None
        self._turn = asyncio.Lock()
        self.tool_schemas = tools.schemas
        self.rewards: list[float] = []
        self.finished = False

    async def reset(self, task: str) -> Content:
        """Open a session for a task, given as JSON; gives its prompt."""
        await self.close()
        self.rewards, self.finished = [], False
        self._session = session = Session(self._server, self._prefix)
        prompt, tools = await session.open(read_json(task, "the dataset's column `task`"))
        self.tool_schemas, self._terminal = tools.schemas, tools.terminal
        return prompt

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Content:
        """Run a tool on the server. The calls of one turn run one after the other, as the model wrote them."""
        _check_json(arguments)
        async with self._turn:
            if self.finished:
                raise ValueError("the episode is over; the call was not made")
            result = await self._call(name, arguments)
        if isinstance(result, Refusal):
            raise ValueError(result.error)
        if result.finished:
            raise EpisodeDone(result.content)
        return result.content

    async def get_reward(self, answer: str | None = None) -> float | None:
        """Hand the final answer in where the task has a tool for that; end the session; tell the reward.

        Returns:
            0.0 for an episode that earned nothing. None where the environment ended it and no call was rewarded: then
            it gives no rewards, or its reward was NaN, which the server writes as if there were none.

        Raises:
            EnvironmentFailure: The answer was not graded, or the reward of an earlier call is not known.
        """
        if answer is not None and self._session is not None:
            self._session.settle()
        if answer is not None and self._terminal is not None and not self.finished:
            argument = self._terminal.argument
            # An answer that the tool does not take earns nothing; what was earned before stays.
            await self._call(self._terminal.name, {} if argument is None else {argument: answer})
        await self.close()
        if not self.rewards:
            return None if self.finished else 0.0
        return self.rewards[-1] if self._how == "last" else sum(self.rewards)

    async def close(self) -> None:
        """Delete the session, if one is open."""
        if self._session is not None:
            await self._session.delete()
            self._session = None

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Output | Refusal:
        if self._session is None:
            raise EnvironmentFailure("there is no session")
        result = await self._session.call(name, arguments)
        if isinstance(result, Output):
            self.rewards += [result.reward] if result.reward is not None else []
            self.finished = result.finished
        elif result.reason not in MODEL_MISTAKES:
            raise EnvironmentFailure(f"the server did not run {name!r} ({result.reason}): {result.error}")
        return result


def _check_json(arguments: Mapping[str, Any]) -> None:
    """Refuse, as the model's mistake, what no JSON can carry: NaN, infinities, half a surrogate pair."""
    json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
