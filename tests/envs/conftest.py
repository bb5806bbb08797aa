"""Real OpenEnv and ORS servers; each test's servers are gone when it ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.envs.servers import Nursery, ServerProcess


def starting(nursery: Nursery) -> Iterator[Callable[..., ServerProcess]]:
    """A function that starts servers, all of which are killed in the end."""
    started: list[ServerProcess] = []

    def start(world: str, **options: Any) -> ServerProcess:
        started.append(nursery.start(world, **options))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def openenv_nursery() -> Iterator[Nursery]:
    nursery = Nursery("openenv_server.py")
    yield nursery
    nursery.close()


@pytest.fixture
def start_openenv(openenv_nursery: Nursery) -> Iterator[Callable[..., ServerProcess]]:
    """Start a world of `servers/openenv_server.py`: `start_openenv("guess", sessions=2)`."""
    yield from starting(openenv_nursery)


@pytest.fixture(scope="session")
def ors_nursery() -> Iterator[Nursery]:
    nursery = Nursery("ors_server.py")
    yield nursery
    nursery.close()


@pytest.fixture
def start_ors(ors_nursery: Nursery) -> Iterator[Callable[..., ServerProcess]]:
    """Start a world of `servers/ors_server.py`: `start_ors("guess")`."""
    yield from starting(ors_nursery)
