import threading

import pytest

from agentrl.generation.base import Generator


@pytest.fixture
def generators():
    """Keep made generators and close them; the number of threads must be what it was."""
    before = threading.active_count()
    made: list[Generator] = []

    def keep(generator: Generator) -> Generator:
        made.append(generator)
        return generator

    yield keep
    for generator in made:
        generator.close()
    assert threading.active_count() == before
