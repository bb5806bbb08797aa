"""Calling user code, sync or async, from the event loop without ever blocking it.

Sync functions run in daemon threads, async ones on the loop that awaits them. Threads are started on demand
and reused, so nothing runs before the first sync call. They are daemons, unlike those of
`concurrent.futures.ThreadPoolExecutor`: a tool that hangs cannot be stopped, but it must not keep the
process from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

MAX_THREADS = 512
"""Most sync calls that run at once; further ones wait for a thread."""

Outcome = tuple[Any, BaseException | None]
"""What a call returned, or what it raised."""

CLOSE_SECONDS = 5.0
"""How long `Threads.close` waits for calls that are still running."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine; sees through partials, methods and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(function: Callable[..., Any], threads: Threads, *args: Any, **kwargs: Any) -> Any:
    """Call a sync function in a thread or await an async one, and give back or raise what it does.

    A sync function that gives back an awaitable (a decorated async one, say) is awaited too.
    """
    if is_async(function):
        return await function(*args, **kwargs)
    result = await threads.run(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


class Threads:
    """Daemon threads for sync calls, usable from any number of event loops at once."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._crew = _Crew()
        self._mailbox: _Mailbox | None = None

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a sync function in a thread that sees the caller's context variables.

        A cancelled call that has not begun never begins; one that has begun goes on unobserved.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._mailbox is None or self._mailbox.loop is not loop:
                self._mailbox = _Mailbox(loop)
            pending = _Call(functools.partial(function, *args, **kwargs), self._mailbox, loop.create_future())
            crew = self._crew
            if crew.idle:
                crew.idle -= 1
            elif len(crew.threads) < self._max_threads:
                thread = threading.Thread(target=self._work, args=(crew,), name="agentrl-call", daemon=True)
                crew.threads.append(thread)
                thread.start()
            crew.calls.put(pending)
        value, error = await pending.answer
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the threads; those still inside a call after `CLOSE_SECONDS` are left behind.

        A later call starts new threads.
        """
        with self._lock:
            crew, self._crew = self._crew, _Crew()
            self._mailbox = None
        for _ in crew.threads:
            crew.calls.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in crew.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if busy := sum(thread.is_alive() for thread in crew.threads):
            logger.warning("%d call(s) of tools or environments still run in threads at closing", busy)

    def _work(self, crew: _Crew) -> None:
        while (pending := crew.calls.get()) is not None:
            pending.run()
            del pending  # an idle thread must not keep the last call's arguments alive
            with self._lock:
                crew.idle += 1


class _Crew:
    """The threads between two closings, and their queue: a thread left behind never takes a later crew's calls."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.idle = 0


class _Mailbox:
    """Answers on their way to one loop, which is woken once for all that are there when it looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answers: deque[tuple[_Call, Outcome]] = deque()
        self._woken = False

    def put(self, call: _Call, outcome: Outcome) -> None:
        """Send the outcome of a call, from any thread."""
        self._answers.append((call, outcome))
        if self._woken:
            return
        self._woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            logger.debug("the loop that waited for %r is closed", call.function)

    def _deliver(self) -> None:
        self._woken = False  # before looking: whatever comes from now on wakes the loop again
        while self._answers:
            call, outcome = self._answers.popleft()
            if not call.answer.done():
                call.answer.set_result(outcome)


class _Call:
    """One call on its way to a thread and back to the loop that waits for it."""

    __slots__ = ("answer", "context", "function", "mailbox")

    def __init__(self, function: Callable[[], Any], mailbox: _Mailbox, answer: asyncio.Future[Any]) -> None:
        self.function = function
        self.mailbox = mailbox
        self.answer = answer
        self.context = contextvars.copy_context()

    def run(self) -> None:
        if self.answer.cancelled():
            return
        # The exception travels as a value: a future refuses StopIteration.
        outcome: Outcome
        try:
            outcome = self.context.run(self.function), None
        except BaseException as error:  # noqa: BLE001 (raised again where the call is awaited)
            outcome = None, error
        self.mailbox.put(self, outcome)
