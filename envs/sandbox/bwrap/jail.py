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
from typing import Any, NamedTuple

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
        linux.make_read_only("/")
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
    for path, mode, owner in config["folders"]:
        _make_folders(path, mode, uid + owner[0], uid + owner[1])
    for path in config["visible"]:
        if os.path.isdir(path):
            _make_folders(path, 0o755, uid, uid)
        else:
            _make_folders(os.path.dirname(path), 0o755, uid, uid)
            _write(ROOT + path, "")
        linux.mount(path, ROOT + path, "", linux.MS_BIND | linux.MS_REC)
        linux.make_read_only(ROOT + path)


def _make_folders(path: str, mode: int, uid: int, gid: int) -> None:
    """Make what is missing of a folder inside."""
    place = ROOT
    for name in path.strip("/").split("/"):
        place = f"{place}/{name}"
        if not os.path.lexists(place):
            os.mkdir(place)
            os.chmod(place, mode)
            os.chown(place, uid, gid)


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

    def go_in(self, request: dict[str, Any]) -> User:
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
        user = find_user(request["user"])
        linux.gain_nothing()
        linux.bound_capabilities({linux.CAPABILITIES.index(name) for name in self._config["capabilities"]})
        if self._config["root"]:
            os.setgroups([user.gid])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
        return user

    def kill_marked(self, mark: bytes) -> None:
        """Kill every process inside with a mark in its environment."""
        marked: set[str] = set()
        # Stopped first: none of them can start another one while the rest is looked for.
        while found := {name for name in os.listdir(self.proc) if self._has(name, mark)} - marked:
            marked |= found
            for name in found:
                self._signal(name, signal.SIGSTOP)
        for name in marked:
            self._signal(name, signal.SIGKILL)

    def _has(self, name: str, mark: bytes) -> bool:
        if not name.isdecimal():
            return False
        try:
            with open(os.open(f"{name}/environ", os.O_RDONLY, dir_fd=self.proc), "rb") as environ:
                return mark in environ.read(2**18)
        except OSError:
            return False

    def _signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            place = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)  # also a pidfd
            try:
                signal.pidfd_send_signal(place, number)
            finally:
                os.close(place)


class User(NamedTuple):
    """A user inside, by number, and its home."""

    uid: int
    gid: int
    home: str


def find_user(user: str | None, root: str = "") -> User:
    """The user that "name", "1000", "name:group" or "1000:1000" is, as the files under a root filesystem say.

    As in Docker, a number that no file knows has group 0.

    Raises:
        LookupError: There is no such user or group.
    """
    name, _, group = (user or "root").partition(":")
    known = name in ("root", "0")  # whatever a command made of /etc/passwd
    entry = None if known else _entry(f"{root}/etc/passwd", name)
    if known:
        found = User(0, 0, "/root")
    elif entry is not None:
        found = User(int(entry[2]), int(entry[3]), entry[5])
    elif name.isdecimal():
        found = User(int(name), 0, "/")
    else:
        raise LookupError(f"there is no user {name!r} in the sandbox's /etc/passwd")
    if not group:
        return found
    entry = _entry(f"{root}/etc/group", group)
    if entry is None and not group.isdecimal():
        raise LookupError(f"there is no group {group!r} in the sandbox's /etc/group")
    return found._replace(gid=int(group if entry is None else entry[2]))


def _entry(path: str, key: str) -> list[str] | None:
    """The line of a file of users or groups that has a name or number."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file.read(2**20).splitlines():
            fields = line.split(":")
            if key in (fields[0], *fields[2:3]) and len(fields) >= 4:
                return [*fields, "", ""]
    return None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
