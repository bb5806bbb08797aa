import threading

import pytest

from agentrl.generation.base import Generator
from tests.waiting import wait_until


@pytest.fixture
def generators():
    """Keep made generators and close them; no thread of theirs must be left."""
    before = set(threading.enumerate())
    made: list[Generator] = []

    def keep(generator: Generator) -> Generator:
        made.append(generator)
        return generator

    yield keep
    for generator in made:
        generator.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
