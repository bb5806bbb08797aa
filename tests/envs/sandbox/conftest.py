"""Both backends, and one sandbox of each that the tests of a module share where they leave it usable."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from agentrl.envs.sandbox import DockerBackend, ExecResult, LocalBackend, Sandbox, SandboxSpec
from agentrl.errors import ConfigurationError

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
        return asyncio.run(shared.exec(command, **{"timeout": 20, **options}))

    return run
