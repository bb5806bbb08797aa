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
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
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


class Client:
    """One client, used on one event loop.

    Args:
        server: Whom to speak to.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._base = server.url.copy_with(path=server.url.path.rstrip("/") + "/")
        self._http = httpx.AsyncClient(
            headers=server.headers,
            timeout=httpx.Timeout(server.silence, connect=min(server.silence, 10.0), pool=None),
            limits=_LIMITS,
            trust_env=not server.loopback,
            verify=ssl_context(),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str, sid: str, *, seconds: float = REQUEST_SECONDS) -> Any:
        """What the server answers, as JSON."""
        return await self._json("GET", path, sid, None, seconds)

    async def post(self, path: str, sid: str, body: Any = None, *, seconds: float = REQUEST_SECONDS) -> Any:
        """The same for a POST."""
        return await self._json("POST", path, sid, {} if body is None else body, seconds)

    async def create_session(self) -> str:
        """Ask for a session; gives its id."""
        stream = aclosing(self._events("/create_session", None, {}))
        async with _within(REQUEST_SECONDS, "POST /create_session"), stream as events:
            async for event in events:
                if event.name == "task_id" and event.data:
                    return event.data
                if event.name == "error":
                    raise EnvironmentFailure(f"the server made no session: {event.data}")
        raise ProtocolError("the answer to /create_session names no session")

    async def call(self, path: str, sid: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool; gives the text of its result.

        Raises:
            Gone: The session is unknown.
            EnvironmentFailure: The tool raised, or the result did not arrive.
        """
        seconds = self.server.call_timeout
        async with _within(seconds, f"the call of {name!r}", "call_timeout"):
            body: dict[str, Any] = {"name": name, "input": dict(arguments)}
            for attempt in range(1, RESUMES + 2):
                try:
                    return await self._result(path, sid, body)
                except Unanswered as error:
                    if "task_id" not in body:
                        raise EnvironmentFailure(
                            f"{error}; the server had not named the call {name!r} yet, which may have run, so it is "
                            "not made again"
                        ) from error
                    if attempt > RESUMES:
                        raise
                    await asyncio.sleep(backoff(attempt, 0.5))
        raise AssertionError("the last attempt returns or raises")

    async def _result(self, path: str, sid: str, body: dict[str, Any]) -> str:
        """Read one stream to its end. `body` gains the call's id as soon as it is known."""
        pieces: list[str] = []
        async with aclosing(self._events(path, sid, body)) as events:
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

    async def _events(self, path: str, sid: str | None, body: Any) -> AsyncGenerator[Event, None]:
        parser = EventParser()
        async with self._answer("POST", path, sid, body) as response:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise ProtocolError(f"POST {path} gave {kind or 'nothing'} in place of an event stream")
            async for data in _read(response, path):
                try:
                    events = parser.feed(data)
                except UnicodeDecodeError as error:
                    raise ProtocolError(f"POST {path}: the stream is not UTF-8: {error}") from error
                for event in events:
                    yield event

    async def _json(self, method: str, path: str, sid: str, body: Any, seconds: float) -> Any:
        async with _within(seconds, f"{method} {path}"), self._answer(method, path, sid, body) as response:
            content = b"".join([data async for data in _read(response, path)])
        return read_json(content, f"the answer to {method} {path}")

    @asynccontextmanager
    async def _answer(self, method: str, path: str, sid: str | None, body: Any) -> AsyncIterator[httpx.Response]:
        """A response with status 200, its body not read yet."""
        response = await self._persist(method, path, sid, body)
        try:
            yield response
        finally:
            await response.aclose()

    async def _persist(self, method: str, path: str, sid: str | None, body: Any) -> httpx.Response:
        """Send a request until the server acts on it."""
        for attempt in itertools.count(1):
            response = await self._send(method, path, sid, body)
            if response is None:
                wait, trouble = backoff(attempt, 0.2), f"{self.server.url} cannot be reached"
            elif response.status_code == 200:
                return response
            else:
                wait, trouble = _retry_after(response), await _complaint(response)
                if sid is not None and response.status_code in (404, 410):
                    raise Gone(f"{method} {path}: the session is gone ({trouble}): it expired or the server restarted")
            starting = response is not None and response.headers.get("X-Backend-State") == "starting"
            if wait is None or (attempt == ATTEMPTS and not starting):
                raise EnvironmentFailure(f"{method} {path}: {trouble}")
            await asyncio.sleep(min(wait, LONGEST_WAIT))
        raise AssertionError("itertools.count ends")

    async def _send(self, method: str, path: str, sid: str | None, body: Any) -> httpx.Response | None:
        """Send a request once, along redirects of the same origin; None if nobody took the connection."""
        url = self._base.join(path.removeprefix("/"))
        headers = {"X-Session-ID": sid} if sid is not None else {}
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers["Content-Type"] = "application/json"
        for _ in range(_REDIRECTS + 1):
            request = self._http.build_request(method, url, headers=headers, content=content)
            try:
                response = await self._http.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                return None
            except httpx.HTTPError as error:
                raise _broken(error, f"{method} {path}", self.server.silence) from error
            if response.status_code not in (307, 308):
                return response
            await response.aclose()
            url = url.join(response.headers.get("Location", ""))
            if _origin(url) != _origin(self._base):
                raise EnvironmentFailure(
                    f"{method} {path} was redirected to {url.scheme}://{url.netloc.decode()}, which is another server "
                    f"than {self.server.url}; set `url` to the right one if you trust it"
                )
        raise EnvironmentFailure(f"{method} {path} is redirected in circles")


async def _read(response: httpx.Response, path: str) -> AsyncIterator[bytes]:
    """The body, up to a limit."""
    total, silence = 0, response.request.extensions["timeout"]["read"]
    try:
        async for data in response.aiter_bytes():
            total += len(data)
            if total > MAX_BYTES:
                raise ProtocolError(f"the answer to {path} is longer than {MAX_BYTES} bytes")
            yield data
    except httpx.HTTPError as error:
        raise _broken(error, path, silence) from error


def _broken(error: httpx.HTTPError, what: str, silence: float) -> EnvironmentFailure:
    if isinstance(error, httpx.TimeoutException):
        return EnvironmentFailure(f"{what}: the server has been silent for {silence:g} s (silence); it counts as dead")
    return Unanswered(f"{what}: the connection broke ({type(error).__name__}: {error})")


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
