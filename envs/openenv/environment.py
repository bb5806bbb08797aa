"""An OpenEnv session as an agentrl environment.

One instance plays one episode at a time, on one connection. The connection is kept for the next episode unless somebody
waits for a session; within an episode a lost one is the end of it.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from agentrl.envs.openenv.connection import Connection
from agentrl.envs.openenv.content import observation_content, result_content
from agentrl.envs.openenv.protocol import ErrorCode, Observation, ProtocolError, ServerError
from agentrl.envs.openenv.tools import LIST_TOOLS, Style, Tool, mcp_tools
from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.types import StepReward

if TYPE_CHECKING:
    from agentrl.envs.openenv.server import Server


class Reward(StrEnum):
    """What the rewards of an episode's steps come to."""

    SUM = "sum"
    LAST = "last"
    STEPS = "steps"
    """Each is given to the turn that made the step; the episode as a whole has none."""


def episode_reward(kind: Reward | None, given: Sequence[float], done: bool) -> float | None:
    """The reward of an episode.

    Args:
        kind: How it is made of those of the steps, None for not at all.
        given: The rewards of the steps that had one.
        done: Whether the environment ended the episode.

    Returns:
        0.0 for an episode that never got anywhere: no step was rewarded, and the environment did not end it. None
        where the environment ended it without any reward: either it gives none, or what it gave was NaN, which
        arrives as null.
    """
    if kind in (None, Reward.STEPS) or (done and not given):
        return None
    return sum(given) if kind is Reward.SUM else next(reversed(given), 0.0)


class OpenEnvEnvironment:
    """Plays episodes on a server.

    Attributes:
        tool_schemas: The tools that the model may call.
        done: Whether the environment has ended the episode.
        observation: The fields of the last observation, for reward functions.
        rewards: The rewards of the episode's steps that had one, in order.
        steps: How many steps the episode has had.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self.done = False
        self.observation: dict[str, Any] = {}
        self.rewards: list[float] = []
        self.steps = 0
        self._use(server.enter())

    async def reset(self, seed: int, **columns: Any) -> Any:
        """Begin an episode: what the environment shows first, None if it shows nothing."""
        self.done, self.rewards, self.steps = False, [], 0
        data = {"seed": seed} | {name: _column(columns, name) for name in self._server.columns}
        self._connection = await self._server.lease(self._connection)
        async with self._server.post_mortem():
            answer = await self._connection.reset(data, "in reset")
            if isinstance(answer, ServerError):
                raise self._connection.lose(f"could not reset its environment: {answer.code}: {answer}")
            if answer.done:
                raise self._connection.lose("says that the episode is over (`done`) before it has begun, in reset")
            self.observation = answer.fields
            if self._server.style is Style.MCP:
                self._use(await list_tools(self._connection))
        with self._believing("in reset"):
            return self._shown(observation_content, answer.fields) or None

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Take a step: what the environment shows then.

        Raises:
            ValueError: The action does not fit, or the episode is over.
            RuntimeError: The environment raised.
            EnvironmentFailure: The connection is lost.
        """
        # Calls of one turn wait for each other here, in the order in which the model wrote them.
        async with self._turn:
            if self.done:
                raise ValueError("the episode is over, nothing more can be done in it")
            assert self._connection is not None, "`reset` comes first"
            self.steps += 1
            what = f"in step {self.steps} ({name})"
            tool = self._tools[name]
            async with self._server.post_mortem():
                answer = await self._connection.step(tool.action(arguments), what)
            if isinstance(answer, ServerError):
                raise (ValueError if answer.code is ErrorCode.VALIDATION_ERROR else RuntimeError)(str(answer))
            self._take(answer)
            with self._believing(what):
                return self._answered(tool, answer)

    async def get_reward(self) -> float | None:
        """The reward of the episode; frees the session if somebody waits for one."""
        assert self._connection is not None, "`reset` comes first"
        async with self._server.post_mortem():
            await self._connection.settle(f"after step {self.steps}")
        await self._server.rest(self._connection)
        return episode_reward(self._server.reward, self.rewards, self.done)

    async def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            await self._connection.close()
        await self._server.leave(self)

    def _use(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.tool_schemas = [tool.description for tool in tools]

    def _take(self, answer: Observation) -> None:
        """Take an observation into the books of the episode."""
        self.observation, self.done = answer.fields, answer.done
        if answer.reward is not None:
            self.rewards.append(answer.reward)

    def _answered(self, tool: Tool, answer: Observation) -> Any:
        """What the model is told, with the reward of its turn where turns are rewarded."""
        error = tool_error(answer.fields) if tool.mcp else None
        turn_reward = answer.reward if self._server.reward is Reward.STEPS else None
        if error is not None and turn_reward is None:
            raise error
        if error is not None:
            content: Any = f"Error: {error}"  # an exception would carry no reward
        else:
            content = self._shown(tool_content if tool.mcp else observation_content, answer.fields)
        return content if turn_reward is None else StepReward(content, turn_reward)

    def _shown(self, otherwise: Callable[[dict[str, Any]], Any], fields: dict[str, Any]) -> Any:
        return (self._server.render or otherwise)(fields)

    @contextmanager
    def _believing(self, what: str) -> Iterator[None]:
        """Lose the connection over an answer that reads well and is wrong inside."""
        try:
            yield
        except ProtocolError as error:
            assert self._connection is not None
            raise self._connection.lose(f"broke the protocol {what}: {error}") from error


async def list_tools(connection: Connection) -> list[Tool]:
    """Ask an environment for the tools of its MCP server.

    Raises:
        EnvironmentFailure: It does not list them.
    """
    what = "when asked for its tools"
    answer = await connection.step(LIST_TOOLS, what)
    if isinstance(answer, ServerError):
        raise connection.lose(f"could not list its tools: {answer.code}: {answer} (style)")
    try:
        return mcp_tools(answer.fields.get("tools"))
    except ProtocolError as error:
        raise connection.lose(f"broke the protocol {what}: {error} (style)") from error


def tool_error(fields: Mapping[str, Any]) -> Exception | None:
    """The exception to raise for a call of an MCP tool that failed, None for one that did not.

    Raises:
        ProtocolError: The answer says neither.
        EnvironmentFailure: The environment could not reach its tools.
    """
    error, result = fields.get("error"), fields.get("result")
    if error is None:
        failed = isinstance(result, dict) and result.get("is_error") is True
        return RuntimeError(result_content(result)) if failed else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise ProtocolError(f"the error of a tool reads {reprlib.repr(error)}")
    if (kind := error.get("error_type")) == "transport_error":
        raise EnvironmentFailure(f"the environment cannot reach its tools: {error['message']}")
    return (ValueError if kind in ("invalid_args", "tool_not_found") else RuntimeError)(error["message"])


def tool_content(fields: Mapping[str, Any]) -> Any:
    """What the model is shown of a call of an MCP tool."""
    return result_content(fields.get("result"))


def _column(columns: Mapping[str, Any], name: str) -> Any:
    """The value of a dataset column for `reset`, as the user's mistake if it cannot be sent."""
    if name not in columns:
        raise ConfigurationError(f"OpenEnv(columns=...) names {name!r}, but the dataset only has {sorted(columns)}")
    try:
        json.dumps(columns[name], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"OpenEnv(columns=...) names {name!r}, whose value {reprlib.repr(columns[name])} is no JSON: {error}"
        ) from error
    return columns[name]
