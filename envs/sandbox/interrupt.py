"""A wish to stop that can be waited for together with files and sockets."""

from __future__ import annotations

import os
import threading
from typing import Self


class Interrupt:
    """Set once, from any thread; `fileno` becomes readable then, so `select` and `poll` see it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: tuple[int, int] | None = os.pipe()

    def fileno(self) -> int:
        """The end to wait for."""
        assert self._ends is not None
        return self._ends[0]

    def set(self) -> None:
        """Interrupt; after `close` it does nothing."""
        with self._lock:
            if self._ends is not None:
                os.write(self._ends[1], b"x")

    def close(self) -> None:
        """Free the pipe."""
        with self._lock:
            ends, self._ends = self._ends, None
        for end in ends or ():
            os.close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
