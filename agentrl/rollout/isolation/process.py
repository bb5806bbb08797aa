"""Processes that isolated environments live in, as their parent sees them.

An `InstanceProcess` answers one request at a time. Every way in which it can end without an answer (a crash, a limit,
a kill, an unreadable answer) is an `EnvironmentFailure` that tells the cause and the last lines of its stderr.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, Protocol, cast

from agentrl.errors import EnvironmentFailure, EpisodeDone
from agentrl.rollout.isolation import child
from agentrl.rollout.isolation.wire import FRAME, MAX_FRAME, decode
from agentrl.types import StepReward

STDERR_CHARACTERS = 2000
"""How much of a dead process's stderr its failure quotes."""

READ_SECONDS = 60.0
"""How long the start of an instance, and reading one of its attributes, may take."""


class Handle(Protocol):
    """A running process."""

    pid: int

    def kill(self) -> int | None:
        """Kill it with all that it started; gives its exit code, negative for a signal, None if nobody knows it."""


class InstanceProcess:
    """One environment instance in a process.

    Args:
        class_name: For messages.
        handle: The process.
        connection: This side of its socket.
        lifeline: The end of a pipe that keeps the process alive.
        errors: Where its stderr goes.
        limits: How its limits are written in the call of `isolated`, for messages.
    """

    def __init__(
        self,
        class_name: str,
        handle: Handle,
        connection: socket.socket,
        lifeline: int,
        errors: Any,
        limits: Mapping[str, str],
    ) -> None:
        self.class_name = class_name
        self.done = False
        self.pid = handle.pid
        self._handle = handle
        self._connection = connection
        self._lifeline = lifeline
        self._errors = errors
        self._limits = limits
        self._cause: str | None = None
        self._turn = asyncio.Lock()
        self._ending = threading.Lock()

    @property
    def gone(self) -> bool:
        """Whether the process has ended; it may be asked while no call runs."""
        return self._cause is not None or _hung_up(self._connection)

    def wait_until_made(self) -> None:
        """Wait for the instance to be made; raises what its class raised."""
        self._read(self._receive_now("__init__"))

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method; raises what it raised.

        Cancelling the call ends the process: there is no other way to stop what it does.
        """
        async with self._turn:
            self._check_alive(name)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_sendall(self._connection, _frame(("call", name, args, kwargs)))
                answer = await self._receive(loop)
            except (OSError, ValueError, EOFError) as error:
                raise await asyncio.to_thread(self._died, name, error) from None
            except asyncio.CancelledError:
                self.kill("it was ended because a call took too long or was cancelled")
                raise
        return self._read(answer)

    def get(self, name: str) -> Any:
        """Read an attribute, from a thread that may wait; not while a call runs."""
        self._check_alive(name)
        try:
            self._connection.settimeout(READ_SECONDS)
            self._connection.sendall(_frame(("get", name, (), {})))
        except OSError as error:
            raise self._died(name, error) from None
        return self._read(self._receive_now(name))

    def kill(self, cause: str = "it was closed") -> int | None:
        """End the process and all that it started; gives its exit code the first time, if it is known."""
        with self._ending:
            if self._cause is not None:
                return None
            self._cause = cause
            code = self._handle.kill()
            self._connection.close()
            self._errors.close()
            os.close(self._lifeline)
            return code

    # Answers ------------------------------------------------------------------------------------------------

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
        async def exactly(size: int) -> bytes:
            data = bytearray()
            while len(data) < size:
                if not (part := await loop.sock_recv(self._connection, min(size - len(data), 1 << 20))):
                    raise EOFError
                data += part
            return bytes(data)

        return self._decoded(await exactly(_body_size(await exactly(FRAME.size))))

    def _receive_now(self, name: str) -> dict[str, Any]:
        def exactly(size: int) -> bytes:
            data = bytearray()
            while len(data) < size:
                if not (part := self._connection.recv(min(size - len(data), 1 << 20))):
                    raise EOFError
                data += part
            return bytes(data)

        try:
            self._connection.settimeout(READ_SECONDS)
            return self._decoded(exactly(_body_size(exactly(FRAME.size))))
        except (OSError, ValueError, EOFError) as error:
            raise self._died(name, error) from None
        finally:
            if self._cause is None:
                self._connection.setblocking(False)

    def _decoded(self, body: bytes) -> dict[str, Any]:
        answer = decode(body)
        if not isinstance(answer, dict) or not isinstance(answer.get("done"), bool):
            raise ValueError(f"not an answer: {str(answer)[:200]}")
        return answer

    def _read(self, answer: dict[str, Any]) -> Any:
        self.done = answer["done"]
        if (raised := answer.get("raised")) is None:
            value = answer.get("value")
            return StepReward(value, answer["reward"]) if "reward" in answer else value
        raise _exception(raised, self.class_name)

    # Ends -----------------------------------------------------------------------------------------------------

    def _check_alive(self, name: str) -> None:
        if self._cause is not None:
            raise EnvironmentFailure(f"{self.class_name}.{name}: the process is gone, {self._cause}")

    def _died(self, name: str, error: Exception) -> EnvironmentFailure:
        """Clean up after a process that did not answer; gives the failure to raise."""
        last_words = self._last_words()
        code = self.kill(f"it died in `{name}`")
        if isinstance(error, EOFError | ConnectionError):
            cause = self._exit_cause(code)
        elif isinstance(error, TimeoutError):
            cause = f"did not answer within {READ_SECONDS:.0f} s"
        else:
            cause = f"gave an unreadable answer ({error})"
        return EnvironmentFailure(f"the process of {self.class_name} {cause} in `{name}`{last_words}")

    def _exit_cause(self, code: int | None) -> str:
        if code is None:
            return "is gone"
        if code >= 0:
            return f"ended with exit code {code}"
        if -code == signal.SIGXCPU:
            return f"used more processor time than {self._limits['cpu_time']} allows"
        hint = ", perhaps by the system because memory ran out," if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - STDERR_CHARACTERS))
            if text := self._errors.read().decode("utf-8", "replace").strip():
                return f"; its stderr ends with:\n{text}"
        return ""


def _hung_up(connection: socket.socket) -> bool:
    """Whether the process at the other side is gone, also if it said something before that nobody has read yet."""
    if connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection, 0)  # nothing but a hang-up or an error, which are always told
    return bool(poll.poll(0))


def _frame(message: Any) -> bytes:
    body = pickle.dumps(message)
    return FRAME.pack(len(body)) + body


def _body_size(head: bytes) -> int:
    (size,) = FRAME.unpack(head)
    if size > MAX_FRAME:
        raise ValueError(f"{size} bytes; at most {MAX_FRAME} are taken")
    return int(size)


def _exception(raised: Mapping[str, Any], class_name: str) -> Exception:
    """An exception like the one raised over there, with its class name, text and traceback."""
    text = str(raised.get("text"))
    if raised.get("kind") == "done":
        return EpisodeDone(StepReward(text, raised["reward"]) if "reward" in raised else text)
    if raised.get("kind") == "failure":
        error: Exception = EnvironmentFailure(text)
    else:
        error = _lookalike(str(raised.get("type")), str(raised.get("module")), text)
    # As a cause it shows in logs; a note would be part of what the model is told.
    error.__cause__ = RemoteTraceback(f"in the process of {class_name}:\n{raised.get('traceback')}")
    return error


def _lookalike(name: str, module: str, text: str) -> Exception:
    """An exception that prints like one whose class is only known over there; a built-in one is caught as such."""
    base = getattr(builtins, name, None) if module == "builtins" else None
    if not (isinstance(base, type) and issubclass(base, Exception)):
        base = Exception
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        name = "Exception"
    kind = type(name, (base,), {"__module__": module, "__str__": lambda self: text})
    return cast("Exception", kind.__new__(kind, text))


class RemoteTraceback(Exception):  # noqa: N818 (not raised; it prints where an exception came from)
    """The traceback of an exception raised in another process."""


# Starting processes ----------------------------------------------------------------------------------------------


class Spawner:
    """Starts every instance in a fresh interpreter."""

    def __init__(self, class_name: str, order: child.Order, limits: Mapping[str, str]) -> None:
        self._class_name = class_name
        self._order = order
        self._limits = limits

    def start(self) -> InstanceProcess:
        """Start a process; its instance is made in the background."""
        return _start_instance(self._class_name, self._limits, self._spawn)

    def _spawn(self, theirs: socket.socket, lifeline: int, errors: Any, ours: socket.socket) -> Handle:
        handle = _Spawned("instance", theirs, lifeline, errors)
        ours.sendall(_frame(self._order))
        return handle

    gone = False

    def close(self) -> None:
        """Nothing is kept between starts."""


class ForkServer:
    """Starts one process that imports the class, and forks every instance from it: quick, and memory is shared."""

    def __init__(self, class_name: str, order: child.Order, limits: Mapping[str, str]) -> None:
        self._class_name = class_name
        self._limits = limits
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        with theirs:
            self._server = _Spawned("server", theirs, lifeline, subprocess.DEVNULL)
        os.close(lifeline)
        self._connection.sendall(_frame(order))

    def start(self) -> InstanceProcess:
        """Fork a process; its instance is made in the background."""
        return _start_instance(self._class_name, self._limits, self._fork)

    def _fork(self, theirs: socket.socket, lifeline: int, errors: Any, ours: socket.socket) -> Handle:
        return _Forked(self, self._ask("fork", theirs.fileno(), lifeline, errors.fileno()))

    def wait(self, pid: int) -> int | None:
        """Wait for the end of a fork; gives its exit code, negative for a signal, None if the server is gone."""
        try:
            return self._ask(f"wait {pid}")
        except EnvironmentFailure:
            return None

    def _ask(self, request: str, *descriptors: int) -> int:
        reply = bytearray()
        with self._lock, contextlib.suppress(OSError):  # it is gone if it cannot be written to
            socket.send_fds(self._connection, [request.encode()], descriptors)
            while not reply.endswith(b"\n") and (part := self._connection.recv(64)):
                reply += part
        if not reply.endswith(b"\n"):
            raise EnvironmentFailure(f"the process that forks instances of {self._class_name} is gone")
        return int(reply)

    @property
    def gone(self) -> bool:
        """Whether the process has ended; its forks live on, new ones need another server."""
        return _hung_up(self._connection)

    def close(self) -> None:
        """End the process; its forks live on."""
        with self._lock:
            self._connection.close()
            os.close(self._lifeline)
            self._server.kill()


class _Spawned:
    """A process started from here, the first of a process group of its own."""

    def __init__(self, role: str, connection: socket.socket, lifeline: int, errors: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", child.__name__, role, str(connection.fileno()), str(lifeline)],
            pass_fds=(connection.fileno(), lifeline),
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()


class _Forked:
    """A process forked by a `ForkServer`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def kill(self) -> int | None:
        # The id is not used again before `wait`, as long as there is a server.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._server.wait(self.pid)


def _start_instance(class_name: str, limits: Mapping[str, str], start: Any) -> InstanceProcess:
    """Make the channels of an instance and start its process with them."""
    ours, theirs = socket.socketpair()
    read_end, lifeline = os.pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
    try:
        with theirs:
            handle = start(theirs, read_end, errors, ours)
    except BaseException:
        ours.close()
        os.close(lifeline)
        errors.close()
        raise
    finally:
        os.close(read_end)
    return InstanceProcess(class_name, handle, ours, lifeline, errors, limits)
