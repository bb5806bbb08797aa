"""What a sandbox is: a place where untrusted commands run, with files, limits and an end.

A `Backend` starts sandboxes from a `SandboxSpec`; a `Sandbox` runs commands (`exec`), takes and gives files (`put`,
`get`, `get_folder`) and is stopped. Whatever a command does is an `ExecResult`, also when it was killed by a limit.
That the sandbox itself is gone, or its engine, is a `SandboxFailure`: an `EnvironmentFailure`, never a reward.

A command ends with its `exec`: at its deadline, or when the `exec` is cancelled, it and what it started are killed.
What a command that ends by itself leaves in the background lives on, within the sandbox's limits, until `stop`.
"""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Protocol, Self

from agentrl.envs.sandbox.archive import pack, read_file, unpack
from agentrl.envs.sandbox.interrupt import Interrupt
from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.rollout.threads import Threads

MAX_OUTPUT = 64 * 2**10
"""Bytes of a command's output that are kept unless told otherwise."""

MAX_GET = 256 * 2**20
"""Bytes that `get` and `get_folder` take out unless told otherwise."""

MAX_COMMAND = 96 * 2**10
"""Bytes of a command with its environment; Linux takes at most 128 KiB in one argument."""

IMAGE_FOLDER = 'readlink /proc/1/cwd || echo "/"'

CANCEL_SECONDS = 10.0
"""How long a cancelled `exec` waits for its command to be killed."""

_threads = Threads()


class SandboxFailure(EnvironmentFailure):
    """The sandbox or its engine is gone or does not answer; says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is made of, and what it may use.

    Attributes:
        image: Name of a Docker image (`docker` backend).
        dockerfile: Folder with a Dockerfile, built on first use (`docker` backend).
        rootfs: Folder or tar file with a root filesystem (`local` backend); None with no image: the host's programs.
        cpus: Processor cores.
        memory_mb: Memory of all processes together, in MiB; swap is not given.
        disk_mb: What may be written, in MiB; None for no limit but the medium's.
        pids: Processes and threads.
        network: Whether there is a network. Without one there is only a loopback device.
        workdir: Where commands start; made if missing.
        env: Environment variables of every command.
        user: Who commands run as ("root", "1000", "1000:1000", a name known inside); None for the image's user.
        capabilities: Linux capabilities that root keeps inside ("CHOWN", "DAC_OVERRIDE"); none by default.
        build_timeout: Seconds that building `dockerfile` may take.

    Raises:
        ConfigurationError: A value cannot work; names it.
    """

    image: str | None = None
    dockerfile: Path | None = None
    rootfs: Path | None = None
    cpus: float = 1.0
    memory_mb: int = 1024
    disk_mb: int | None = None
    pids: int = 256
    network: bool = False
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    capabilities: Sequence[str] = ()
    build_timeout: float = 600.0

    def __post_init__(self) -> None:
        sources = [name for name in ("image", "dockerfile", "rootfs") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise ConfigurationError(
                f"a sandbox is made of one thing, not of {' and '.join(sources)}; give one of them"
            )
        for name, least in (("cpus", 0.01), ("memory_mb", 16), ("pids", 8), ("disk_mb", 1), ("build_timeout", 1)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise ConfigurationError(f"{name}={value!r} must be at least {least}")
        if not self.workdir.startswith("/"):
            raise ConfigurationError(f"workdir={self.workdir!r} must be an absolute path inside the sandbox")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What came of a command.

    Attributes:
        exit_code: Its exit code, 128 + n if signal n ended it.
        stdout: Its standard output as text; bytes that are no UTF-8 are replaced.
        stderr: Its error output, likewise.
        truncated: Whether output was left out of the middle, because there was more than `max_output`.
        timed_out: Whether it was killed at its deadline.
        out_of_memory: Whether the kernel killed a process of the sandbox meanwhile because its memory was full.
        seconds: How long it took.
    """

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = False
    timed_out: bool = False
    out_of_memory: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class Command:
    """A command as a backend gets it; `stop` interrupts it."""

    argv: Sequence[str]
    timeout: float
    user: str | None
    cwd: str
    env: Mapping[str, str]
    stdin: bytes | None
    max_output: int
    stop: Interrupt


class Sandbox(ABC):
    """One running sandbox. Its methods may be awaited from any event loop, several at once."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._stopping = threading.Lock()
        self._stopped = False

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,  # noqa: ASYNC109 (the deadline of the command, enforced where it runs)
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """Run a command.

        Args:
            command: A line for `sh`, or a program with its arguments.
            timeout: Seconds until it is killed.
            user: Who runs it; None for the spec's user.
            cwd: Where it starts; None for the spec's `workdir`.
            env: Environment variables besides the spec's.
            stdin: What it reads; None for nothing.
            max_output: Bytes of stdout and of stderr to keep, each: the first and the last half.

        Raises:
            ValueError: The command is longer than `MAX_COMMAND`, or has a NUL character.
            SandboxFailure: The sandbox is gone.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {**self.spec.env, **(env or {})}
        _check_command(argv, variables)
        with Interrupt() as stop:
            wanted = Command(
                argv, timeout, user or self.spec.user, cwd or self.spec.workdir, variables, stdin, max_output, stop
            )
            return await _finish(self._exec, wanted, stop=stop)

    async def put(self, source: Path | bytes, target: str) -> None:
        """Write a file, or a folder with what is in it; missing parents are made.

        Args:
            source: The content of a file, or a file or folder here. Symbolic links stay links.
            target: Its path inside: the file's or folder's own name comes last. Inside a sandbox a symbolic link
                leads to where it leads there, never to a file here.

        Raises:
            OSError: It cannot be read here, or not written there (disk full, no permission).
        """
        parent, _, name = self._path(target).rstrip("/").rpartition("/")
        with SpooledTemporaryFile(max_size=8 * 2**20) as tar:
            await _finish(pack, source, name, tar, self._owner())
            tar.seek(0)
            await _finish(self._put, tar, parent or "/")

    async def get(self, path: str, *, max_bytes: int = MAX_GET) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: There is none.
            IsADirectoryError: It is a folder; use `get_folder`.
            ValueError: It is larger than `max_bytes`, or neither file nor folder.
        """
        with SpooledTemporaryFile(max_size=8 * 2**20) as tar:
            await _finish(self._get, self._path(path), tar, max_bytes)
            tar.seek(0)
            return read_file(tar, path, max_bytes)

    async def get_folder(self, path: str, target: Path, *, max_bytes: int = MAX_GET) -> list[str]:
        """Copy what is in a folder into a folder here, which is made if missing.

        Nothing is written outside of `target`: links that lead out of it, devices and pipes are left out.

        Returns:
            Names of what was left out.

        Raises:
            FileNotFoundError: There is none.
            NotADirectoryError: It is a file.
            ValueError: It is larger than `max_bytes`.
        """
        with SpooledTemporaryFile(max_size=8 * 2**20) as tar:
            await _finish(self._get, self._path(path), tar, max_bytes)
            tar.seek(0)
            return await _finish(unpack, tar, target, path, max_bytes)

    async def image_folder(self) -> str:
        """Where commands of the image start that are told nothing else: the folder of its first process."""
        return (await self.exec(IMAGE_FOLDER, timeout=60, user="root", cwd="/")).stdout.strip() or "/"

    async def snapshot(self) -> SandboxSpec:
        """A spec whose sandboxes start with the files as they are now; processes are not part of it.

        Raises:
            NotImplementedError: The backend cannot.
        """
        return await _finish(self._snapshot)

    async def stop(self) -> None:
        """End every process inside and free everything; a second call does nothing."""
        with self._stopping:
            if self._stopped:
                return
            self._stopped = True
        await _finish(self._stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.spec.workdir.rstrip('/')}/{path}"

    # What a backend does, in a thread.

    @abstractmethod
    def _exec(self, command: Command) -> ExecResult: ...

    @abstractmethod
    def _put(self, tar: IO[bytes], folder: str) -> None:
        """Extract a tar inside `folder`, which is made if missing, as the spec's user."""

    @abstractmethod
    def _get(self, path: str, tar: IO[bytes], max_bytes: int) -> None:
        """Write a file or folder into a tar; the first member is the thing itself."""

    @abstractmethod
    def _stop(self) -> None: ...

    def _owner(self) -> tuple[int, int]:
        """User and group that files written by `_put` belong to."""
        return 0, 0

    def _snapshot(self) -> SandboxSpec:
        raise NotImplementedError(f"{type(self).__name__} keeps no snapshots; the docker backend does")


class Backend(Protocol):
    """Starts sandboxes."""

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what cannot work here, before anything runs.

        Raises:
            ConfigurationError: Says what is missing and what to install or change.
        """

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; one whose start is cancelled is stopped."""

    def start_blocking(self, spec: SandboxSpec) -> Sandbox:
        """`start`, for a thread."""


async def start_in_thread(make: Callable[[SandboxSpec], Sandbox], spec: SandboxSpec) -> Sandbox:
    """Start a sandbox in a thread; if the caller is cancelled meanwhile it is stopped as soon as it is there."""
    made: list[Sandbox] = []
    given_up = threading.Event()

    def work() -> Sandbox:
        made.append(make(spec))
        if given_up.is_set():
            made[0]._stop()
        return made[0]

    starting = asyncio.ensure_future(_threads.run(work))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        given_up.set()
        await asyncio.wait([starting], timeout=CANCEL_SECONDS)
        if made:  # else the thread stops it, whenever it comes to be
            await made[0].stop()
        raise


async def _finish(function: Callable[..., Any], *args: Any, stop: Interrupt | None = None) -> Any:
    """Call in a thread. A cancelled caller first interrupts the call and waits, within limits, for its end."""
    running = asyncio.ensure_future(_threads.run(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        await asyncio.wait([running], timeout=CANCEL_SECONDS)
        if running.done() and not running.cancelled():
            running.exception()  # nobody wants it
        raise


def _check_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    texts = [*argv, *(f"{name}={value}" for name, value in env.items())]
    if any("\0" in text for text in texts):
        raise ValueError("a command and its environment cannot contain NUL characters")
    if (size := sum(len(text.encode(errors="surrogateescape")) + 1 for text in texts)) > MAX_COMMAND:
        raise ValueError(
            f"the command and its environment have {size} bytes, at most {MAX_COMMAND} can be passed; "
            "write a file with `put` and run that"
        )
