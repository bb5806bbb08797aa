"""A proxy that spoils what an HTTP server says, once, where a test asks for it; everything else passes through.

It stands between a client and a real server, so what the server did in truth (how often a tool ran, say) can be asked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

Fault = Callable[[bytes, "Link"], Awaitable[None]]
"""Deals with one request, as it came, in place of passing it through."""


class Link:
    """One connection of a client, and the way to the server behind."""

    def __init__(self, upstream: int, writer: asyncio.StreamWriter) -> None:
        self.upstream = upstream
        self.writer = writer

    async def ask(self, request: bytes) -> bytes:
        """What the server answers to a request, whole."""
        return b"".join([data async for data in self.stream(request)])

    async def stream(self, request: bytes):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            head, _, body = request.partition(b"\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
            writer.write(b"\r\n".join([*lines, b"Connection: close", b"", body]))
            while data := await reader.read(65536):
                yield data
        finally:
            writer.close()

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Cut the connection without a farewell."""
        self.writer.transport.abort()


class Proxy:
    """Runs in a thread of its own.

    Args:
        upstream: Port of the real server.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.requests: list[bytes] = []
        self.faults: list[tuple[str, Fault]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def spoil(self, path: str, fault: Fault) -> None:
        """Let the next request whose path ends so meet a fault."""
        self.faults.append((path, fault))

    def paths(self) -> list[str]:
        """Paths that were asked for, in order."""
        return [request.split(b" ", 2)[1].decode() for request in self.requests]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(60)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, place: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(self.upstream, writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            request = await _read_request(reader)
            self.requests.append(request)
            await self._fault_of(request)(request, link)
        writer.close()

    def _fault_of(self, request: bytes) -> Fault:
        path = request.split(b" ", 2)[1].decode()
        for index, (end, _) in enumerate(self.faults):
            if path.endswith(end):
                return self.faults.pop(index)[1]
        return passed


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


async def passed(request: bytes, link: Link) -> None:
    """No fault."""
    async for data in link.stream(request):
        await link.say(data)


def lost(before: bytes) -> Fault:
    """The server acts on the request; its answer is cut off in front of some bytes."""

    async def fault(request: bytes, link: Link) -> None:
        answer = await link.ask(request)
        await link.say(answer[: answer.index(before)])
        link.reset()

    return fault


def cut(after: bytes) -> Fault:
    """The connection ends after some bytes of the answer, while the server is still at it."""

    async def fault(request: bytes, link: Link) -> None:
        async for data in link.stream(request):
            await link.say(data)
            if after in data:
                return

    return fault


def replaced(status: str, body: str = "", *headers: str, kind: str = "application/json") -> Fault:
    """The server never hears of the request; this is the answer."""

    async def fault(request: bytes, link: Link) -> None:
        await link.say(response(status, body, *headers, kind=kind))

    return fault


def response(status: str, body: str, *headers: str, kind: str) -> bytes:
    content = body.encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(content)}", "Connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def edited(old: bytes, new: bytes) -> Fault:
    """The server acts on the request; some bytes of its answer are others of the same length."""
    assert len(old) == len(new), "HTTP counts the bytes"

    async def fault(request: bytes, link: Link) -> None:
        answer = await link.ask(request)
        assert old in answer, answer
        await link.say(answer.replace(old, new))

    return fault


async def unheard(request: bytes, link: Link) -> None:
    """The server never hears of the request, and no answer comes."""
    link.reset()


async def silent(request: bytes, link: Link) -> None:
    """Nothing comes, and the connection stays."""
    await asyncio.sleep(3600)
