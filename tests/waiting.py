"""Waiting for what will come, however slow the machine is.

A test that waits names the condition, never a time that should be enough. The limit is there for a test that fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

LONG = 60.0
"""Seconds after which a test gives up on what should have come. No healthy machine, however busy, takes as long."""


def wait_until(condition: Callable[[], object], seconds: float = LONG) -> None:
    """Wait in a thread until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true within {seconds:g} s"
        time.sleep(0.01)


async def eventually(condition: Callable[[], object], seconds: float = LONG) -> None:
    """The same on an event loop."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.01)


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that nobody has waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def skip(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Move a loop's clock forward, from any thread: whatever waits for a time on it has then waited that much longer.

    So a limit of minutes, which no healthy peer meets, ends at once what hangs.
    """

    def jump() -> None:
        before = loop.time
        loop.time = lambda: before() + seconds  # type: ignore[method-assign]

    loop.call_soon_threadsafe(jump)
