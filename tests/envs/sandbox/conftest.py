"""Both backends, and one sandbox of each that the tests of a module share where they leave it usable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Set
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.envs.sandbox import DockerBackend, ExecResult, LocalBackend, Sandbox, SandboxSpec
from agentrl.envs.sandbox.docker_engine import LABEL
from agentrl.errors import ConfigurationError
from tests.waiting import LONG

IMAGE = "agentrl-base:1"


def missing(reason: str) -> None:
    """Skip, or fail where CI has promised that everything is there."""
    if os.environ.get("AGENTRL_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def docker_backend() -> DockerBackend:
    try:
        backend = DockerBackend()
    except ConfigurationError as error:
        missing(str(error))
    if not backend.client.images.list(filters={"reference": IMAGE}):
        missing(f"the Docker engine has no image {IMAGE}; .ci/services builds it")
    return backend


def local_backend() -> LocalBackend:
    if shutil.which("bwrap") is None:
        missing("bubblewrap is not installed")
    return LocalBackend()


Start = Callable[..., Coroutine[Any, Any, Sandbox]]


class Place:
    """A backend, and what a spec needs on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend: Any = docker_backend() if name == "docker" else local_backend()

    def spec(self, **wanted: Any) -> SandboxSpec:
        source = {"image": IMAGE} if self.name == "docker" else {}
        return SandboxSpec(**{"memory_mb": 128, "pids": 40, **source, **wanted})

    async def start(self, **wanted: Any) -> Sandbox:
        return await self.backend.start(self.spec(**wanted))


@pytest.fixture(scope="module", params=[pytest.param("docker", marks=pytest.mark.slow), "local"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = Place(request.param)
    yield place
    if place.name == "docker":
        place.backend.client.close()


@pytest.fixture(scope="module")
def shared(place: Place) -> Iterator[Sandbox]:
    sandbox = asyncio.run(place.start())
    yield sandbox
    asyncio.run(sandbox.stop())


@pytest.fixture
def sh(shared: Sandbox) -> Callable[..., ExecResult]:
    """Run a command in the shared sandbox."""

    def run(command: str | list[str], **options: Any) -> ExecResult:
        return asyncio.run(shared.exec(command, **{"timeout": LONG, **options}))

    return run


def local_processes(parent: int) -> set[str]:
    """Supervisors of local sandboxes that belong to a process, and all below them."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if "bwrap.supervisor" in words and f'"parent": {parent},' in words:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {process, *process.children(recursive=True)}
    return {f"process {process.pid}" for process in found}


def groups(parent: int) -> set[str]:
    return {folder for folder, *_ in os.walk("/sys/fs/cgroup") if Path(folder).name.startswith(f"agentrl-{parent}-")}


def left(place: Place, parent: int) -> set[str]:
    """Containers, or processes and control groups, of a process."""
    if place.name == "local":
        return local_processes(parent) | groups(parent)
    return containers(place.backend, parent)


def containers(backend: DockerBackend, parent: int) -> set[str]:
    """The containers of a process; tests in another one may have theirs at the same time."""
    everything = backend.client.api.containers(all=True, filters={"label": LABEL})
    return {container["Id"] for container in everything if f"/{parent}/" in container["Labels"][LABEL]}


def wait_until_none_is_left(place: Place, parent: int, but: Set[str] = frozenset()) -> set[str]:
    """What of a process is still there after a minute, apart from some."""
    end = time.monotonic() + LONG
    while (remaining := left(place, parent) - but) and time.monotonic() < end:
        time.sleep(0.05)
    return remaining


@pytest.fixture
def clean(place: Place) -> Iterator[None]:
    """Fail if the test left anything behind; what earlier tests of this process left is theirs."""
    before = left(place, os.getpid())
    yield
    assert wait_until_none_is_left(place, os.getpid(), before) == set()
