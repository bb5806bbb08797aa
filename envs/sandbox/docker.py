"""Sandboxes in Docker containers, through the docker SDK.

A container has an init process (or orphans would fill `pids`), no capabilities, no new privileges, no network and hard
limits. Its main process reads its standard input, which this process holds open: when this process ends, however it
does, the engine closes it, the main process ends and the engine removes the container. Should the engine not see that
(a forked child kept the connection), the next `DockerBackend` removes containers whose owner is gone.

Where the engine's storage has no quotas, `disk_mb` is looked after from here, every second.

The engine has no deadline for a command. A late one is killed from inside, by a mark in the environment that its
children inherit; if that does not end it, the container is killed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from agentrl.envs.sandbox.archive import folders
from agentrl.envs.sandbox.base import Command, ExecResult, Sandbox, SandboxFailure, SandboxSpec, start_in_thread
from agentrl.envs.sandbox.docker_engine import LABEL, connect, engine_errors, owner, remove_orphans
from agentrl.envs.sandbox.docker_exec import Ran, run, run_plain
from agentrl.envs.sandbox.docker_images import build_image, check_images
from agentrl.errors import ConfigurationError

logger = logging.getLogger(__name__)

ROOT = "0:0"

MAIN = ["sh", "-c", "read -r line"]
"""The main process: waits for the end of its standard input."""

KILL = """
for signal in STOP STOP KILL; do
  for place in $(grep -lsa "$0" /proc/[0-9]*/environ); do
    pid=${place#/proc/}
    kill -$signal "${pid%/environ}"
  done
done
"""
"""Kills every process whose environment has a mark. A stopped one cannot start another meanwhile."""

DISK_SECONDS = 1.0
"""How often the written bytes are counted where the engine has no quotas; less often where counting takes long."""

STOP_SECONDS = 3.0
"""How long a killed command may take to end."""


class DockerBackend:
    """Starts containers.

    Args:
        base_url: The engine, "unix:///var/run/docker.sock" say; None for what `DOCKER_HOST` and its kin say.
        network_mode: The network of sandboxes that have one.
        pull: Whether images that the engine lacks may be pulled from their registry.
        timeout: Seconds that one request to the engine may take.

    Raises:
        ConfigurationError: The SDK or the engine is missing.
    """

    name = "docker"

    def __init__(
        self, base_url: str | None = None, *, network_mode: str = "bridge", pull: bool = False, timeout: float = 60.0
    ) -> None:
        self._network_mode = network_mode
        self._pull = pull
        self.client = connect(base_url, timeout)
        with engine_errors("asking the engine what it can do"):
            info = self.client.info()
        storage = dict(info.get("DriverStatus") or [])
        self._quota = info["Driver"] in ("btrfs", "zfs") or storage.get("Backing Filesystem") == "xfs"
        remove_orphans(self.client)

    def check(self, spec: SandboxSpec) -> None:
        """Refuse a spec without an image, or with one that the engine lacks and may not pull.

        Raises:
            ConfigurationError: Says what is missing.
        """
        if spec.image is None and spec.dockerfile is None:
            raise ConfigurationError("the docker backend needs image= or dockerfile= in the SandboxSpec")
        with engine_errors("looking for images"):
            check_images(self.client, spec, pull=self._pull)

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """Start a container.

        Raises:
            ConfigurationError: The spec cannot work here, the image is not on the engine, or building it fails.
            SandboxFailure: The engine cannot start it.
        """
        sandbox = await start_in_thread(self.start_blocking, spec)
        assert isinstance(sandbox, DockerSandbox)
        return sandbox

    def start_blocking(self, spec: SandboxSpec) -> DockerSandbox:
        """`start`, for a thread."""
        self.check(spec)
        with engine_errors("starting a container"):
            image = spec.image or build_image(self.client, Path(str(spec.dockerfile)), spec.build_timeout)
            user = spec.user or self.client.images.get(image).attrs["Config"].get("User") or ROOT
            container = self._create(image, spec)
            return DockerSandbox(self.client, spec, container, user, watch_disk=not self._quota)

    def _create(self, image: str, spec: SandboxSpec) -> str:
        api = self.client.api
        limits = api.create_host_config(
            auto_remove=True,
            init=True,
            mem_limit=f"{spec.memory_mb}m",
            memswap_limit=f"{spec.memory_mb}m",  # memory and swap together: no swap
            nano_cpus=int(spec.cpus * 1e9),
            pids_limit=spec.pids,
            cap_drop=["ALL"],
            cap_add=list(spec.capabilities),
            security_opt=["no-new-privileges"],
            network_mode=self._network_mode if spec.network else "none",
            storage_opt={"size": f"{spec.disk_mb}m"} if spec.disk_mb is not None and self._quota else None,
        )
        config = api.create_container_config(
            image=image,
            command=None,
            entrypoint=MAIN,
            stdin_open=True,
            user=ROOT,  # commands of other users cannot end it, nor what it starts
            host_config=limits,
            labels={LABEL: owner()},
            healthcheck={"test": ["NONE"]},
        )
        # The engine closes the standard input when whoever holds it is gone.
        return str(api.create_container_from_config(config | {"StdinOnce": True, "AttachStdin": True})["Id"])


class DockerSandbox(Sandbox):
    """A running container."""

    def __init__(self, client: Any, spec: SandboxSpec, container: str, user: str, *, watch_disk: bool) -> None:
        super().__init__(spec)
        self._user = _numbered(user)
        self._api = client.api
        self._cause: str | None = None
        self._started = time.time()
        self.container = container
        """Its id."""
        try:
            with self._errors("starting a container"):
                self._lifeline = self._api.attach_socket(container, params={"stdin": 1, "stream": 1})
                self._api.start(container)
                self._user_ids = self._find_user()
                self._make_workdir()
        except BaseException:
            self._remove()
            raise
        if spec.disk_mb is not None and watch_disk:
            threading.Thread(target=self._watch_disk, args=(spec.disk_mb * 2**20,), daemon=True).start()

    def _exec(self, command: Command) -> ExecResult:
        start, since = time.monotonic(), time.time()
        mark = f"AGENTRL_EXEC={secrets.token_hex(12)}"
        command = replace(command, user=_numbered(command.user or self._user))
        with self._errors("running a command"):
            ran = run(self._api, self.container, command, mark)
            if ran.running:
                self._kill(command, mark, ran.exec_id)
            elif ran.exit_code == 137:
                self._check_alive()  # it may have ended with the whole container
        failed = not ran.running and ran.exit_code != 0
        return ExecResult(
            exit_code=137 if ran.running else ran.exit_code,
            stdout=ran.stdout.text(),
            stderr=ran.stderr.text(),
            truncated=ran.stdout.truncated or ran.stderr.truncated,
            timed_out=ran.running,
            out_of_memory=failed and self._ran_out_of_memory(since, sure=ran.exit_code == 137),
            seconds=time.monotonic() - start,
        )

    def _kill(self, command: Command, mark: str, exec_id: str) -> None:
        """Kill a command and all that inherited its mark; the container if that does not help."""
        import docker.errors

        # As the command's own user and without any privilege: what is called here may be the command's own `sh`.
        killer = self._api.exec_create(self.container, ["sh", "-c", KILL, mark], user=command.user)["Id"]
        with contextlib.suppress(docker.errors.APIError):  # no process more may be started
            self._api.exec_start(killer, detach=True)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if not self._api.exec_inspect(exec_id)["Running"]:
                return
            time.sleep(0.02)
        self._cause = "a command could not be killed at its deadline, so the whole container was"
        self._remove()

    def _ran_out_of_memory(self, since: float, *, sure: bool) -> bool:
        """Whether the kernel killed for memory; its word may take a moment, which is worth waiting when likely."""
        for _ in range(10 if sure else 1):
            if self._events(since, "oom"):
                return True
            time.sleep(0.05 if sure else 0)
        return False

    def _events(self, since: float, kind: str) -> list[dict[str, Any]]:
        filters = {"container": self.container, "event": kind}
        return list(self._api.events(f"{since:.6f}", f"{time.time():.6f}", filters, decode=True))

    def _watch_disk(self, most: int) -> None:
        """Look now and then how much was written; a container that wrote too much is killed."""
        pause = DISK_SECONDS
        while not self._stopped and self._cause is None:
            time.sleep(pause)
            start = time.monotonic()
            try:
                listed = self._api.containers(all=True, size=True, filters={"id": self.container})
            except Exception:  # noqa: BLE001 (it is gone, or the engine is: whoever uses it next is told)
                return
            if listed and listed[0].get("SizeRw", 0) > most:
                self._cause = f"it wrote more than disk_mb={self.spec.disk_mb}"
                self._remove()
            pause = max(DISK_SECONDS, 20 * (time.monotonic() - start))

    def _owner(self) -> tuple[int, int]:
        return self._user_ids

    def _find_user(self) -> tuple[int, int]:
        """Numbers of the user that commands run as."""
        if self._user == ROOT:
            return 0, 0
        said = self._run_plain("id", "-u"), self._run_plain("id", "-g")
        try:
            return int(said[0].stdout.text()), int(said[1].stdout.text())
        except ValueError:
            raise ConfigurationError(f"user={self._user!r} cannot be had: {said[0].stderr.text().strip()}") from None

    def _run_plain(self, *argv: str) -> Ran:
        return run_plain(self._api, self.container, argv, self._user)

    def _make_workdir(self) -> None:
        folder, _, rest = "/", "", self.spec.workdir.strip("/")
        missing: list[str] = []
        for name in rest.split("/") if rest else []:
            folder = f"{folder.rstrip('/')}/{name}"
            if missing or not self._exists(folder):
                missing.append(folder)
        if missing:
            self._api.put_archive(self.container, "/", folders([name.lstrip("/") for name in missing], self._user_ids))

    def _exists(self, path: str) -> bool:
        import docker.errors

        try:
            stream, _ = self._api.get_archive(self.container, path)
            stream.close()
        except docker.errors.NotFound:
            return False
        return True

    def _put(self, tar: IO[bytes], folder: str) -> None:
        import docker.errors

        with self._errors(f"writing into {folder}"):
            try:
                self._api.put_archive(self.container, folder, tar)
            except docker.errors.NotFound:
                made = self._run_plain("mkdir", "-p", "--", folder)
                if made.exit_code:
                    raise OSError(f"cannot make the folder {folder}: {made.stderr.text().strip()}") from None
                tar.seek(0)
                self._api.put_archive(self.container, folder, tar)

    def _get(self, path: str, tar: IO[bytes], max_bytes: int) -> None:
        import docker.errors

        with self._errors(f"reading {path}"):
            try:
                stream, _ = self._api.get_archive(self.container, path)
            except docker.errors.NotFound:
                self._check_alive()
                raise FileNotFoundError(f"there is no {path} in the sandbox") from None
            for part in stream:
                if tar.tell() > max_bytes + 2**20:
                    stream.close()
                    raise ValueError(f"{path} has more than max_bytes={max_bytes} bytes")
                tar.write(part)

    def _snapshot(self) -> SandboxSpec:
        with self._errors("taking a snapshot"):
            image = self._api.commit(self.container, changes=f"LABEL {LABEL}={owner()}")["Id"]
        return replace(self.spec, image=image, dockerfile=None)

    def _stop(self) -> None:
        self._cause = self._cause or "it was stopped"
        self._remove()

    def _remove(self) -> None:
        import docker.errors

        with engine_errors("removing a container"), contextlib.suppress(docker.errors.NotFound):
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline:  # the engine may be removing it already, because it ended
                with contextlib.suppress(docker.errors.APIError):
                    self._api.remove_container(self.container, force=True, v=True)
                self._api.inspect_container(self.container)
                time.sleep(0.01)
        with contextlib.suppress(AttributeError, OSError):
            self._lifeline.close()

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Tell apart why the engine refuses: the container is gone, or something else."""
        import docker.errors

        with engine_errors(doing):
            try:
                yield
            except docker.errors.APIError as error:
                if error.status_code in (404, 409):
                    self._check_alive()
                raise

    def _check_alive(self) -> None:
        """Raise `SandboxFailure` with the cause if the container does not run any more."""
        import docker.errors

        if self._cause is None:
            with contextlib.suppress(docker.errors.NotFound):
                if self._api.inspect_container(self.container)["State"]["Running"]:
                    return
        raise SandboxFailure(f"the container {self.container[:12]} is gone: {self._cause or self._why()}")

    def _why(self) -> str:
        for died in self._events(self._started, "die"):
            code = died["Actor"]["Attributes"].get("exitCode")
            if code == "137" and self._events(died["time"] - 1, "oom"):
                return f"it ran out of memory (memory_mb={self.spec.memory_mb})"
            return f"its main process ended with exit code {code}"
        return "the engine does not know it any more"


def _numbered(user: str) -> str:
    """Root by its number, which is also known when a command has broken /etc/passwd."""
    return ROOT if user in ("root", "0") else user
