"""HTTP with an ORS server: requests with deadlines, and tool calls that are never run twice.

The rule for asking again: only where the server cannot have acted on the request. That is so when the connection was
refused, and, by convention, when it answered 503 or 429 with `Retry-After`. A call whose stream broke off is taken up
again by the id that the server gave it; without one it may or may not have run, and its rollout is lost.

Redirects are followed on the same origin only, so neither the API key nor a session's id goes anywhere else.
Everything that goes wrong is raised as `EnvironmentFailure`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from agentrl.envs.ors.server import Server, ssl_context
from agentrl.envs.ors.sse import Event, EventParser
from agentrl.envs.ors.wire import ProtocolError, read_json
from agentrl.errors import EnvironmentFailure
from agentrl.rollout.calling import DeadlineExceeded, deadline
from agentrl.rollout.failures import backoff

REQUEST_SECONDS = 60.0
"""How long a request may take that runs nothing of the environment's."""

ATTEMPTS = 5
"""How often a request is sent when the server cannot have acted on it."""

RESUMES = 3
"""How often a broken stream is taken up again."""

CONNECT_SECONDS = 10.0
"""How long a connection may take to come about."""

LONGEST_WAIT = 30.0
"""Most seconds of a `Retry-After` that are waited."""

MAX_BYTES = 64 * 2**20
"""Longest answer."""

_REDIRECTS = 3

# Below the 2 s and more after which servers close idle connections. A request that meets such a close may have run,
# which costs a rollout; a new connection costs a round trip.
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1.0)


class Unanswered(EnvironmentFailure):
    """The connection broke after a request had been sent: the server may have acted on it."""


class Gone(EnvironmentFailure):
    """The server does not know the session any more."""


@dataclass(frozen=True, slots=True)
class _Request:
    """What to ask, in which session if in one, and for how long the server may be silent meanwhile."""

    method: str
    path: str
    sid: str | None
    body: Any
    silence: float

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class Client:
    """One client, used on one event loop.

    Args:
        server: Whom to speak to.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._base = server.url.copy_with(path=server.url.path.rstrip("/") + "/")
        self._http = httpx.AsyncClient(
            headers=server.headers, limits=_LIMITS, trust_env=not server.loopback, verify=ssl_context()
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str, sid: str, *, seconds: float = REQUEST_SECONDS) -> Any:
        """What the server answers, as JSON."""
        return await self._json(_Request("GET", path, sid, None, self.server.silence), seconds)

    async def post(self, path: str, sid: str, body: Any = None) -> Any:
        """The same for a POST."""
        return await self._json(_Request("POST", path, sid, body or {}, self.server.silence), REQUEST_SECONDS)

    async def create_session(self) -> str:
        """Ask for a session; gives its id."""
        request = _Request("POST", "/create_session", None, {}, self.server.silence)
        async with _within(REQUEST_SECONDS, str(request)), aclosing(self._events(request)) as events:
            async for event in events:
                if event.name == "task_id" and event.data:
                    return event.data
                if event.name == "error":
                    raise EnvironmentFailure(f"the server made no session: {event.data}")
        raise ProtocolError("the answer to /create_session names no session")

    async def create(self, sid: str, task: Any, env: str | None) -> None:
        """Make the environment of a session; the server constructs it before it answers, without a sign of life."""
        body = {"task_spec": task} | ({"env_name": env} if env is not None else {})
        seconds = self.server.setup_timeout
        await self._json(_Request("POST", "/create", sid, body, seconds), seconds)

    async def call(self, path: str, sid: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool; gives the text of its result.

        Raises:
            Gone: The session is unknown.
            EnvironmentFailure: The tool raised, or the result did not arrive.
        """
        body: dict[str, Any] = {"name": name, "input": dict(arguments)}
        request = _Request("POST", path, sid, body, self.server.silence)
        async with _within(self.server.call_timeout, f"the call of {name!r}", "call_timeout"):
            for attempt in itertools.count(1):
                try:
                    return await self._result(request, body)
                except Unanswered as error:
                    if "task_id" not in body:
                        raise EnvironmentFailure(
                            f"{error}; the server had not named the call {name!r} yet, which may have run, so it is "
                            "not made again"
                        ) from error
                    if attempt > RESUMES:
                        raise
                    await asyncio.sleep(backoff(attempt, 0.5))
        raise AssertionError("itertools.count ends")

    async def _result(self, request: _Request, body: dict[str, Any]) -> str:
        """Read one stream to its end. The request's body gains the call's id as soon as it is known."""
        pieces: list[str] = []
        async with aclosing(self._events(request)) as events:
            async for event in events:
                if event.name == "task_id":
                    if not event.data or body.setdefault("task_id", event.data) != event.data:
                        raise ProtocolError(f"the server runs call {event.data!r}, not {body.get('task_id')!r}")
                elif event.name in ("chunk", "end"):
                    pieces.append(event.data)
                    if event.name == "end":
                        return "".join(pieces)
                elif event.name == "error":
                    raise EnvironmentFailure(f"the tool {body['name']!r} broke on the server: {event.data}")
        raise Unanswered("the stream ended before the result")

    async def _events(self, request: _Request) -> AsyncGenerator[Event, None]:
        parser = EventParser()
        async with self._answer(request) as response:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ProtocolError(f"{request} gave {kind or 'nothing'} in place of an event stream")
            async for data in _read(response, request):
                try:
                    events = parser.feed(data)
                except UnicodeDecodeError as error:
                    raise ProtocolError(f"{request}: the stream is not UTF-8: {error}") from error
                for event in events:
                    yield event

    async def _json(self, request: _Request, seconds: float) -> Any:
        async with _within(seconds, str(request)), self._answer(request) as response:
            content = b"".join([data async for data in _read(response, request)])
        return read_json(content, f"the answer to {request}")

    @asynccontextmanager
    async def _answer(self, request: _Request) -> AsyncIterator[httpx.Response]:
        """A response with status 200, its body not read yet."""
        response = await self._persist(request)
        try:
            yield response
        finally:
            await response.aclose()

    async def _persist(self, request: _Request) -> httpx.Response:
        """Send a request until the server acts on it."""
        for attempt in itertools.count(1):
            response = await self._send(request)
            wait: float | None = backoff(attempt, 0.2)
            starting, trouble = False, f"{self.server.url} cannot be reached"
            if response is not None:
                if response.status_code == 200:
                    return response
                wait, trouble = _retry_after(response), await _complaint(response)
                if request.sid is not None and response.status_code in (404, 410):
                    raise Gone(f"{request}: the session is gone ({trouble}): it expired or the server restarted")
                starting = response.headers.get("X-Backend-State") == "starting"
            if wait is None or (attempt == ATTEMPTS and not starting):
                raise EnvironmentFailure(f"{request}: {trouble}")
            await asyncio.sleep(min(wait, LONGEST_WAIT))
        raise AssertionError("itertools.count ends")

    async def _send(self, request: _Request) -> httpx.Response | None:
        """Send a request once, along redirects of the same origin; None if nobody took the connection."""
        url = self._base.join(request.path.removeprefix("/"))
        headers = {"X-Session-ID": request.sid} if request.sid is not None else {}
        timeout = httpx.Timeout(request.silence, connect=min(request.silence, CONNECT_SECONDS), pool=None)
        for _ in range(_REDIRECTS + 1):
            sent = self._http.build_request(request.method, url, headers=headers, json=request.body, timeout=timeout)
            try:
                response = await self._http.send(sent, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                return None
            except httpx.HTTPError as error:
                raise _broken(error, request) from error
            if response.status_code not in (307, 308):
                return response
            await response.aclose()
            url = url.join(response.headers.get("Location", ""))
            if _origin(url) != _origin(self._base):
                raise EnvironmentFailure(
                    f"{request} was redirected to {url.scheme}://{url.netloc.decode()}, which is another server than "
                    f"{self.server.url}; set `url` to the right one if you trust it"
                )
        raise EnvironmentFailure(f"{request} is redirected in circles")


async def _read(response: httpx.Response, request: _Request) -> AsyncIterator[bytes]:
    """The body, up to a limit."""
    total = 0
    try:
        async for data in response.aiter_bytes():
            total += len(data)
            if total > MAX_BYTES:
                raise ProtocolError(f"the answer to {request} is longer than {MAX_BYTES} bytes")
            yield data
    except httpx.HTTPError as error:
        raise _broken(error, request) from error


def _broken(error: httpx.HTTPError, request: _Request) -> EnvironmentFailure:
    if isinstance(error, httpx.TimeoutException):
        return EnvironmentFailure(
            f"{request}: the server has been silent for {request.silence:g} s (silence); it counts as dead"
        )
    return Unanswered(f"{request}: the connection broke ({type(error).__name__}: {error})")


def _retry_after(response: httpx.Response) -> float | None:
    """How long to wait before asking again, None where that is not allowed."""
    if response.status_code not in (429, 503):
        return None
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isascii() and said.isdigit() else None


async def _complaint(response: httpx.Response) -> str:
    """Status and the beginning of what the server said, with the response closed."""
    said = b""
    try:
        async for data in response.aiter_bytes():
            said += data
            if len(said) > 2000:
                break
    except httpx.HTTPError:
        pass  # the status says enough
    finally:
        await response.aclose()
    text = said[:500].decode("utf-8", "replace")
    return f"the server answered {response.status_code} {response.reason_phrase}: {text}"


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


@asynccontextmanager
async def _within(seconds: float, what: str, setting: str = "no setting changes it") -> AsyncIterator[None]:
    """A deadline that is the environment's failure, not a slow tool that the model is told of."""
    try:
        async with deadline(seconds, what, setting):
            yield
    except DeadlineExceeded as error:
        raise EnvironmentFailure(str(error)) from None
