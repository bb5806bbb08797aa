"""One command in a container: its output within limits, its deadline, its end.

The stream of an `exec` stays open for as long as anything holds the command's output, also what it left in the
background. So when the stream is quiet the engine is asked whether the command still runs.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.envs.sandbox.base import MAX_OUTPUT, Command
from agentrl.envs.sandbox.interrupt import Interrupt
from agentrl.envs.sandbox.output import Output

QUIET_SECONDS = 0.1
"""After this long without output the engine is asked whether the command still runs; later less often."""

LONGEST_QUIET = 10.0

LAST_SECONDS = 1.0
"""How long a stream that others hold open is listened to after the command's end: the engine may be behind with it."""

PLAIN_SECONDS = 30.0
"""Deadline of the commands that a sandbox runs for itself."""

STREAMS = (1, 2)


@dataclass
class Ran:
    """What a command wrote, and how it ended; `running` if it did not, because it was late or interrupted."""

    exec_id: str
    stdout: Output
    stderr: Output
    exit_code: int = -1
    running: bool = False
    pending: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream: frames of a stream's number, a length, and output."""
        self.pending += data
        while len(self.pending) >= 8:
            stream, size = struct.unpack(">BxxxL", self.pending[:8])
            if stream not in STREAMS or any(self.pending[1:4]):
                # Not a frame: the engine says in plain text why it could not start the command.
                self.stderr.write(bytes(self.pending))
                self.pending.clear()
                return
            if len(self.pending) < 8 + size:
                return
            (self.stdout if stream == 1 else self.stderr).write(bytes(self.pending[8 : 8 + size]))
            del self.pending[: 8 + size]


def run_plain(api: Any, container: str, argv: Sequence[str], user: str) -> Ran:
    """Run a command that a sandbox needs for itself."""
    with Interrupt() as stop:
        return run(api, container, Command(argv, PLAIN_SECONDS, user, "/", {}, None, MAX_OUTPUT, stop), "")


def run(api: Any, container: str, command: Command, mark: str) -> Ran:
    """Run a command until it ends, is late or is interrupted.

    Args:
        api: The SDK's low-level client.
        container: Id of the container.
        command: What to run.
        mark: An entry of its environment by which it and its children are found, or "".
    """
    import docker.errors

    environment = [f"{name}={value}" for name, value in command.env.items()] + ([mark] if mark else [])
    exec_id = api.exec_create(
        container,
        list(command.argv),
        stdin=command.stdin is not None,
        user=command.user or "",
        workdir=command.cwd,
        environment=environment,
    )["Id"]
    ran = Ran(exec_id, Output(command.max_output), Output(command.max_output))
    try:
        stream = api.exec_start(exec_id, socket=True)
    except docker.errors.APIError as error:
        if error.status_code != 400 and "OCI runtime exec failed" not in str(error.explanation):
            raise
        ran.exit_code = 126  # there is no such folder or program, or no process more may be started
        ran.stderr.write(f"{error.explanation}\n".encode())
        return ran
    try:
        ran.running = not _pump(api, stream, ran, command)
    finally:
        _close(stream)
    if not ran.running:
        ran.exit_code = _exit_code(api, exec_id)
    return ran


def _pump(api: Any, stream: Any, ran: Ran, command: Command) -> bool:
    """Move bytes until the command has ended (true), or is late or interrupted (false)."""
    connection = getattr(stream, "_sock", stream)
    connection.setblocking(False)
    ran.feed(_read_ahead(stream))
    start = time.monotonic()
    deadline = start + command.timeout
    stdin = memoryview(command.stdin or b"")
    waiting = select.poll()
    waiting.register(command.stop, select.POLLIN)
    waiting.register(connection, select.POLLIN | (select.POLLOUT if command.stdin is not None else 0))
    quiet, ended = QUIET_SECONDS, False
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(waiting.poll(1000 * min(left, quiet)))
        if command.stop.fileno() in ready:
            return False
        events = ready.get(connection.fileno(), 0)
        if events & select.POLLOUT:
            stdin = stdin[_send(connection, stdin) :]
            if not stdin:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                waiting.modify(connection, select.POLLIN)
        if events & ~select.POLLOUT:
            try:
                data = connection.recv(2**16)
            except BlockingIOError:
                continue
            except ConnectionError:
                data = b""
            if not data:
                return True
            ran.feed(data)
        elif not events:
            if ended:
                return True  # nothing more came after its end: what holds the stream now runs in the background
            ended = not api.exec_inspect(ran.exec_id)["Running"]
            taken = time.monotonic() - start
            quiet = LAST_SECONDS if ended else min(2 * quiet, max(1.0, taken / 20), LONGEST_QUIET)
    return ended


def _read_ahead(stream: Any) -> bytes:
    """Bytes of the stream that the SDK's HTTP client read together with the headers; the SDK loses them."""
    response = getattr(stream, "_response", None)
    buffered = None if response is None else response.raw._fp.fp
    if buffered is None:
        return b""
    with contextlib.suppress(OSError):
        return bytes(buffered.read1(2**16) or b"")
    return b""


def _close(stream: Any) -> None:
    """Close the connection, whoever holds it: while it is open and unread the engine waits, and later execs with it."""
    connection = getattr(stream, "_sock", stream)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    stream.close()


def _send(connection: Any, data: memoryview) -> int:
    try:
        return int(connection.send(data[: 2**16])) if data else 0
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)  # the command reads no more


def _exit_code(api: Any, exec_id: str) -> int:
    """Its exit code; the engine may need a moment after the stream's end."""
    for attempt in range(100):
        state = api.exec_inspect(exec_id)
        if not state["Running"] and state["ExitCode"] is not None:
            return int(state["ExitCode"])
        time.sleep(0.002 * (attempt + 1))
    return -1
