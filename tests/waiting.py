"""Waiting for what will come, however slow the machine is.

A test that waits names the condition, never a time that should be enough. The limit is there for a test that fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

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
