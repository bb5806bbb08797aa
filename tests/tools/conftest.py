"""A sandbox for tools: the local one. They only use `exec` and `get`, so one test in Docker is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentrl.envs.sandbox import Sandbox
from tests.envs.sandbox.conftest import Place

Play = Callable[[Callable[[Sandbox], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def play() -> Play:
    """Run a coroutine function with a fresh sandbox, and give back what it does."""
    return player("local")


def player(name: str) -> Play:
    """`play`, on a backend by name."""
    place = Place(name)

    def run(use: Callable[[Sandbox], Coroutine[Any, Any, Any]]) -> Any:
        async def scene() -> Any:
            async with await place.start() as sandbox:
                return await use(sandbox)

        return asyncio.run(scene())

    return run
