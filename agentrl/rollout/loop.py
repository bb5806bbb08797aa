"""An event loop in a daemon thread, for user code that may misbehave on it.

`anyio`'s portal and `asyncio.Runner` wait for every task and for the thread when they end. Here all waits are bounded:
an async function that blocks the loop or refuses to be cancelled keeps neither the caller nor the process from ending.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.rollout.hung import place

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""How long tasks may take to end once they are cancelled, and the loop to stop."""

BLOCKED_SECONDS = 60.0
"""A loop that does nothing for so long is blocked by somebody's code, which is worth a warning."""


class LoopThread:
    """Runs coroutines on one loop, for any thread but the loop's own. Starts when needed, also after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. `KeyboardInterrupt` here cancels it there."""
        future = self.start(coroutine)
        try:
            self.wait(future)
            return future.result()
        except BaseException:
            # Ctrl-C in the waiting thread must not leave rollouts (and sessions on servers) running behind it.
            future.cancel()
            raise

    def run_for(self, seconds: float, coroutine: Coroutine[Any, Any, Any], what: str) -> None:
        """Run a coroutine for so long at most; a warning says when it did not end."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        if concurrent.futures.wait([future], seconds).done:
            future.result()
        else:
            logger.warning("%s did not end within %g s; the event loop is at %s", what, seconds, self._place())

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def close(self) -> None:
        """Cancel what runs, and end the loop and its thread; both waits are bounded."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        ending = asyncio.run_coroutine_threadsafe(_cancel_all(), loop)
        concurrent.futures.wait([ending], CLOSE_SECONDS * 2)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            logger.warning("the event loop is blocked and left behind, at %s", place(thread))

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="agentrl-loop", daemon=True)
                self._thread.start()
            return self._loop

    def wait(self, *futures: concurrent.futures.Future[Any]) -> None:
        """Wait for the first of several, and now and then look whether the loop still lives."""
        first = concurrent.futures.FIRST_COMPLETED
        while not concurrent.futures.wait(futures, BLOCKED_SECONDS, return_when=first).done:
            beat = threading.Event()
            self._running().call_soon_threadsafe(beat.set)
            if not beat.wait(BLOCKED_SECONDS):
                logger.warning(
                    "the event loop has been blocked for %g s, and with it all rollouts, at %s: an async tool or "
                    "environment waits there without `await`",
                    BLOCKED_SECONDS,
                    self._place(),
                )

    def _place(self) -> str:
        return "not running" if self._thread is None else place(self._thread)


def run_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own, whether or not one runs in this thread (a notebook's)."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        try:
            loop.run_forever()
            break
        except (KeyboardInterrupt, SystemExit):
            # Raised by a task, which has kept it for whoever waits; only asyncio lets it through as well.
            continue
    loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, stuck = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for task in stuck:
            logger.warning("left behind at closing, for it does not end when cancelled: %r", task)
    await asyncio.get_running_loop().shutdown_asyncgens()
