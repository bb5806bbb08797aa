"""The processes that own a sandbox, from its start to its end, whatever becomes of the process that asked for it.

There are two. The outer one keeps its rights, makes the control group, starts the inner one, waits for its end and
removes the group. The inner one lives in the sandbox's namespaces for mounts and users, starts bubblewrap and serves
requests. A request arrives on the control socket with the descriptors that it concerns: the three standard streams, the
other ends of the two outputs, and a socket of its own. On that is answered how the command ended; when its other side
is closed, nobody wants the command any more. When the asking process ends or closes the control socket, everything
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import cgroups, files, jail, linux

DESCRIPTORS = 7
"""With each request: three standard streams, two other ends, the answers' socket, and the request itself."""


def main() -> None:
    """Be one of the two processes; the last argument tells which, and all there is to know."""
    config = json.loads(sys.argv[-1])
    control = socket.socket(fileno=config["control"])
    try:
        if config["entered"]:
            Server(config, control, None).serve()
        else:
            _keep(config, control)
    except Exception as error:
        _tell(control, error)
        raise


def _keep(config: dict[str, Any], control: socket.socket) -> None:
    """Be the outer process."""
    config["watch"] = os.pidfd_open(config["parent"])
    if os.getppid() != config["parent"]:
        return  # it is gone already
    group = cgroups.Cgroup(**config["cgroup"]) if config["cgroup"] else None
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            _be_inner(config, control, group, theirs)
        except Exception as error:  # noqa: BLE001 (its last words)
            _tell(control, error)
        finally:
            os._exit(1)
    control.close()
    theirs.close()
    with contextlib.suppress(OSError):  # it has failed, and says so itself
        jail.map_users(child, config["root"], ours)
    os.waitpid(child, 0)
    if group is not None:
        group.remove()


def _be_inner(
    config: dict[str, Any], control: socket.socket, group: cgroups.Cgroup | None, mapper: socket.socket
) -> None:
    jail.enter(config, mapper)
    if config["root"]:
        Server(config, control, group).serve()
    else:
        for descriptor in (config["control"], config["watch"]):
            os.set_inheritable(descriptor, True)
        # From a mount that is read-only now, see `jail.enter`.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-1], json.dumps(config | {"entered": True})])


def _tell(control: socket.socket, error: Exception) -> None:
    with contextlib.suppress(OSError):
        control.send(json.dumps({"error": str(error) or repr(error)}).encode())


@dataclass
class Running:
    """A command, its mark, and what concerns it."""

    pid: int
    pidfd: int
    answers: socket.socket
    outputs: list[int]
    mark: bytes
    kills: int
    ended: bool = False
    unwanted: bool = False


class Server:
    """Serves requests in the inner process."""

    def __init__(self, config: dict[str, Any], control: socket.socket, group: cgroups.Cgroup | None) -> None:
        self._control = control
        self._group = group
        self._jail = jail.Jail(config, self._join)
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(control.fileno(), self._request)
        self._watch(config["watch"], self._end)
        self._watch(self._jail.alive, self._end)

    def serve(self) -> None:
        """Until the end."""
        self._control.send(b'{"ready": true}')
        while True:
            for descriptor, _ in self._poll.poll():
                # An earlier handler may have removed a later one.
                if (handler := self._handlers.get(descriptor)) is not None:
                    handler()

    def _join(self) -> None:
        if self._group is not None:
            self._group.join()

    def _kills(self) -> int:
        return 0 if self._group is None else self._group.kills()

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _end(self) -> None:
        """End everything inside, and this process."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._jail.pidfd, signal.SIGKILL)
        self._jail.process.kill()
        self._jail.process.wait()
        os._exit(0)

    def _request(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._control, 64, DESCRIPTORS)
        if not message:
            return self._end()
        streams, outputs, (answer, words) = descriptors[:3], descriptors[3:5], descriptors[5:]
        with open(words, "rb") as file:
            file.seek(0)
            request = json.loads(file.read())
        kills = self._kills()
        pid = os.fork()
        if pid == 0:
            self._be_command(request, streams)
        for descriptor in streams:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        running = Running(pid, pidfd, socket.socket(fileno=answer), outputs, request["mark"].encode(), kills)
        self._watch(pidfd, lambda: self._ended(running))
        self._watch(answer, lambda: self._unwanted(running))
        return None

    def _be_command(self, request: dict[str, Any], streams: list[int]) -> None:
        """In a child: become the command."""
        try:
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            self._join()
            user = self._jail.go_in(request)
            os.closerange(3, 2**20)
            if "argv" in request:
                os.chdir(request["cwd"])
                os.execvpe(request["argv"][0], request["argv"], {"HOME": user.home, **request["env"]})
            linux.drop_capabilities()
            os._exit(files.put(request["put"]) if "put" in request else files.get(request["get"]))
        except BaseException as error:  # noqa: BLE001 (this process must end here)
            with contextlib.suppress(BaseException):
                os.write(2, f"{error}\n".encode(errors="replace"))
        finally:
            os._exit(126)

    def _ended(self, running: Running) -> None:
        self._forget(running.pidfd)
        _, status = os.waitpid(running.pid, 0)
        os.close(running.pidfd)
        running.ended = True
        code = os.waitstatus_to_exitcode(status)
        answer = {"code": 128 - code if code < 0 else code, "out_of_memory": self._kills() > running.kills}
        with contextlib.suppress(OSError):
            running.answers.send(json.dumps(answer).encode())
        if running.unwanted:
            self._release(running)

    def _unwanted(self, running: Running) -> None:
        """Whoever asked has the answer, or does not want it."""
        self._forget(running.answers.fileno())
        running.unwanted = True
        if running.ended:
            self._release(running)
        else:
            self._kill(running)

    def _release(self, running: Running) -> None:
        running.answers.close()
        for output in running.outputs:
            # What goes on in the background may go on writing: a closed pipe would kill it, a full one stop it.
            os.set_blocking(output, False)
            self._watch(output, lambda output=output: self._discard(output))  # type: ignore[misc]

    def _discard(self, output: int) -> None:
        try:
            if os.read(output, 2**16):
                return
        except BlockingIOError:
            return
        self._forget(output)
        os.close(output)

    def _kill(self, running: Running) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)
        self._jail.kill_marked(running.mark)
