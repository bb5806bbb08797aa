"""One request to the process that owns a local sandbox: its output within limits, its deadline, its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable
from io import FileIO
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

        def pipe() -> tuple[FileIO, FileIO]:
            ends = os.pipe()
            # Objects, since these close their descriptor once: a number may be another thread's the second time.
            return stack.enter_context(FileIO(ends[0], "r")), stack.enter_context(FileIO(ends[1], "w"))

        (stdin_theirs, stdin_ours), (out_ours, out_theirs), (err_ours, err_theirs) = pipe(), pipe(), pipe()
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(answers)
        with theirs, os.fdopen(os.memfd_create("request"), "w") as words:
            json.dump(request, words)
            words.flush()
            given: list[Any] = [stdin_theirs, out_theirs, err_theirs, out_ours, err_ours, theirs, words]
            socket.send_fds(control, [b"request"], [each.fileno() for each in given])
        for end in (stdin_theirs, out_theirs, err_theirs):
            end.close()
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

    def __init__(self, stdin: FileIO, data: bytes, outputs: dict[FileIO, Write]) -> None:
        self._stdin = stdin
        self._data = memoryview(data)
        self._outputs = {file.fileno(): (file, write) for file, write in outputs.items()}
        self._poll = select.poll()
        for file in (stdin, *outputs):
            os.set_blocking(file.fileno(), False)
            self._poll.register(file, select.POLLOUT if file is stdin else select.POLLIN)

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
        if descriptor in self._outputs:
            self._read(descriptor)
        else:
            self._feed()

    def _feed(self) -> None:
        try:
            self._data = self._data[self._stdin.write(self._data[: 2**16]) or 0 :]
        except OSError:
            self._data = memoryview(b"")  # the command reads no more
        if not self._data:
            self._poll.unregister(self._stdin)
            self._stdin.close()

    def _read(self, descriptor: int) -> bool:
        """Whether there may be more."""
        file, write = self._outputs[descriptor]
        if data := file.read(2**16):
            write(data)
        elif data is not None:
            del self._outputs[descriptor]
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
