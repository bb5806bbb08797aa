"""How long at least one of many overlapping activities was going on."""

from __future__ import annotations

import time
from types import TracebackType


class Busy:
    """A context manager that is entered by one thread, any number of times at once; `seconds` may be read by others."""

    def __init__(self) -> None:
        self._inside = 0
        self._total: tuple[float, float | None] = 0.0, None  # before, and since when again; one value, for readers

    @property
    def seconds(self) -> float:
        """Time with somebody inside, since construction."""
        before, since = self._total
        return before if since is None else before + time.monotonic() - since

    def __enter__(self) -> None:
        if not self._inside:
            self._total = self._total[0], time.monotonic()
        self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if not self._inside:
            self._total = self.seconds, None
