"""The output of a command, kept within a limit: its beginning and its end."""

from __future__ import annotations

from collections import deque


class Output:
    """Bytes as they arrive; of more than `limit` only the first and the last half are kept.

    Memory stays within about twice the limit, whatever is written.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._limit = limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.size = 0
        """Bytes that arrived."""

    def write(self, data: bytes) -> None:
        """Take what arrived."""
        self.size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        if rest := data[max(0, room) :]:
            self._tail.append(rest[-self._half :])
            self._tail_size += len(self._tail[-1])
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        """Whether something was left out."""
        return self.size > 2 * self._half

    def text(self) -> str:
        """What was kept, with a line that says how much is missing."""
        tail = b"".join(self._tail)[-self._half :]
        head = bytes(self._head).decode("utf-8", "replace") if self.truncated else ""
        if not self.truncated:
            return (bytes(self._head) + tail).decode("utf-8", "replace")
        left_out = self.size - len(self._head) - len(tail)
        return f"{head}\n[... {left_out} bytes left out ...]\n{tail.decode('utf-8', 'replace')}"
