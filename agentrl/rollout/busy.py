"""How long at least one of many overlapping activities was going on."""

from __future__ import annotations

import time
from types import TracebackType


class Busy:
    """A context manager that is entered by one thread, any number of times at once; `seconds` may be read by others."""

    def __init__(self) -> None:
        self._inside = 0
        self._since = 0.0
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Time with somebody inside, since construction."""
        return self._before + (time.monotonic() - self._since if self._inside else 0.0)

    def __enter__(self) -> None:
        if not self._inside:
            self._since = time.monotonic()
        self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if not self._inside:
            self._before += time.monotonic() - self._since
