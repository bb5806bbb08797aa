"""One session with an ORS server: opened for a task, kept alive while the model thinks, deleted whatever happens.

A session that was asked for is deleted, also when the opening was cancelled half-way: the server makes it even if
nobody waits for the answer any more, so the deletion comes after that answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from agentrl.envs.ors.client import Client, Gone
from agentrl.envs.ors.server import Server
from agentrl.envs.ors.wire import Content, Output, Refusal, ToolList, read_blocks, read_result, read_tools
from agentrl.errors import EnvironmentFailure
from agentrl.rollout.failures import backoff

logger = logging.getLogger(__name__)

DELETE_SECONDS = 20.0
"""How long deleting may take before the session is left to the server's own clean-up."""

DELETE_ATTEMPTS = 3


class Session:
    """A session.

    Args:
        server: Where.
        prefix: Path of the environment there ("/name"), "" for the server's first one.
    """

    def __init__(self, server: Server, prefix: str) -> None:
        self._client = Client(server)
        self._prefix = prefix
        self._sid: str | None = None
        self._opening: asyncio.Future[Any] | None = None
        self._pings: asyncio.Task[None] | None = None
        self._lost: str | None = None
        self._given_up: str | None = None
        self._closed = False

    async def open(self, task: Mapping[str, Any]) -> tuple[Content, ToolList]:
        """Set a task up; gives its prompt and its tools.

        Raises:
            EnvironmentFailure: The server does not, or not in time.
        """
        self._sid = sid = await self._client.create_session()
        self._opening = asyncio.ensure_future(self._client.create(sid, task, self._prefix.strip("/") or None))
        await asyncio.shield(self._opening)
        self._pings = asyncio.create_task(self._keep_alive(sid))
        prompt = await self._client.get(f"{self._prefix}/prompt", sid, seconds=self._client.server.setup_timeout)
        tools = await self._client.get(f"{self._prefix}/task_tools", sid)
        return read_blocks(prompt, "the prompt"), read_tools(tools, "the tools of the task")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Output | Refusal:
        """Run a tool. After a call that was given up nothing is known of the session, so no other one is made.

        Raises:
            EnvironmentFailure: The session is lost, the tool raised, or its result did not arrive.
        """
        self.settle()
        if self._lost is not None or self._sid is None:
            raise EnvironmentFailure(self._lost or "the session was never opened")
        self._given_up = name
        text = await self._client.call(f"{self._prefix}/call", self._sid, name, arguments)
        self._given_up = None
        return read_result(text)

    def settle(self) -> None:
        """Make sure that the result of every call is known.

        Raises:
            EnvironmentFailure: One was given up.
        """
        if self._given_up is not None:
            raise EnvironmentFailure(f"the call of {self._given_up!r} was given up and may be running still")

    async def delete(self) -> None:
        """Delete the session and close the connections; a second time nothing is done. Never raises."""
        if self._closed:
            return
        if self._pings is not None:
            self._pings.cancel()
        try:
            async with asyncio.timeout(DELETE_SECONDS):
                await self._delete()
        except (EnvironmentFailure, TimeoutError) as error:
            logger.warning("the ORS session %s is left to the server's own clean-up: %s", self._sid, error)
        if self._opening is not None:
            self._opening.cancel()
        self._closed = True
        await self._client.aclose()

    async def _delete(self) -> None:
        if self._opening is not None:
            await asyncio.gather(asyncio.shield(self._opening), return_exceptions=True)  # whatever becomes of it
        if self._sid is None:
            return
        for path in ("/delete", "/delete_session"):
            await self._insist(path, self._sid)

    async def _insist(self, path: str, sid: str) -> None:
        """Delete, again if no answer comes: what is deleted already may be deleted once more."""
        for attempt in range(1, DELETE_ATTEMPTS + 1):
            try:
                await self._client.post(path, sid)
                return
            except Gone:
                return
            except EnvironmentFailure:
                if attempt == DELETE_ATTEMPTS:
                    raise
                await asyncio.sleep(backoff(attempt, 0.2))

    async def _keep_alive(self, sid: str) -> None:
        """Tell the server now and then that the session is in use; it drops those that are silent for long."""
        while True:
            await asyncio.sleep(self._client.server.ping_interval)
            try:
                await self._client.post("/ping", sid)
            except Gone as error:
                self._lost = str(error)
                return
            except EnvironmentFailure as error:
                logger.debug("a ping failed: %s", error)  # if the server is dead, the next call finds out
