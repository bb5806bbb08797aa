"""The sandboxes of tasks: what a task says about its environment, as a spec; a started one, with its folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.envs.harbor.dockerfile import Plain, read_plain
from agentrl.envs.harbor.errors import Fault, HarborFailure
from agentrl.envs.harbor.task import Place
from agentrl.envs.sandbox import Backend, ExecResult, Sandbox, SandboxSpec
from agentrl.envs.sandbox.base import MAX_OUTPUT
from agentrl.errors import ConfigurationError

ROOT = "root"

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What root has in a sandbox: with less, package managers fail, and files of users could be kept from the verifier."""

FOLDERS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/agent /logs/verifier /logs/artifacts"
COMMAND_SECONDS = 60.0
"""Deadline of what is run for a task besides what it brings itself."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where sandboxes come from.

    Attributes:
        backend: Starts them.
        builds: Whether it has images.
        image: Image of tasks that name none.
        rootfs: Root filesystem in place of every image, where there are none; None for this machine's programs.
        network: Whether they may have a network.
        pids: Processes and threads that each may have.
    """

    backend: Backend
    builds: bool
    image: str | None
    rootfs: Path | None
    network: bool
    pids: int

    def spec(self, place: Place) -> SandboxSpec:
        """What a task's sandbox is made of."""
        plain = self._plain(place)
        return SandboxSpec(
            image=(place.image or (None if place.dockerfile else self.image)) if self.builds else None,
            dockerfile=place.dockerfile if self.builds else None,
            rootfs=None if self.builds else self.rootfs,
            cpus=place.cpus,
            memory_mb=place.memory_mb,
            disk_mb=place.storage_mb,
            pids=self.pids,
            network=self.network and place.network != "no-network",
            workdir=place.workdir or plain.workdir or "/",
            env={**plain.env, **place.env},
            capabilities=CAPABILITIES,
            build_timeout=place.build_timeout,
        )

    async def start(self, place: Place) -> Home:
        """Start a sandbox.

        Raises:
            HarborFailure: Its image cannot be built.
            SandboxFailure: It cannot be started.
        """
        spec = self.spec(place)
        try:
            sandbox = await self.backend.start(spec)
        except ConfigurationError as error:  # checked when `Harbor` was made: what is left is the build
            raise HarborFailure(Fault.BUILD, str(error)) from error
        try:
            workdir = place.workdir or self._plain(place).workdir
            if workdir is None and self.builds:
                workdir = await sandbox.image_folder()
            home = Home(sandbox, workdir or "/")
            made = await home.root(FOLDERS)
            if not made.ok:
                raise HarborFailure(Fault.SETUP, f"/logs cannot be made: {made.stderr.strip()}")
            if place.files is not None:
                await home.fill(place.files)
        except BaseException:
            await sandbox.stop()
            raise
        return home

    def _plain(self, place: Place) -> Plain:
        if self.builds or place.dockerfile is None:
            return Plain(None, {})
        plain = read_plain(place.dockerfile / "Dockerfile")
        assert plain is not None, "the others are refused when `Harbor` is made"
        return plain


class Home:
    """A started sandbox, seen by a user from a folder; tools take it for a sandbox.

    Args:
        sandbox: The sandbox.
        workdir: Where commands start.
        user: Who runs them, None for the image's user.
    """

    def __init__(self, sandbox: Sandbox, workdir: str, user: str | None = None) -> None:
        self.sandbox = sandbox
        self.workdir = workdir
        self.user = user

    def of(self, user: str | None) -> Home:
        """The same sandbox, seen by a user."""
        return Home(self.sandbox, self.workdir, user)

    async def fill(self, folder: Path) -> None:
        """Put what is in a folder here where commands start.

        Raises:
            HarborFailure: It cannot be put there.
        """
        try:
            for name in sorted(os.listdir(folder)):
                await self.sandbox.put(folder / name, f"{self.workdir.rstrip('/')}/{name}")
        except OSError as error:
            raise HarborFailure(Fault.SETUP, f"{folder} cannot be put into the sandbox: {error}") from error

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
        """Run a command; see `Sandbox.exec`."""
        return await self.sandbox.exec(
            command,
            timeout=timeout,
            user=user or self.user,
            cwd=cwd or self.workdir,
            env=env,
            stdin=stdin,
            max_output=max_output,
        )

    async def root(self, command: str) -> ExecResult:
        """Run a short command as root."""
        return await self.sandbox.exec(command, timeout=COMMAND_SECONDS, user=ROOT, cwd="/")

    async def get(self, path: str, *, max_bytes: int = 2**20) -> bytes:
        """Read a file."""
        return await self.sandbox.get(path, max_bytes=max_bytes)
