"""Processor time, for tests of how it grows."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object]) -> float:
    """The shortest of three runs; what other threads do meanwhile is not counted."""
    taken = []
    for _ in range(3):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return min(taken)
