"""An environment of the package `harbor`, as somebody outside of it writes one: over the local sandbox.

It is found by its import path, in an interpreter that has `harbor`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from agentrl.envs.harbor.dockerfile import read_plain
from agentrl.envs.sandbox import LocalBackend, Sandbox, SandboxSpec

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")


class LocalEnvironment(BaseEnvironment):
    """Bubblewrap, with this machine's programs for every image."""

    started = 0
    stopped = 0
    _sandbox: Sandbox

    @staticmethod
    def type() -> str:
        return "local"

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        plain = read_plain(Path(self.environment_dir) / "Dockerfile")
        if plain is None:
            raise SandboxBuildFailedError("the Dockerfile does more than this environment can")
        config = self.task_env_config
        spec = SandboxSpec(
            cpus=config.cpus or 1,
            memory_mb=config.memory_mb or 1024,
            workdir=plain.workdir or "/",
            env={**plain.env, **self._startup_env()},
            capabilities=CAPABILITIES,
        )
        self._sandbox = await LocalBackend().start(spec)
        type(self).started += 1

    async def stop(self, delete: bool) -> None:
        await self._sandbox.stop()
        type(self).stopped += 1

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        as_user = None if user is None else str(user)
        result = await self._sandbox.exec(command, timeout=timeout_sec or 600, user=as_user, cwd=cwd, env=env)
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._sandbox.put(Path(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._sandbox.put(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        content = await self._sandbox.get(source_path)
        with open(target_path, "wb") as file:  # noqa: ASYNC230 (small files)
            file.write(content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._sandbox.get_folder(source_dir, Path(target_dir))


class Publisher(LocalEnvironment):
    """One that cannot do without a network."""

    @property
    def capabilities(self) -> Any:
        return EnvironmentCapabilities()
