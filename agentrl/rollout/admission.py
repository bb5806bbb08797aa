"""How many episodes run at once, and who comes first. For one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """Lets a number of episodes run at once; the others wait, first come first served.

    Args:
        most: That number; None lets all run.
    """

    def __init__(self, most: int | None = None) -> None:
        self._free = most
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self, *, urgent: bool) -> AsyncIterator[None]:
        """Hold a place for a while; who is urgent gets the next one that is free."""
        if self._free is None:
            yield
            return
        if self._free:
            self._free -= 1
        else:
            await self._wait(self._urgent if urgent else self._others)
        try:
            yield
        finally:
            self._give()

    async def _wait(self, queue: deque[asyncio.Future[None]]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give()  # the place came together with the cancellation
            else:
                queue.remove(turn)
            raise

    def _give(self) -> None:
        """Hand a place on, or keep it free."""
        queue = self._urgent or self._others
        if queue:
            queue.popleft().set_result(None)
        else:
            assert self._free is not None
            self._free += 1
