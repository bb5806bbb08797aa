"""The process of an isolated environment: makes the instance and answers calls until its parent is gone.

Run as `python -m agentrl.rollout.isolation.child ROLE SOCKET LIFELINE`. ROLE is "instance", or "server" for a process
that imports the class once and then forks an instance for each request. What the parent sends is pickled, since it
is trusted; what goes back is not (see `wire`). This module is imported in every such process, so it stays light.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from agentrl.errors import EnvironmentFailure, EpisodeDone
from agentrl.rollout.isolation.wire import FRAME, encode
from agentrl.rollout.results import render
from agentrl.types import StepReward

with contextlib.suppress(ImportError):  # Windows imports this module too, but runs no such process
    import resource

UNRENDERED = frozenset({"reset", "get_reward", "close"})
"""Methods whose results are values for agentrl, not text for the model."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the parent sends first: what to make and within which limits.

    Attributes:
        factory: Pickled; makes the instance.
        memory: Bytes of private memory, None for no limit.
        cpu_time: Seconds on the processor for each call, None for no limit.
        path: `sys.path` of the parent.
    """

    factory: bytes
    memory: int | None
    cpu_time: float | None
    path: list[str]


def main(role: str, connection: socket.socket, lifeline: int) -> None:
    """Serve until the parent is gone."""
    order: Order = pickle.loads(receive(connection))
    sys.path[:] = order.path
    if role == "server":
        _serve_forks(connection, order)
    _serve(connection, lifeline, order)


def receive(connection: socket.socket) -> bytes:
    """Read one frame; ends the process when the other side is gone."""
    (size,) = FRAME.unpack(_exactly(connection, FRAME.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            os._exit(0)
        data += part
    return bytes(data)


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    body = encode(answer)
    connection.sendall(FRAME.pack(len(body)) + body)


# A process that forks instances --------------------------------------------------------------------------------


def _serve_forks(connection: socket.socket, order: Order) -> None:
    """Fork an instance for every request; only a fork returns, with the connection that it was given.

    A request is "fork", with the descriptors of the instance, or "wait", with a process id. Ended processes are kept
    until the parent asks for them, so that no id is used twice while it may still be killed.
    """
    problem = None
    try:
        pickle.loads(order.factory)  # imports what instances need, once
    except Exception as error:  # noqa: BLE001 (an instance will raise it again and say so)
        problem = error
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 64, 3)
        if not message:
            os._exit(0)
        kind, _, number = message.decode().partition(" ")
        if kind == "wait":
            connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(int(number), 0)[1])}\n".encode())
        elif (pid := os.fork()) == 0:
            connection.close()
            del problem
            os.setsid()
            own, lifeline, errors = descriptors
            os.dup2(errors, 2)
            os.close(errors)
            _serve(socket.socket(fileno=own), lifeline, order)
        else:
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(f"{pid}\n".encode())


# One instance ------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket, lifeline: int, order: Order) -> None:
    faulthandler.enable()  # says on stderr where a crash happened
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair: it closes the instance
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    if order.memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (order.memory, order.memory))
    loop = asyncio.new_event_loop()
    instance: Any = None
    while True:
        _allow_cpu(order.cpu_time)
        if instance is None:
            answer = _outcome(loop, lambda: pickle.loads(order.factory)(), render_result=False, keep=True)
            instance = answer.pop("kept", None)
            answer["value"] = None
        else:
            kind, name, args, kwargs = pickle.loads(receive(connection))
            answer = _answer(loop, instance, kind, name, args, kwargs)
        answer["done"] = _done(instance)
        try:
            _send(connection, answer)
        except TypeError as error:
            _send(connection, {"raised": _described(error), "done": answer["done"]})
        if instance is None or answer.get("fatal"):
            os._exit(1)


def _answer(
    loop: asyncio.AbstractEventLoop, instance: Any, kind: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    if kind == "get":
        return _outcome(loop, lambda: getattr(instance, name), render_result=False)
    return _outcome(loop, lambda: getattr(instance, name)(*args, **kwargs), render_result=name not in UNRENDERED)


def _outcome(loop: asyncio.AbstractEventLoop, run: Any, *, render_result: bool, keep: bool = False) -> dict[str, Any]:
    try:
        value = run()
        if inspect.isawaitable(value):
            value = loop.run_until_complete(_awaited(value))
        if keep:
            return {"kept": value}
        if render_result and isinstance(value, StepReward):
            return {"value": render(value.content), "reward": value.reward}
        return {"value": render(value) if render_result else value}
    except MemoryError as error:
        # Whatever ran out of memory is in an unknown state.
        return {"raised": _described(EnvironmentFailure(f"out of memory: {error}")), "fatal": True}
    except (Exception, SystemExit) as error:  # noqa: BLE001 (raised again in the parent)
        return {"raised": _described(error)}


async def _awaited(value: Any) -> Any:
    return await value


def _described(error: BaseException) -> dict[str, Any]:
    kind = "exception"
    if isinstance(error, EpisodeDone):
        kind = "done"
    elif isinstance(error, EnvironmentFailure):
        kind = "failure"
    with contextlib.suppress(Exception):
        described: dict[str, Any] = {
            "kind": kind,
            "type": type(error).__name__,
            "module": type(error).__module__,
            "text": str(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        if kind == "done" and error.args and isinstance(step := error.args[0], StepReward):
            described |= {"text": str(step.content), "reward": step.reward}
        return described
    return {"kind": kind, "type": type(error).__name__, "module": "", "text": "(unprintable)", "traceback": ""}


def _done(instance: Any) -> bool:
    try:
        done = getattr(instance, "done", False)
        return not callable(done) and bool(done)
    except Exception:  # noqa: BLE001 (a property of the user's)
        return False


def _allow_cpu(seconds: float | None) -> None:
    """Let the next call use so many seconds more; beyond them the system ends the process with SIGXCPU."""
    if seconds is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def _die_with_parent(lifeline: int) -> None:
    """Wait for the parent's end of a pipe to close, which happens however the parent dies."""
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    # `Order` is pickled under the module's name, not as `__main__.Order`.
    from agentrl.rollout.isolation.child import main as run

    run(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
