"""One session on an OpenEnv server: a socket, one request at a time, and a watch over it.

A connection is made once and lost once. It is lost when the socket is, when an answer does not come in time, is not
what the protocol says or was asked for by nobody, when whoever waits for an answer is cancelled (that answer would be
taken for the next request's), and when the server has ended the session. A lost connection raises `EnvironmentFailure`
whatever is asked of it. It never connects again by itself: what is at the other end then is another environment.

A server may end a session that has been idle for its `session_timeout`, while the socket goes on answering from an
environment that was closed. Neither pings of the socket nor `state` count as signs of life there, but a JSON-RPC call
does, also of a method that the server does not have. So every few seconds the session is asked for by its name at
`POST /mcp`. That keeps it, also in the midst of a step, and tells when it has gone.
"""

from __future__ import annotations

import asyncio
import itertools
import reprlib
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, WebSocketException

from agentrl.envs.openenv.protocol import (
    Answer,
    ErrorCode,
    Observation,
    ProtocolError,
    RpcAnswer,
    ServerError,
    parse,
    parse_rpc,
    request,
    rpc,
)
from agentrl.errors import EnvironmentFailure

CLOSE_SECONDS = 2.0
"""How long the closing handshake may take."""

WHO_AM_I = "openenv/session/create"
"""A method that, called on a socket that has a session, only tells its name."""

PROBE = "agentrl/session/lives"
"""A method that no server has."""

_METHOD_NOT_FOUND, _INVALID_PARAMS, _TOO_BIG, _INTERNAL_ERROR = -32601, -32602, 1009, 1011

_OF_THE_MODEL = (ErrorCode.VALIDATION_ERROR, ErrorCode.EXECUTION_ERROR)


class Busy(EnvironmentFailure):
    """The server has no free session."""


class _Session(Enum):
    """What a server says of a session."""

    LIVES = "lives"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server, and how long to wait for it; times in seconds.

    Attributes:
        url: Where it is, `http://` or `https://`, without a slash at the end.
        headers: Sent with every request to it, and to nobody else.
        connect_timeout: To open a connection.
        reset_timeout: To make the environment of a session, and to reset it.
        step_timeout: For a step.
        ping_interval: Between two pings of the socket.
        ping_timeout: Until a ping must be answered.
        keepalive: Between two signs of life for the server's `session_timeout`.
        max_message_size: Most bytes of an answer.
        tls: How to check its certificate, for `https://`.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    connect_timeout: float = 30.0
    reset_timeout: float = 120.0
    step_timeout: float = 120.0
    ping_interval: float = 10.0
    ping_timeout: float = 20.0
    keepalive: float = 10.0
    max_message_size: int = 16 * 2**20
    tls: ssl.SSLContext | None = None


class Connection:
    """A session; made by `open`.

    Attributes:
        lost: Why it cannot be used any more, None as long as it can.
        visible: Whether the server tells if the session lives.
        elsewhere: Whether it says of a session that it has just made that there is none: it has several workers.
    """

    def __init__(self, socket: ClientConnection, endpoint: Endpoint) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._http = httpx.AsyncClient(
            headers=dict(endpoint.headers),
            timeout=endpoint.ping_timeout,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=endpoint.tls or False,
        )
        self._one_at_a_time = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._session_id: str | None = None
        self._after: list[Callable[[], None]] = []
        self.loop = asyncio.get_running_loop()
        # A server without a free session says so before it is asked anything.
        self._awaited: asyncio.Future[str | bytes] | None = self.loop.create_future()
        self.lost: str | None = None
        self.visible = self.elsewhere = False
        self._reader = self.loop.create_task(self._read())
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, endpoint: Endpoint, *, watched: bool = True) -> Connection:
        """Connect, and wait until the server has made an environment.

        Args:
            endpoint: The server.
            watched: Whether it can be asked for sessions.

        Raises:
            Busy: The server has no free session.
            EnvironmentFailure: It cannot be reached, or cannot make one.
        """
        try:
            socket = await _SameHost(
                "ws" + endpoint.url.removeprefix("http") + "/ws",
                additional_headers=endpoint.headers,
                compression=None,
                ssl=endpoint.tls,
                max_size=endpoint.max_message_size,
                open_timeout=endpoint.connect_timeout,
                ping_interval=endpoint.ping_interval,
                ping_timeout=endpoint.ping_timeout,
                close_timeout=CLOSE_SECONDS,
            )
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailure(
                f"the OpenEnv server at {endpoint.url} cannot be connected to within "
                f"{endpoint.connect_timeout:g} s (connect_timeout): {type(error).__name__}: {error}"
            ) from error
        connection = cls(socket, endpoint)
        try:
            await connection._introduce(watched)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def reset(self, data: Mapping[str, Any], what: str) -> Observation | ServerError:
        """Begin an episode.

        Args:
            data: For the environment's `reset`.
            what: What is being done, for messages.

        Raises:
            EnvironmentFailure: The connection is lost.
        """
        return await self._observe("reset", data, what, "reset_timeout")

    async def step(self, action: Mapping[str, Any], what: str) -> Observation | ServerError:
        """Take an action.

        Raises:
            ValueError: The action cannot be written as JSON.
            EnvironmentFailure: The connection is lost.
        """
        return await self._observe("step", action, what, "step_timeout")

    async def settle(self, what: str) -> None:
        """Make sure that all that was answered was answered by a living environment to what was asked.

        A frame too many shifts all later answers by one. Here it shows, for the answer to this has a number.

        Raises:
            EnvironmentFailure: It was not.
        """
        await self._call(PROBE, what, "step_timeout")
        if self.visible and (said := await self._ask_for_session()) is not _Session.LIVES:
            raise self.lose(_REAPED if said is _Session.GONE else f"does not tell whether the session lives, {what}")

    async def is_usable(self) -> bool:
        """Whether another episode can be played on it."""
        if self.lost is None and self.visible and await self._ask_for_session() is not _Session.LIVES:
            self.lose("has ended the session between two episodes")
        return self.lost is None

    async def close(self) -> None:
        """End the session."""
        try:
            if self.lost is None:
                await self._socket.close()
        finally:
            self.lose("was left")
        await self._http.aclose()

    def lose(self, cause: str) -> EnvironmentFailure:
        """Give the connection up, if that is not done yet, and give back a failure to raise."""
        failure = EnvironmentFailure(f"the OpenEnv server at {self._endpoint.url} {cause}")
        if self.lost is None:
            self.lost = str(failure)
            self._socket.transport.abort()
            for task in (self._reader, self._watch):
                if task is not None and task is not asyncio.current_task():
                    task.cancel()
            if self._awaited is not None and not self._awaited.done():
                self._awaited.set_exception(EnvironmentFailure(self.lost))
            for call in self._after:
                call()
        return failure

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have something called once, when the connection is lost or closed."""
        self._after.append(call)
        if self.lost is not None:
            call()

    async def _introduce(self, watched: bool) -> None:
        """Learn the session's name and whether the server can be asked for it; a full server says so here."""
        answer = await self._call(WHO_AM_I, "while it made the environment", "reset_timeout")
        result = answer.result if isinstance(answer, RpcAnswer) else None
        if watched and isinstance(result, dict) and isinstance(result.get("session_id"), str):
            self._session_id = result["session_id"]
            said = await self._ask_for_session()
            self.visible, self.elsewhere = said is _Session.LIVES, said is _Session.GONE
        self._watch = self.loop.create_task(self._keep_alive())

    async def _observe(self, kind: str, data: Mapping[str, Any], what: str, setting: str) -> Observation | ServerError:
        answer = await self._request(kind, data, what, setting)
        if isinstance(answer, Observation) or (isinstance(answer, ServerError) and answer.code in _OF_THE_MODEL):
            return answer
        raise self.lose(f"answered a {kind} with {_told(answer)} {what}")

    async def _call(self, method: str, what: str, setting: str) -> Answer:
        """A JSON-RPC call; a server that has never heard of them says that, which is an answer too."""
        number = next(self._numbers)
        answer = await self._request("mcp", rpc(method, number), what, setting)
        if isinstance(answer, RpcAnswer) and answer.id == number:
            return answer
        if isinstance(answer, ServerError) and answer.code is ErrorCode.UNKNOWN_TYPE:
            return answer
        raise self.lose(f"answered the call {number} with {_told(answer)} {what}")

    async def _request(self, kind: str, data: Mapping[str, Any], what: str, setting: str) -> Answer:
        """Ask and wait for the answer; an exception of any kind on the way loses the connection."""
        text = request(kind, data)
        seconds: float = getattr(self._endpoint, setting)
        async with self._one_at_a_time:
            if self._awaited is None:
                if self.lost is not None:
                    raise EnvironmentFailure(f"{self.lost} (noticed {what})")
                self._awaited = self.loop.create_future()
            try:
                async with asyncio.timeout(seconds):
                    with suppress(ConnectionClosed):  # the reader knows better what happened
                        await self._socket.send(text)
                    answer = parse(await self._awaited)
            except TimeoutError:
                raise self.lose(f"did not answer within {seconds:g} s ({setting}) {what}") from None
            except ProtocolError as error:
                raise self.lose(f"broke the protocol {what}: {error}") from error
            except EnvironmentFailure as error:
                raise EnvironmentFailure(f"{error} {what}") from None
            except BaseException:
                self.lose(f"was not waited for any more {what}")
                raise
            finally:
                self._awaited = None
        if isinstance(answer, ServerError) and answer.code is ErrorCode.CAPACITY_REACHED:
            raise Busy(str(self.lose(f"has no free session: {answer}")))
        return answer

    async def _read(self) -> None:
        """Hand each frame to whoever waits for it."""
        try:
            async for frame in self._socket:
                if self._awaited is None or self._awaited.done():
                    self.lose(f"broke the protocol: it sent a frame that nobody had asked for, {reprlib.repr(frame)}")
                    return
                self._awaited.set_result(frame)
            self.lose("closed the connection")
        except ConnectionClosedError as error:
            self.lose(self._closing(error))

    def _closing(self, error: ConnectionClosedError) -> str:
        sent = error.sent.code if error.sent is not None and not error.rcvd_then_sent else None
        if sent == _TOO_BIG:
            return f"sent more than {self._endpoint.max_message_size} bytes (max_message_size)"
        if sent == _INTERNAL_ERROR:
            return f"did not answer a ping within {self._endpoint.ping_timeout:g} s (ping_timeout)"
        return f"is gone: the connection ended with '{error}'"

    async def _keep_alive(self) -> None:
        """Show signs of life, and look for the session's."""
        while self.lost is None:
            await asyncio.sleep(self._endpoint.keepalive)
            if not self.visible:
                if not self._one_at_a_time.locked():
                    with suppress(EnvironmentFailure):  # whoever asks next is told
                        await self._call(PROBE, "between two steps", "step_timeout")
            elif await self._ask_for_session() is _Session.GONE:
                self.lose(_REAPED)

    async def _ask_for_session(self) -> _Session:
        try:
            body = rpc(PROBE, 0, session_id=self._session_id)
            answer = parse_rpc((await self._http.post(f"{self._endpoint.url}/mcp", json=body)).json())
        except (httpx.HTTPError, ValueError):
            return _Session.UNKNOWN
        known = {_METHOD_NOT_FOUND: _Session.LIVES, _INVALID_PARAMS: _Session.GONE}
        return _Session.UNKNOWN if answer.code is None else known.get(answer.code, _Session.UNKNOWN)


def _told(answer: Answer) -> str:
    return f"{answer.code}: {answer}" if isinstance(answer, ServerError) else reprlib.repr(answer)


_REAPED = (
    "has ended the session in the midst of an episode, as a `session_timeout` shorter than `keepalive` makes it do"
)


class _SameHost(connect):
    """Follows no redirect: headers are for the host that was named."""

    def process_redirect(self, exc: Exception) -> Exception:
        """Take a redirect for the failure that it is."""
        return exc
