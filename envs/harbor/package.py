"""What the package `harbor` (Python 3.12 or newer) adds: its datasets, and its environments as a backend of sandboxes.

    from agentrl.envs.harbor import Harbor, HarborBackend, download

    harbor = Harbor(download("terminal-bench@2.0"), backend=HarborBackend("daytona"))

Tasks are read, played and verified by agentrl all the same; `harbor` fetches them, and starts the machines. What is
known here of an environment is what its base class has: commands, files up and down, an end. So everything else is done
with commands inside: deadlines (`timeout`), input, archives (`tar`). The image needs these programs, and `base64`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import secrets
import select
import shlex
import shutil
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any

from agentrl.envs.sandbox.base import Command, ExecResult, Sandbox, SandboxFailure, SandboxSpec, start_in_thread
from agentrl.envs.sandbox.docker import KILL
from agentrl.envs.sandbox.output import Output
from agentrl.errors import ConfigurationError
from agentrl.rollout.loop import LoopThread, run_once

ROOT = "root"

PLAIN_SECONDS = 600.0
"""Deadline of what a sandbox does for itself: moving files, ending."""

GRACE_SECONDS = 60.0
"""How much longer than its deadline a command may take until it is the sandbox that does not answer."""

MAX_STDIN = 48 * 2**10
"""Bytes of input that a command can be given: they travel in the command."""

FOUND = 'test -e "$0" -o -L "$0" || exit 66; tar -cf - -C "$1" -- "$2" | head -c "$3" > "$4" && chmod 600 "$4"'
"""Pack a path, up to so many bytes; 66 says that it is not there."""

_loop = LoopThread()
"""Clients of providers belong to the event loop that made them, so all run on this one."""


def download(dataset: str, *, registry: str | Path | None = None, folder: Path | None = None) -> list[Path]:
    """Fetch a dataset through `harbor`; gives the folders of its tasks, as `Harbor` takes them.

    Args:
        dataset: "name@version" of a registry, or "organization/name@version" of Harbor's hub.
        registry: URL or file of a `registry.json`; None for Harbor's own.
        folder: Where tasks are kept; None for Harbor's cache.

    Raises:
        ConfigurationError: `harbor` is missing, or cannot fetch it; says why.
    """
    _need_harbor()
    from harbor.registry.client.factory import RegistryClientFactory
    from harbor.registry.client.package import PackageDatasetClient

    where: dict[str, Any] = {}
    if registry is not None:
        is_url = isinstance(registry, str) and "://" in registry
        where = {"registry_url": registry} if is_url else {"registry_path": Path(registry)}
    try:
        client = PackageDatasetClient() if "/" in dataset else RegistryClientFactory.create(**where)
        items = run_once(client.download_dataset(dataset, output_dir=folder))
    except Exception as error:
        raise ConfigurationError(f"harbor cannot fetch {dataset!r}: {type(error).__name__}: {error}") from error
    return [Path(item.downloaded_path) for item in items]


class HarborBackend:
    """Starts environments of `harbor` as sandboxes.

    Their images, sizes, networks and ends are the provider's. Two limits have no counterpart there: `pids`, and
    `capabilities` beyond those the provider gives. A trainer that is killed leaves its machines to the provider's own
    time limits.

    Args:
        environment: One that `harbor` has, "daytona", "e2b" or "modal" say, or a class of yours as "module:Class".
        options: What the environment's class takes.

    Raises:
        ConfigurationError: `harbor` is missing, or the environment, its packages or its credentials are.
    """

    def __init__(self, environment: str, **options: Any) -> None:
        _need_harbor()
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.environment_type import EnvironmentType

        self.name = environment
        self._options = options
        try:
            kind = None if ":" in environment else EnvironmentType(environment)
            self._class: Any = EnvironmentFactory.get_environment_class(kind, environment if kind is None else None)
            self._class.preflight(kwargs=options)
        except (Exception, SystemExit) as error:
            raise ConfigurationError(f"harbor's environment {environment!r} cannot be used: {error}") from error

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what this environment says it cannot do.

        Raises:
            ConfigurationError: Says what.
        """
        if spec.rootfs is not None or (spec.image is None and spec.dockerfile is None):
            raise ConfigurationError(f"{self.name} makes sandboxes of an image or a Dockerfile; name one")
        with tempfile.TemporaryDirectory(prefix="agentrl-harbor-") as folder:
            self._make(spec, Path(folder))

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; one whose start is cancelled is stopped."""
        return await start_in_thread(self.start_blocking, spec)

    def start_blocking(self, spec: SandboxSpec) -> Sandbox:
        """`start`, for a thread.

        Raises:
            ConfigurationError: The image cannot be built.
            SandboxFailure: The provider does not start it.
        """
        from harbor.environments.base import SandboxBuildFailedError

        folder = Path(tempfile.mkdtemp(prefix="agentrl-harbor-"))
        try:
            environment = self._make(spec, folder)
        except ConfigurationError:
            shutil.rmtree(folder)
            raise
        sandbox = HarborSandbox(spec, self.name, environment, folder)
        try:
            starting = asyncio.wait_for(environment.start(force_build=False), spec.build_timeout)
            try:
                _loop.run(starting)
            except SandboxBuildFailedError as error:
                raise ConfigurationError(f"{self.name} cannot build the image: {error}") from error
            except Exception as error:
                raise SandboxFailure(f"{self.name} did not start: {type(error).__name__}: {error}") from error
            sandbox.run_plain(f"mkdir -p {shlex.quote(spec.workdir)}")
        except BaseException:
            with contextlib.suppress(SandboxFailure):
                sandbox._stop()
            raise
        return sandbox

    def _make(self, spec: SandboxSpec, folder: Path) -> Any:
        from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
        from harbor.models.trial.paths import TrialPaths

        try:
            return self._class(
                environment_dir=spec.dockerfile or _empty(folder / "environment"),
                environment_name="agentrl",
                session_id=f"agentrl-{secrets.token_hex(8)}",
                trial_paths=TrialPaths(folder / "trial"),
                task_env_config=EnvironmentConfig(
                    docker_image=spec.image,
                    cpus=spec.cpus,
                    memory_mb=spec.memory_mb,
                    storage_mb=spec.disk_mb,
                    build_timeout_sec=spec.build_timeout,
                ),
                persistent_env=dict(spec.env),
                network_policy=NetworkPolicy(
                    network_mode=NetworkMode.PUBLIC if spec.network else NetworkMode.NO_NETWORK
                ),
                **self._options,
            )
        except Exception as error:
            raise ConfigurationError(f"harbor's environment {self.name!r} refuses this sandbox: {error}") from error


class HarborSandbox(Sandbox):
    """An environment of `harbor`, started.

    Args:
        spec: What it is made of.
        name: What the environment is called.
        environment: The environment.
        folder: Where it keeps files here; removed in the end.
    """

    def __init__(self, spec: SandboxSpec, name: str, environment: Any, folder: Path) -> None:
        super().__init__(spec)
        self._name = name
        self._environment = environment
        self._folder = folder

    async def image_folder(self) -> str:
        """Where the image's commands start."""
        result = await asyncio.to_thread(self._call, self._environment.exec("pwd"), "running a command")
        return (result.stdout or "/").strip()

    def run_plain(self, command: str) -> Any:
        """Run a command of the sandbox's own, as root; gives `harbor`'s result."""
        running = self._environment.exec(command, cwd="/", user=ROOT, timeout_sec=int(PLAIN_SECONDS))
        return self._call(running, "running a command")

    def _exec(self, command: Command) -> ExecResult:
        start = time.monotonic()
        mark = f"AGENTRL_EXEC={secrets.token_hex(12)}"
        running = _loop.start(
            asyncio.wait_for(
                self._environment.exec(
                    _line(command, mark),
                    cwd=command.cwd,
                    env=dict(command.env),
                    timeout_sec=math.ceil(command.timeout + GRACE_SECONDS),
                    user=command.user,
                ),
                command.timeout + 2 * GRACE_SECONDS,
            )
        )
        running.add_done_callback(lambda _: command.stop.set())
        waiting = select.poll()
        waiting.register(command.stop, select.POLLIN)
        waiting.poll()
        if not running.done():
            running.cancel()
            self.run_plain(f"sh -c {shlex.quote(KILL)} {mark}")
            return ExecResult(137, "", "", seconds=time.monotonic() - start)
        result = self._result(running, "running a command")
        seconds = time.monotonic() - start
        outputs = Output(command.max_output), Output(command.max_output)
        for output, text in zip(outputs, (result.stdout, result.stderr), strict=True):
            output.write((text or "").encode(errors="surrogateescape"))
        return ExecResult(
            exit_code=result.return_code,
            stdout=outputs[0].text(),
            stderr=outputs[1].text(),
            truncated=any(output.truncated for output in outputs),
            timed_out=result.return_code == 137 and seconds >= command.timeout,
            seconds=seconds,
        )

    def _put(self, tar: IO[bytes], folder: str) -> None:
        there = f"/tmp/.agentrl-{secrets.token_hex(8)}.tar"
        with tempfile.NamedTemporaryFile(dir=self._folder) as here:
            shutil.copyfileobj(tar, here)
            here.flush()
            self._call(self._environment.upload_file(here.name, there), f"writing into {folder}")
        into = shlex.quote(folder)
        done = self.run_plain(
            f"mkdir -p -- {into} && tar -xf {there} -C {into}; status=$?; rm -f {there}; exit $status"
        )
        if done.return_code:
            raise OSError(f"cannot write into {folder}: {(done.stderr or done.stdout or '').strip()}")

    def _get(self, path: str, tar: IO[bytes], max_bytes: int) -> None:
        there = f"/tmp/.agentrl-{secrets.token_hex(8)}.tar"
        limit = max_bytes + 2**20
        parent, _, name = path.rstrip("/").rpartition("/")
        arguments = [path, parent or "/", name or ".", str(limit + 1), there]
        packed = self.run_plain(shlex.join(["sh", "-c", FOUND, *arguments]))
        if packed.return_code == 66:
            raise FileNotFoundError(f"there is no {path} in the sandbox")
        if packed.return_code:
            raise OSError(f"cannot read {path}: {(packed.stderr or packed.stdout or '').strip()}")
        here = self._folder / secrets.token_hex(8)
        try:
            self._call(self._environment.download_file(there, here), f"reading {path}")
            if here.stat().st_size > limit:
                raise ValueError(f"{path} has more than max_bytes={max_bytes} bytes")
            with here.open("rb") as content:
                shutil.copyfileobj(content, tar)
        finally:
            here.unlink(missing_ok=True)
            self.run_plain(f"rm -f {there}")

    def _stop(self) -> None:
        try:
            self._call(self._environment.stop(delete=True), "ending")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _call(self, coroutine: Coroutine[Any, Any, Any], doing: str) -> Any:
        return self._result(_loop.start(asyncio.wait_for(coroutine, PLAIN_SECONDS + GRACE_SECONDS)), doing)

    def _result(self, running: Any, doing: str) -> Any:
        """What came of it.

        Raises:
            SandboxFailure: The environment raised, which is its way to say that it is gone.
        """
        try:
            return running.result()
        except Exception as error:
            raise SandboxFailure(f"{self._name} failed at {doing}: {type(error).__name__}: {error}") from error


def _line(command: Command, mark: str) -> str:
    """A command as a line for a shell: within its deadline, with its mark and its input."""
    line = f"env {mark} timeout -s KILL {math.ceil(command.timeout)} {shlex.join(command.argv)}"
    if command.stdin is None:
        return f"{line} < /dev/null"
    if len(command.stdin) > MAX_STDIN:
        raise ValueError(f"the input has {len(command.stdin)} bytes, at most {MAX_STDIN}; write a file with `put`")
    return f"printf %s {base64.b64encode(command.stdin).decode()} | base64 -d | {line}"


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _need_harbor() -> None:
    try:
        import harbor  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "this goes through the package harbor: pip install harbor, with Python 3.12 or newer"
        ) from error
