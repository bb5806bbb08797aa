"""A control group for a sandbox: memory, processes and processor time of all it runs together.

Version 1 has a folder for each controller, version 2 one for all. Version 2 gives controllers only to children of a
group without processes, which the root group of a host is exempt from; elsewhere making the group fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

logger = logging.getLogger(__name__)

PERIOD = 100_000
"""Microseconds over which processor time is counted."""

PREFIX = "agentrl-"

ROOT = "/sys/fs/cgroup"

CONTROLLERS = ("memory", "pids", "cpu")

ATTEMPTS = 200
"""How often a group is tried to be removed, 10 ms apart: what was killed in it takes a moment to be gone."""

Limits = dict[str, dict[str, str]]


class Cgroup:
    """A control group.

    Args:
        name: Name of its folders.
        cpus: Cores.
        memory: Bytes.
        pids: Processes and threads.

    Raises:
        OSError: It cannot be made here.
    """

    def __init__(self, name: str, cpus: float, memory: int, pids: int) -> None:
        self.folders: list[str] = []
        self._procs: list[int] = []
        self._events = -1
        try:
            if os.path.exists(f"{ROOT}/cgroup.controllers"):
                self._make_v2(name, cpus, memory, pids)
            else:
                self._make_v1(name, cpus, memory, pids)
            # Opened now, as a user who may: whoever holds the descriptor can write later.
            self._procs = [os.open(f"{folder}/cgroup.procs", os.O_WRONLY) for folder in self.folders]
        except OSError:
            self.remove()
            raise

    def _make_v1(self, name: str, cpus: float, memory: int, pids: int) -> None:
        limits: Limits = {
            "memory": {"memory.limit_in_bytes": str(memory), "memory.memsw.limit_in_bytes": str(memory)},
            "pids": {"pids.max": str(pids)},
            "cpu": {"cpu.cfs_period_us": str(PERIOD), "cpu.cfs_quota_us": str(max(1000, int(cpus * PERIOD)))},
        }
        for controller, values in limits.items():
            folder = f"{_own_folder(controller)}/{name}"
            self._make(folder, {key: value for key, value in values.items() if "memsw" not in key})
            with contextlib.suppress(FileNotFoundError):  # the kernel does not count swap
                _write(folder, {key: value for key, value in values.items() if "memsw" in key})
            if controller == "memory":
                self._events = os.open(f"{folder}/memory.oom_control", os.O_RDONLY)

    def _make_v2(self, name: str, cpus: float, memory: int, pids: int) -> None:
        parent = ROOT
        _write(parent, {"cgroup.subtree_control": "+cpu +memory +pids"})
        quota = f"{max(1000, int(cpus * PERIOD))} {PERIOD}"
        self._make(f"{parent}/{name}", {"memory.max": str(memory), "pids.max": str(pids), "cpu.max": quota})
        with contextlib.suppress(FileNotFoundError):
            _write(f"{parent}/{name}", {"memory.swap.max": "0"})
        self._events = os.open(f"{parent}/{name}/memory.events", os.O_RDONLY)

    def _make(self, folder: str, values: dict[str, str]) -> None:
        os.mkdir(folder)
        self.folders.append(folder)
        _write(folder, values)

    def join(self) -> None:
        """Put this process, and what it will start, into the group."""
        for procs in self._procs:
            os.write(procs, b"0")

    def kills(self) -> int:
        """How often the kernel killed here because memory was full."""
        for line in os.pread(self._events, 4096, 0).decode().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Kill what is left in it, and remove it."""
        for folder in self.folders:
            _remove(folder)


def remove(name: str) -> None:
    """Kill what is left in the group of a name, and remove it; for whoever did not make it."""
    for folder in _folders():
        _remove(f"{folder}/{name}")


def remove_orphans() -> None:
    """Remove groups whose owner is gone; they are empty, since sandboxes end with their owner."""
    for folder in _folders():
        for name in os.listdir(folder):
            if name.startswith(PREFIX) and not os.path.exists(f"/proc/{name.split('-')[1]}"):
                _remove(f"{folder}/{name}")


def _folders() -> list[str]:
    """The folders in which groups are made."""
    if os.path.exists(f"{ROOT}/cgroup.controllers"):
        return [ROOT]
    found = []
    for controller in CONTROLLERS:
        with contextlib.suppress(OSError):
            found.append(_own_folder(controller))
    return found


def _remove(folder: str) -> None:
    """Kill what is in a group, and remove it; a warning says what is left behind, and why."""
    reason: str | None = None
    for _ in range(ATTEMPTS):
        with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs") as procs:
            for pid in procs.read().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.rmdir(folder)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            reason = error.strerror
            time.sleep(0.01)
    logger.warning("the control group %s is left behind, for it cannot be removed: %s", folder, reason)


def _own_folder(controller: str) -> str:
    """The folder of this process's own group, whose limits hold for its children too."""
    with open("/proc/self/cgroup") as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                folder = f"{ROOT}/{controllers}"
                # Inside a container the path may be that of the host; the mounted folder is then the own one.
                return folder + path.rstrip("/") if os.path.isdir(folder + path) else folder
    raise FileNotFoundError(f"there is no cgroup controller {controller!r} here")


def _write(folder: str, values: dict[str, str]) -> None:
    for name, value in values.items():
        with open(f"{folder}/{name}", "w") as file:
            file.write(value)
