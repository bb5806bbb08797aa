"""What one process does for a world of several: talk to a server, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from accelerate.utils import broadcast_object_list
from torch import distributed

from agentrl.errors import GenerationError

T = TypeVar("T")


def is_first() -> bool:
    """Whether this is the first process, or the only one."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def by_first(action: Callable[[], T]) -> T:
    """Let the first process do something and give its result to all.

    Every process calls this, at the same place.

    Raises:
        GenerationError: In every process, where the action raised in the first one.
    """
    shared: list[Any] = [None, None]  # the result, or the error's text
    error: Exception | None = None
    if is_first():
        try:
            shared[0] = action()
        except Exception as raised:  # noqa: BLE001 - whatever it is, the other processes must not wait for ever
            error, shared[1] = raised, f"{type(raised).__name__}: {raised}"
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        broadcast_object_list(shared, from_process=0)
    if error is not None:
        raise error
    result, failure = shared
    if failure is not None:
        raise GenerationError(f"in the first process: {failure}")
    return cast("T", result)
