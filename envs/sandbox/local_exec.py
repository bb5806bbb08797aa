"""One request to the process that owns a local sandbox: its output within limits, its deadline, its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from agentrl.envs.sandbox.interrupt import Interrupt

KILL_SECONDS = 10.0
"""How long the answer of a killed command may take."""

Write = Callable[[bytes], None]


def run(
    control: socket.socket,
    request: dict[str, Any],
    stdin: bytes,
    timeout: float,
    stop: Interrupt | None,
    out: Write,
    err: Write,
) -> dict[str, Any] | None:
    """Send a request and see to its streams until it ends.

    Returns:
        How it ended, None if it was late or interrupted and therefore killed.

    Raises:
        ConnectionError: The sandbox is gone.
    """
    with contextlib.ExitStack() as stack:

        def pipe() -> tuple[int, int]:
            ends = os.pipe()
            for end in ends:
                stack.callback(_close, end)
            return ends

        (stdin_theirs, stdin_ours), (out_ours, out_theirs), (err_ours, err_theirs) = pipe(), pipe(), pipe()
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(answers)
        with theirs, os.fdopen(os.memfd_create("request"), "w") as words:
            json.dump(request, words)
            words.flush()
            given = [stdin_theirs, out_theirs, err_theirs, out_ours, err_ours, theirs.fileno(), words.fileno()]
            socket.send_fds(control, [b"request"], given)
        for end in (stdin_theirs, out_theirs, err_theirs):
            _close(end)
        streams = _Streams(stdin_ours, stdin, {out_ours: out, err_ours: err})
        if streams.pump(answers, timeout, stop):
            streams.drain()
            return _answer(answers)
        answers.shutdown(socket.SHUT_WR)  # nobody wants it any more
        streams.pump(answers, KILL_SECONDS, None)
        _answer(answers)
        return None


class _Streams:
    """Moves bytes between memory and a command's standard streams."""

    def __init__(self, stdin: int, data: bytes, outputs: dict[int, Write]) -> None:
        self._stdin = stdin
        self._data = memoryview(data)
        self._outputs = outputs
        self._poll = select.poll()
        for descriptor in (stdin, *outputs):
            os.set_blocking(descriptor, False)
        for descriptor in outputs:
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(stdin, select.POLLOUT)

    def pump(self, answers: socket.socket, seconds: float, stop: Interrupt | None) -> bool:
        """Until there is an answer (true), or time is up or `stop` is set (false)."""
        deadline = time.monotonic() + seconds
        self._poll.register(answers, select.POLLIN)
        if stop is not None:
            self._poll.register(stop, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in self._poll.poll(1000 * left)]
            if answers.fileno() in ready:
                return True
            if stop is not None and stop.fileno() in ready:
                self._poll.unregister(stop)
                return False
            for descriptor in ready:
                self._serve(descriptor)
        return False

    def drain(self) -> None:
        """Take what is there; what was left in the background may write more, which concerns nobody."""
        for descriptor in list(self._outputs):
            while self._read(descriptor):
                pass

    def _serve(self, descriptor: int) -> None:
        if descriptor == self._stdin:
            self._feed()
        else:
            self._read(descriptor)

    def _feed(self) -> None:
        try:
            self._data = self._data[os.write(self._stdin, self._data[: 2**16]) :]
        except BlockingIOError:
            return
        except OSError:
            self._data = memoryview(b"")  # the command reads no more
        if not self._data:
            self._poll.unregister(self._stdin)
            _close(self._stdin)

    def _read(self, descriptor: int) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(descriptor, 2**16)
        except BlockingIOError:
            return False
        if data:
            self._outputs[descriptor](data)
        elif self._outputs.pop(descriptor, None):
            self._poll.unregister(descriptor)
        return bool(data)


def _answer(answers: socket.socket) -> dict[str, Any]:
    answers.settimeout(0)
    try:
        message = answers.recv(4096)
    except BlockingIOError:
        message = b""
    if not message:
        raise ConnectionResetError("the sandbox ended")
    answer: dict[str, Any] = json.loads(message)
    return answer


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
