"""What all sessions on one server share: where it is, what it understands, and how many there may be at once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from agentrl.envs.openenv.connection import Busy, Connection, Endpoint
from agentrl.envs.openenv.container import Container
from agentrl.envs.openenv.environment import Reward, list_tools
from agentrl.envs.openenv.protocol import ProtocolError
from agentrl.envs.openenv.tools import Style, Tool, style_of, typed_tools
from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.rollout.failures import backoff
from agentrl.rollout.loop import run_once

logger = logging.getLogger(__name__)


FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
"""Seconds before a full server is asked again: at first, and at most."""


class Server:
    """A server, and the instances that play on it.

    Args:
        endpoint: Where it is; without a URL when it is started in a container.
        container: Starts it, None when somebody else did.
        style: How it is spoken to, None to find out.
        reward: What the rewards of steps come to, None if they do not count.
        columns: Dataset columns for the environment's `reset`.
        render: Shows an observation to the model, None for the usual way.
        max_sessions: Most connections at once, None for as many as the server lets in.
        capacity_timeout: Seconds to wait for a session.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        container: Container | None,
        *,
        style: Style | None,
        reward: Reward | None,
        columns: Sequence[str],
        render: Callable[[dict[str, Any]], Any] | None,
        max_sessions: int | None,
        capacity_timeout: float,
    ) -> None:
        self.style, self.reward, self.columns, self.render = style, reward, tuple(columns), render
        self._endpoint, self._container = endpoint, container
        self._max_sessions, self._capacity_timeout = max_sessions, capacity_timeout
        self._lock = threading.Lock()
        self._tools: list[Tool] | None = None
        self._instances = 0
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()
        self._resting: set[Connection] = set()
        self._waiting = 0
        self._watched = True

    def enter(self) -> list[Tool]:
        """Count an instance in; gives back the tools, which the server is asked for once."""
        with self._lock:
            if self._tools is None:
                self._tools = self._learn()
            self._instances += 1
            return self._tools

    async def leave(self, instance: Any) -> None:
        """Count an instance out; with the last one goes the container."""
        with self._lock:
            self._instances -= 1
            last = self._instances == 0
        if last and self._container is not None:
            await asyncio.to_thread(self._container.stop)

    async def lease(self, kept: Connection | None) -> Connection:
        """A connection for an episode: the one that an instance has kept, if it still serves, or a new one.

        Raises:
            EnvironmentFailure: There is none to be had.
        """
        if kept is not None:
            self._resting.discard(kept)
            if await kept.is_usable():
                return kept
            await kept.close()
        self._waiting += 1
        try:
            return await self._connect()
        finally:
            self._waiting -= 1

    async def rest(self, connection: Connection) -> None:
        """Take note that an episode has ended: its connection is kept, unless somebody waits for a session."""
        if self._waiting:
            await connection.close()
        else:
            self._resting.add(connection)

    @asynccontextmanager
    async def post_mortem(self) -> AsyncIterator[None]:
        """Add to a failure what the container died of."""
        try:
            yield
        except EnvironmentFailure as failure:
            cause = None if self._container is None else await asyncio.to_thread(self._container.cause_of_death)
            if cause is None:
                raise
            raise EnvironmentFailure(f"{failure}\n{cause}") from failure

    async def _connect(self) -> Connection:
        endpoint = self._endpoint
        if self._container is not None:
            url = await asyncio.to_thread(self._container.start)
            endpoint = replace(endpoint, url=url)
        queue = self._queue()
        patience = time.monotonic() + self._capacity_timeout
        if queue.slots is not None and queue.slots.locked():
            await self._make_room()
        try:
            async with asyncio.timeout(self._capacity_timeout):
                await queue.enter()
        except TimeoutError:
            raise EnvironmentFailure(
                f"all {self._max_sessions} sessions (max_sessions) on the OpenEnv server at {endpoint.url} have been "
                f"in use for {self._capacity_timeout:g} s (capacity_timeout)"
            ) from None
        try:
            connection = await self._open(endpoint, queue, patience)
        except BaseException:
            queue.leave()
            raise
        connection.when_lost(queue.leave)
        connection.when_lost(lambda: self._resting.discard(connection))
        self._note(connection, endpoint)
        return connection

    async def _open(self, endpoint: Endpoint, queue: _Queue, patience: float) -> Connection:
        """Connect as soon as the server has a free session."""
        refused = 0
        while True:
            try:
                async with self.post_mortem():
                    return await Connection.open(endpoint, watched=self._watched)
            except Busy as busy:
                if time.monotonic() > patience:
                    raise EnvironmentFailure(
                        f"{busy}; so it has been for {self._capacity_timeout:g} s (capacity_timeout). Let it hold more "
                        "sessions, or play fewer rollouts at once"
                    ) from busy
            refused += 1
            if await self._make_room() or await queue.freed(min(LONGEST_WAIT, backoff(refused, FIRST_WAIT))):
                refused = 0  # somebody here has left, the server will have noticed in a moment

    def _queue(self) -> _Queue:
        """The queue of the running loop: semaphores belong to one."""
        return self._queues.setdefault(asyncio.get_running_loop(), _Queue(self._max_sessions))

    async def _make_room(self) -> bool:
        """Close a connection that is kept for an episode to come; whether there was one."""
        loop = asyncio.get_running_loop()
        connection = next((kept for kept in self._resting if kept.loop is loop), None)
        if connection is None:
            return False
        self._resting.discard(connection)
        await connection.close()
        return True

    def _note(self, connection: Connection, endpoint: Endpoint) -> None:
        if connection.elsewhere and self._watched:
            self._watched = False
            logger.warning(
                "the OpenEnv server at %s knows nothing of its own sessions over HTTP, as one with several workers "
                "does: a session that its `session_timeout` ends is not noticed; keep it above the longest step",
                endpoint.url,
            )

    def _learn(self) -> list[Tool]:
        """Ask the server what it understands."""
        if self._container is not None:
            self._endpoint = replace(self._endpoint, url=self._container.start())
        if self.style is None or self.style is Style.TYPED:
            schema = self._action_schema()
            self.style = self.style or style_of(schema)
            if self.style is Style.TYPED:
                return typed_tools(schema)
        return run_once(self._list())

    def _action_schema(self) -> dict[str, Any]:
        url = f"{self._endpoint.url}/schema"
        try:
            answer = httpx.get(
                url,
                headers=dict(self._endpoint.headers),
                timeout=self._endpoint.connect_timeout,
                verify=self._endpoint.tls or False,
            )
            schema = answer.raise_for_status().json()["action"]
            if isinstance(schema, dict):
                return schema
            raise ProtocolError(f"`action` is {schema!r}")
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the OpenEnv server does not tell the schema of its actions at {url}: {error!r}. Is it one, and is it "
                'up? One that only has MCP tools needs no schema: OpenEnv(style="mcp")'
            ) from error

    async def _list(self) -> list[Tool]:
        connection = await self._connect()
        try:
            return await list_tools(connection)
        finally:
            await connection.close()


class _Queue:
    """Those who want a session.

    Args:
        limit: Most sessions at once, None for any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.slots = None if limit is None else asyncio.Semaphore(limit)
        self._freed = asyncio.Semaphore(0)
        self._waiting = 0

    async def enter(self) -> None:
        """Wait for a slot."""
        if self.slots is not None:
            await self.slots.acquire()

    def leave(self) -> None:
        """Free a slot, and tell one of those whom the server has refused."""
        if self.slots is not None:
            self.slots.release()
        if self._waiting:
            self._freed.release()

    async def freed(self, seconds: float) -> bool:
        """Wait until somebody leaves, for so long at most; whether somebody did."""
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                return await self._freed.acquire()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
