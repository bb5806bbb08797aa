"""The namespaces and the root filesystem of a sandbox, and how a process gets into them.

The parts, in the order in which they are made:

- a mount namespace, whose mounts nobody else sees and which vanish with the last process in it;
- in it a tmpfs of limited size: the writable layer. Every visible folder is an overlay of it over what is there;
- a user namespace. For root, users 0 to 65535 inside are users outside that own nothing; for anybody else, root inside
  is the user outside. Further user namespaces are forbidden in it;
- bubblewrap with namespaces for processes, network, IPC and host name, a root without the rest of the host, and a
  reaper as process 1.

Commands are forked from here, enter these namespaces, lose every privilege, and only then touch anything inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
from typing import Any

from . import linux

FIRST_UID = 0x70000000
"""The user outside who is root inside, where root starts sandboxes; no account and no subuid range is there."""

UIDS = 65536

WRITABLE = "/sys"
"""Where the writable layer is mounted, in a namespace of its own in which nothing needs what is there."""

ROOT = f"{WRITABLE}/root"

MAIN = "echo; read -r line"
"""Process 2: says that the sandbox is ready, and waits."""

Config = dict[str, Any]


def enter(config: Config, mapper: socket.socket) -> None:
    """Make the mount and user namespaces and the root filesystem."""
    _write("/proc/self/oom_score_adj", "1000")  # rather a sandbox than whatever else runs on the machine
    if config["root"]:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        # As real root: the layers below may lie where only root can go.
        _make_root(config, "")
        linux.unshare(linux.CLONE_NEWUSER)
    else:
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
    mapper.send(b"x")
    mapper.recv(1)
    if config["root"]:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    linux.die_with_parent()  # forgotten when the user changes
    _write("/proc/sys/user/max_user_namespaces", "0")
    if not config["root"]:
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        # This interpreter can be seen inside as the program of a process that is just entering, and there its file
        # belongs to root: nobody may write to it through that. It must be started from a read-only mount for that.
        linux.make_all_mounts_read_only()
        _make_root(config, "userxattr,")


def map_users(child: int, root: bool, mapper: socket.socket) -> None:
    """Write the user map of a child that waits in `enter`."""
    mapper.recv(1)
    uid, gid, count = (FIRST_UID, FIRST_UID, UIDS) if root else (os.geteuid(), os.getegid(), 1)
    if not root:
        _write(f"/proc/{child}/setgroups", "deny")
    _write(f"/proc/{child}/uid_map", f"0 {uid} {count}")
    _write(f"/proc/{child}/gid_map", f"0 {gid} {count}")
    mapper.send(b"x")


def _make_root(config: Config, options: str) -> None:
    uid = FIRST_UID if config["root"] else 0
    size = f"size={config['disk']},mode=0755"
    linux.mount("tmpfs", WRITABLE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, size)
    os.mkdir(ROOT)
    os.chown(ROOT, uid, uid)
    for number, (lower, place) in enumerate(config["layers"]):
        upper, work, target = f"{WRITABLE}/upper{number}", f"{WRITABLE}/work{number}", f"{ROOT}/{place}".rstrip("/")
        for folder in (upper, work, target):
            os.makedirs(folder, exist_ok=True)
        os.chown(upper, uid, uid)
        layers = f"lowerdir={_escaped(lower)},upperdir={upper},workdir={work}"
        linux.mount("overlay", target, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options + layers)
    for link, target in config["links"]:
        os.symlink(target, f"{ROOT}/{link}")
    for path, mode in config["folders"]:
        place = ROOT
        for name in path.strip("/").split("/"):
            place = f"{place}/{name}"
            if not os.path.lexists(place):
                os.mkdir(place)
                os.chmod(place, mode)
                os.chown(place, uid, uid)


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


class Jail:
    """Bubblewrap's namespaces.

    Raises:
        OSError: Bubblewrap failed; its words are in the message.
    """

    def __init__(self, config: Config, join: Any) -> None:
        self._config = config
        info, theirs = os.pipe()
        arguments = [config["bwrap"], "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        arguments += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        arguments += ["--hostname", "sandbox"] + ([] if config["network"] else ["--unshare-net"])
        arguments += ["--bind", ROOT, "/", "--proc", "/proc", "--dev", "/dev"]
        arguments += ["--size", str(config["shm"]), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        for path in config["visible"]:
            arguments += ["--ro-bind", path, path]
        arguments += ["--info-fd", str(theirs), "--", "sh", "-c", MAIN]
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs],
            preexec_fn=join,
            cwd="/",
        )
        os.close(theirs)
        with open(info) as file:
            told = file.read()
        assert self.process.stdout is not None
        if self.process.stdout.read(1) != b"\n":
            self.process.kill()
            words = self.process.communicate()[1].decode(errors="replace").strip()
            raise OSError(f"bubblewrap could not start: {words or 'it ended without a word'}")
        self.init = int(json.loads(told)["child-pid"])
        self.pidfd = os.pidfd_open(self.init)
        self.alive = os.pidfd_open(self.process.pid)
        self.proc = os.open(f"/proc/{self.init}/root/proc", os.O_RDONLY | os.O_DIRECTORY)
        """The process table inside."""
        linux.setns(self.pidfd, linux.CLONE_NEWPID)  # for children from now on

    def go_in(self, request: dict[str, Any]) -> None:
        """Move this process, a fresh child, inside, and lose every privilege."""
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
        linux.setns(self.pidfd, flags | (0 if self._config["network"] else linux.CLONE_NEWNET))
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name, value in self._config["rlimits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        if self._config["cores"]:
            os.sched_setaffinity(0, self._config["cores"])
        uid, gid = find_user(request["user"])
        linux.gain_nothing()
        linux.bound_capabilities({linux.CAPABILITIES.index(name) for name in self._config["capabilities"]})
        if self._config["root"]:
            os.setgroups([gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)

    def kill_marked(self, mark: bytes) -> bool:
        """Kill every process inside with a mark in its environment; whether there was one."""
        found = False
        for name in os.listdir(self.proc):
            if not name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                place = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
                try:
                    environ = os.open("environ", os.O_RDONLY, dir_fd=place)
                    try:
                        marked = mark in os.read(environ, 2**18)
                    finally:
                        os.close(environ)
                    if marked:
                        found = True
                        signal.pidfd_send_signal(place, signal.SIGKILL)
                finally:
                    os.close(place)
        return found


def find_user(user: str | None) -> tuple[int, int]:
    """Numbers of a user and its group, as the files inside say.

    Raises:
        LookupError: There is no such user.
    """
    name, _, group = (user or "root").partition(":")
    if name == "root":
        uid, gid = 0, 0
    elif name.isdecimal():
        uid = gid = int(name)
    else:
        uid, gid = _look_up("/etc/passwd", name, 2, 3)
    if group:
        gid = int(group) if group.isdecimal() else _look_up("/etc/group", group, 2, 2)[0]
    return uid, gid


def _look_up(path: str, name: str, *columns: int) -> tuple[int, int]:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file.read(2**20).splitlines():
            fields = line.split(":")
            if fields[0] == name:
                return int(fields[columns[0]]), int(fields[columns[1]])
    raise LookupError(f"{path} knows no {name!r}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
