"""What one process does for a world of several: talk to a server, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
    answer: list[T | None] = [None]
    failure: list[str | None] = [None]
    error: BaseException | None = None
    if is_first():
        try:
            answer[0] = action()
        except Exception as raised:  # noqa: BLE001 - whatever it is, the other processes must not wait for ever
            error, failure[0] = raised, f"{type(raised).__name__}: {raised}"
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        shared = [answer[0], failure[0]]
        broadcast_object_list(shared, from_process=0)
        answer[0], failure[0] = shared
    if error is not None:
        raise error
    if failure[0] is not None:
        raise GenerationError(f"in the first process: {failure[0]}")
    return answer[0]  # type: ignore[return-value]
