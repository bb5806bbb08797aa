"""Calling user code, sync or async, from the event loop: never blocking it, and able to leave at any time.

Sync functions run in threads, async ones in tasks of their own. Whoever waits for a call can be cancelled at any
moment, by a deadline or because the run ends, and goes on at once: the sync call is abandoned (see
`agentrl.rollout.hung`), the async one is cancelled and may take its time to notice. So nothing that user code does
can hold a rollout up for longer than its deadlines say, short of blocking the loop in an async function.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentrl.rollout.threads import Threads

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):  # noqa: N818 (a TimeoutError, as `TimeoutError` is named)
    """A call took longer than it may. Unlike other `TimeoutError`s it was not raised by the call itself."""


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
        return await _detached(function(*args, **kwargs))
    result = await threads.run(function, *args, **kwargs)
    return await _detached(_awaited(result)) if inspect.isawaitable(result) else result


@asynccontextmanager
async def deadline(seconds: float | None, what: str, setting: str) -> AsyncIterator[None]:
    """Bound what happens inside.

    Args:
        seconds: How long it may take, None for ever.
        what: What is bounded, for the message.
        setting: The argument that sets the bound, for the message.

    Raises:
        DeadlineExceeded: It took longer.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"{what} did not end within {seconds:g} s ({setting})") from None


async def _detached(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine in a task of its own, which a cancelled caller leaves behind, cancelled too."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(coroutine)
    ended = loop.create_future()
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    try:
        await ended
    except asyncio.CancelledError:
        task.add_done_callback(_forget)
        task.cancel()
        raise
    return task.result()


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _forget(task: asyncio.Task[Any]) -> None:
    """Look at what became of a task that nobody waits for, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()
