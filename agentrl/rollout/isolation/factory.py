"""`isolated`: a factory of environments whose instances live in processes of their own.

The engine sees ordinary environments. Their tools keep the signatures and docstrings of the class; calling one
asks the process. A segfault, `os._exit`, running out of memory, an endless loop or a call that is cancelled because
it took too long costs that process, and raises `EnvironmentFailure` here: the rollout is tried again on another one.
What an environment raises otherwise arrives as an exception of the same name and text.

Processes end with their parent, however it ends.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle

from agentrl.errors import ConfigurationError
from agentrl.rollout.isolation.child import Order
from agentrl.rollout.isolation.process import ForkServer, InstanceProcess, Spawner

START_METHODS: dict[str, type[Spawner] | type[ForkServer]] = {"spawn": Spawner, "forkserver": ForkServer}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def isolated(
    environment: Callable[[], Any],
    *,
    memory: int | str | None = None,
    cpu_time: float | None = None,
    start_method: str = "spawn",
    warm: int = 1,
) -> IsolatedFactory:
    """Make an `environment_factory` whose instances live in processes of their own.

    Args:
        environment: An environment class, or a `functools.partial` of one. It may be defined in the running script.
        memory: Most private memory of a process, in bytes or as "512MB", "2GiB" (both binary). An allocation beyond
            it fails, which costs the process. Children that it starts have the same limit, each their own. Linux.
        cpu_time: Most seconds on the processor for one call, rounded up to whole ones; beyond them the process is
            killed. Waiting does not count: that is what tool timeouts are for.
        start_method: "spawn" starts a fresh interpreter for every instance. "forkserver" starts one, imports the
            class and forks instances from it: they start within milliseconds and share memory, but a module that
            starts threads when imported does not survive a fork.
        warm: Instances that are kept ready beyond those in use, so that replacing one costs no time.

    Returns:
        The factory.

    Raises:
        ConfigurationError: An argument cannot work; says which and why.
    """
    cls = environment.func if isinstance(environment, functools.partial) else environment
    if not inspect.isclass(cls):
        raise ConfigurationError(
            f"isolated() needs a class, or a functools.partial of one, to know the tools without making an instance "
            f"here; it got {environment!r}"
        )
    if start_method not in START_METHODS:
        raise ConfigurationError(
            f"start_method={start_method!r} is not one of {sorted(START_METHODS)} (a fork of this process would "
            "inherit its threads' locks, and may hang)"
        )
    if cpu_time is not None and not cpu_time > 0:
        raise ConfigurationError(f"cpu_time={cpu_time!r} must be above 0 seconds, or None for no limit")
    if warm < 0:
        raise ConfigurationError(f"warm={warm!r} must be 0 or more instances")
    if sys.platform == "win32":
        raise ConfigurationError("isolated() needs a POSIX system")
    order = Order(
        factory=cloudpickle.dumps(environment),
        memory=None if memory is None else _bytes(memory),
        cpu_time=cpu_time,
        path=[os.path.abspath(entry) for entry in sys.path],
    )
    limits = {"memory": f"memory={memory!r}", "cpu_time": f"cpu_time={cpu_time!r}"}
    return IsolatedFactory(cls, lambda: START_METHODS[start_method](cls.__name__, order, limits), warm)


class IsolatedFactory:
    """Makes proxies of environments in other processes; see `isolated`.

    Processes that wait to be used are ended when the last instance is closed.
    """

    def __init__(self, cls: type, make_starter: Callable[[], Spawner | ForkServer], warm: int) -> None:
        self._proxy = _proxy_class(cls)
        self._make_starter = make_starter
        self._warm = warm
        self._lock = threading.Lock()
        self._starter: Spawner | ForkServer | None = None
        self._ready: deque[InstanceProcess] = deque()
        self._in_use = 0

    def __call__(self) -> Any:
        """Make an instance; waits until its class has made it, and raises what that raised."""
        with self._lock:
            process = self._take()
            while len(self._ready) < self._warm:
                self._ready.append(self._start())
            self._in_use += 1
        try:
            process.wait_until_made()
        except BaseException:
            process.kill()
            self._given_up()
            raise
        return self._proxy(process, self._given_up)

    def _take(self) -> InstanceProcess:
        """A process that waits to be used, unless it died while it waited, else a new one."""
        while self._ready:
            if not (process := self._ready.popleft()).gone:
                return process
            process.kill()
        return self._start()

    def _start(self) -> InstanceProcess:
        if self._starter is not None and self._starter.gone:
            self._starter.close()
            self._starter = None
        if self._starter is None:
            self._starter = self._make_starter()
        return self._starter.start()

    def _given_up(self) -> None:
        with self._lock:
            self._in_use -= 1
            if self._in_use or self._starter is None:
                return
            ready, self._ready = self._ready, deque()
            for process in ready:
                process.kill()
            self._starter.close()
            self._starter = None


class IsolatedEnvironment:
    """Base of the proxies. Attributes that it does not have are read from the instance in its process."""

    def __init__(self, process: InstanceProcess, given_up: Callable[[], None]) -> None:
        self._process = process
        self._given_up: Callable[[], None] | None = given_up

    @property
    def done(self) -> bool:
        """Whether the instance said after its last call that the episode is over."""
        return self._process.done

    async def close(self) -> None:
        """Let the instance close itself, then end its process."""
        if (given_up := self._given_up) is None:
            return
        self._given_up = None
        try:
            if self._closes and not self._process.gone:
                await self._process.call("close")
        finally:
            await asyncio.shield(asyncio.to_thread(self._leave, given_up))  # waits for the kernel

    def _leave(self, given_up: Callable[[], None]) -> None:
        self._process.kill()
        given_up()

    _closes = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._process.get(name)


def died_idle(instance: Any) -> bool:
    """Whether an environment is an isolated one whose process is gone, while no call is made to it."""
    return isinstance(instance, IsolatedEnvironment) and instance._process.gone


def _proxy_class(cls: type) -> type:
    """A class with the methods of `cls`, each of which asks the process."""
    members: dict[str, Any] = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name == "close":
            members["_closes"] = True
        elif not name.startswith("_") and inspect.isfunction(method):
            members[name] = _asking(name, method)
    members["replayable"] = getattr(cls, "replayable", False)
    return type(cls.__name__, (IsolatedEnvironment,), members)


def _asking(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def ask(self: IsolatedEnvironment, *args: Any, **kwargs: Any) -> Any:
        return await self._process.call(name, *args, **kwargs)

    return ask


def _bytes(memory: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(memory), re.IGNORECASE)
    if match is None or (size := int(float(match[1]) * _UNITS[match[2].upper()])) < 1:
        raise ConfigurationError(f'memory={memory!r} is not a size; write bytes, "512MB" or "2GiB"')
    return size
