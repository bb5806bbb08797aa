"""Calling user code, sync or async, from the event loop without ever blocking it, and with a deadline.

Sync functions run in threads, async ones on the loop that awaits them. Whoever waits for a call can be cancelled at
any moment, by a deadline or because the run ends: a sync call is then abandoned at once (see `agentrl.rollout.hung`),
an async one gets the `CancelledError` where it awaits, and may do its cleaning up first. One that swallows it goes on:
that costs its rollout the time, but neither keeps the run nor the process from ending.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from agentrl.rollout.threads import Threads


class DeadlineExceeded(TimeoutError):  # noqa: N818 (a TimeoutError, as `TimeoutError` is named)
    """A call took longer than it may. Unlike other `TimeoutError`s it was not raised by the call itself."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine; sees through partials, methods and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):  # a function or method, nearly always; asked for every call
        return inspect.iscoroutinefunction(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def call(function: Callable[..., Any], threads: Threads, *args: Any, **kwargs: Any) -> Any:
    """Call a sync function in a thread or await an async one, and give back or raise what it does.

    A sync function that gives back an awaitable (a decorated async one, say) is awaited too.
    """
    if is_async(function):
        return await function(*args, **kwargs)
    result = await threads.run(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


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
