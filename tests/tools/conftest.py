"""A sandbox for tools: the local one, which every machine with bubblewrap has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from agentrl.envs.sandbox import Sandbox

from tests.envs.sandbox.conftest import Place

Play = Callable[[Callable[[Sandbox], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.slow), "local"])
def play(request: pytest.FixtureRequest) -> Play:
    """Run a coroutine function with a fresh sandbox, and give back what it does."""
    place = Place(request.param)

    def run(use: Callable[[Sandbox], Coroutine[Any, Any, Any]]) -> Any:
        async def scene() -> Any:
            async with await place.start() as sandbox:
                return await use(sandbox)

        return asyncio.run(scene())

    return run
