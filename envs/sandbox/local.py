"""Sandboxes in namespaces of this machine, through bubblewrap: no daemon, no image, no privilege needed.

Each sandbox has a process of its own (`bwrap/supervisor.py`), which ends with this one, however it ends. Its root
filesystem is the host's programs (`/usr` and what belongs to it, `/etc`), or a folder or tar file; everything is
writable as far as its owners allow, into a layer in memory that vanishes with the sandbox. What is written counts as
memory, too.

As root, a control group holds memory, processes and processor time of all processes together. Without the right to make
one, memory is limited for each process, and `cpus` is rounded up to whole cores; `LocalBackend.has_cgroups` says which.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from agentrl.envs.sandbox.base import Command, ExecResult, Sandbox, SandboxFailure, SandboxSpec, start_in_thread
from agentrl.envs.sandbox.bwrap import cgroups, files, linux
from agentrl.envs.sandbox.bwrap.jail import find_user
from agentrl.envs.sandbox.interrupt import Interrupt
from agentrl.envs.sandbox.local_exec import run
from agentrl.envs.sandbox.output import Output
from agentrl.envs.sandbox.rootfs import extracted
from agentrl.errors import ConfigurationError

logger = logging.getLogger(__name__)

HOST_FOLDERS = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""What a sandbox without a `rootfs` sees of the host; nothing else is there, and secrets in them stay unreadable."""

EMPTY_FOLDERS = (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/root", 0o700), ("/home", 0o755), ("/run", 0o755))

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}

START_SECONDS = 60.0
FILE_SECONDS = 600.0
STOP_SECONDS = 30.0

CODE = "import sys; sys.path.append(sys.argv[1]); from bwrap.supervisor import main; main()"


class LocalBackend:
    """Starts sandboxes on this machine.

    Args:
        visible: Folders and files of the host that sandboxes see besides, read-only, at the same paths.

    Raises:
        ConfigurationError: Bubblewrap is missing, or this is not Linux.
    """

    name = "local"

    def __init__(self, *, visible: Sequence[str | Path] = ()) -> None:
        if sys.platform != "linux":
            raise ConfigurationError("the local backend needs Linux; use DockerBackend")
        found = shutil.which("bwrap")
        if found is None:
            raise ConfigurationError(
                "the local backend needs bubblewrap: install it (Debian and Ubuntu: apt install bubblewrap, "
                "Fedora: dnf install bubblewrap), or use DockerBackend"
            )
        self._bwrap = found
        self._visible = [str(Path(path).resolve(strict=True)) for path in visible]
        self._root = os.geteuid() == 0
        self.has_cgroups = self._root and _can_make_cgroups()
        """Whether limits hold for all processes of a sandbox together."""

    def check(self, spec: SandboxSpec) -> None:
        """Refuse images, and users that do not exist here.

        Raises:
            ConfigurationError: Says why.
        """
        for name in ("image", "dockerfile"):
            if getattr(spec, name) is not None:
                raise ConfigurationError(
                    f"the local backend cannot use {name}={getattr(spec, name)!s}; give it rootfs= (`docker export` "
                    "writes one), or use DockerBackend"
                )
        if spec.rootfs is not None and not spec.rootfs.exists():
            raise ConfigurationError(f"there is no rootfs {spec.rootfs}")
        if not self._root and (spec.user or "root").partition(":")[0] not in ("root", "0"):
            raise ConfigurationError(f"user={spec.user!r} cannot be had by the local backend unless root starts it")
        if unknown := set(spec.capabilities) - set(linux.CAPABILITIES):
            raise ConfigurationError(f"capabilities={sorted(unknown)} are not known; {linux.CAPABILITIES} are")

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        """Start a sandbox.

        Raises:
            ConfigurationError: The spec cannot work here.
            SandboxFailure: It cannot be started; says why.
        """
        sandbox = await start_in_thread(self.start_blocking, spec)
        assert isinstance(sandbox, LocalSandbox)
        return sandbox

    def start_blocking(self, spec: SandboxSpec) -> LocalSandbox:
        """`start`, for a thread."""
        self.check(spec)
        return LocalSandbox(spec, self._config(spec))

    def _config(self, spec: SandboxSpec) -> dict[str, Any]:
        memory = spec.memory_mb * 2**20
        layers: list[tuple[str, str]] = []
        links: list[tuple[str, str]] = []
        folders = [("/dev", 0o755, (0, 0)), ("/proc", 0o755, (0, 0))]
        if spec.rootfs is not None:
            root = str(extracted(spec.rootfs))
            layers.append((root, ""))
        else:
            root = ""
            folders += [(path, mode, (0, 0)) for path, mode in EMPTY_FOLDERS]
            for name in HOST_FOLDERS:
                if os.path.islink(f"/{name}"):
                    links.append((name, os.readlink(f"/{name}")))
                elif os.path.isdir(f"/{name}"):
                    layers.append((f"/{name}", name))
        try:
            user = find_user(spec.user, root)
        except LookupError as error:
            raise ConfigurationError(f"user={spec.user!r} cannot be had: {error}") from None
        folders.append((spec.workdir, 0o755, (user.uid, user.gid) if self._root else (0, 0)))
        cgroup = {
            "name": _cgroup_name(),
            "cpus": spec.cpus,
            "memory": memory,
            "pids": spec.pids,
        }
        cores = sorted(os.sched_getaffinity(0))[: math.ceil(spec.cpus)]
        return {
            "entered": False,
            "parent": os.getpid(),
            "bwrap": self._bwrap,
            "root": self._root,
            "cgroup": cgroup if self.has_cgroups else None,
            "rlimits": {} if self.has_cgroups else {"AS": memory, "NPROC": spec.pids},
            "cores": [] if self.has_cgroups else cores,
            "layers": layers,
            "links": links,
            "folders": folders,
            "visible": self._visible,
            "disk": (spec.disk_mb or spec.memory_mb) * 2**20,
            "shm": min(64 * 2**20, memory),
            "network": spec.network,
            "capabilities": list(spec.capabilities),
        }


class LocalSandbox(Sandbox):
    """A running sandbox."""

    def __init__(self, spec: SandboxSpec, config: dict[str, Any]) -> None:
        super().__init__(spec)
        self._group = config["cgroup"] and config["cgroup"]["name"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            config["control"] = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", CODE, str(Path(__file__).parent), json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={},
                cwd="/",
            )
        self.pid = self._process.pid
        """The process that owns it."""
        try:
            self._control.settimeout(START_SECONDS)
            answer = json.loads(self._control.recv(2**16) or b'{"error": "it ended without a word"}')
            if "error" in answer:
                raise SandboxFailure(f"a sandbox cannot be started: {answer['error']}{self._hint(config)}")
            self._control.settimeout(None)
        except TimeoutError:
            self._stop()
            raise SandboxFailure(f"a sandbox did not start within {START_SECONDS:g} s") from None
        except BaseException:
            self._stop()
            raise

    def _hint(self, config: dict[str, Any]) -> str:
        if config["root"]:
            return self._last_words()
        return f"{self._last_words()} (without root this needs unprivileged user namespaces and Linux 6.6 or newer)"

    def _last_words(self) -> str:
        """The end of what its processes wrote to their stderr: nothing, unless they broke."""
        with contextlib.suppress(OSError, ValueError):
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 1000))
            if words := self._errors.read().decode(errors="replace").strip():
                return f"; its stderr ends with:\n{words}"
        return ""

    def _exec(self, command: Command) -> ExecResult:
        start = time.monotonic()
        request = {
            "argv": list(command.argv),
            "cwd": command.cwd,
            "user": command.user,
            "env": {**ENVIRONMENT, **command.env},
        }
        out, err = Output(command.max_output), Output(command.max_output)
        answer = self._run(request, command.stdin or b"", command.timeout, command.stop, out.write, err.write)
        late = answer is None
        return ExecResult(
            exit_code=137 if answer is None else answer["code"],
            stdout=out.text(),
            stderr=err.text(),
            truncated=out.truncated or err.truncated,
            timed_out=late,
            out_of_memory=answer is not None and answer["out_of_memory"],
            seconds=time.monotonic() - start,
        )

    def _put(self, tar: IO[bytes], folder: str) -> None:
        error = Output(4096)
        request = {"put": folder, "user": self.spec.user}
        answer = self._run(request, tar.read(), FILE_SECONDS, None, lambda data: None, error.write)
        if answer is None or answer["code"]:
            raise OSError(f"cannot write into {folder}: {error.text().strip() or 'it was killed'}")

    def _get(self, path: str, tar: IO[bytes], max_bytes: int) -> None:
        def write(data: bytes) -> None:
            if tar.tell() + len(data) > max_bytes + 2**20:
                raise ValueError(f"{path} has more than max_bytes={max_bytes} bytes")
            tar.write(data)

        error = Output(4096)
        answer = self._run({"get": path, "user": self.spec.user}, b"", FILE_SECONDS, None, write, error.write)
        if answer is not None and answer["code"] == files.MISSING:
            raise FileNotFoundError(f"there is no {path} in the sandbox")
        if answer is None or answer["code"]:
            raise OSError(f"cannot read {path}: {error.text().strip() or 'it was killed'}")

    def _run(
        self,
        request: dict[str, Any],
        stdin: bytes,
        timeout: float,
        stop: Interrupt | None,
        out: Callable[[bytes], None],
        err: Callable[[bytes], None],
    ) -> dict[str, Any] | None:
        request["mark"] = mark = f"AGENTRL_EXEC={secrets.token_hex(12)}"
        if "env" in request:
            name, _, value = mark.partition("=")
            request["env"][name] = value
        try:
            return run(self._control, request, stdin, timeout, stop, out, err)
        except OSError as error:
            raise SandboxFailure(f"the sandbox {self.pid} is gone: {self._why()}") from error

    def _why(self) -> str:
        if self._stopped:
            return "it was stopped"
        return f"all its processes were ended, by a command inside, for memory, or from outside{self._last_words()}"

    def _stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # what is below it dies with it
            self._process.wait()
        if self._process.returncode and self._group:  # it did not come to that itself
            cgroups.remove(self._group)
        self._errors.close()


def _can_make_cgroups() -> bool:
    cgroups.remove_orphans()
    try:
        cgroups.Cgroup(_cgroup_name(), 1.0, 2**26, 16).remove()
    except OSError as error:
        logger.warning(
            "no control groups can be made here (%s): limits of sandboxes hold for each process alone", error
        )
        return False
    return True


def _cgroup_name() -> str:
    return f"{cgroups.PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
