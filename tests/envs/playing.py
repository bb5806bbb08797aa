"""Rollouts on servers, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Message, Task
from tests.rollout.helpers import call, encode, renderer, turn

NO_RETRY = FailurePolicy(retries=0, delay=0, max_rate=1.0)

HIT, WELL = "H:", "W:"
"""Prompts of rollouts that something happens to, and of others."""


class Model(ScriptedGenerator):
    """Calls tools as scripted, then answers.

    Args:
        scripts: The calls (texts as `call` writes them) of a rollout, by the prompt.
        acts: What is done before a turn, by prompt and number of the turn; for the world, not for the model.
    """

    def __init__(
        self,
        scripts: Mapping[str, Sequence[str]],
        acts: Mapping[tuple[str, int], Callable[[], Awaitable[None]]] | None = None,
    ) -> None:
        super().__init__(self._turn)
        self._texts = scripts
        self._acts = acts or {}

    async def sample(self, session: str, ids: Sequence[int], params: Any) -> Any:
        act = self._acts.get((self._prompt(list(ids)), len(self.calls_of(session))))
        if act is not None:
            await act()
        await asyncio.sleep(0)
        return await super().sample(session, ids, params)

    def _turn(self, session: str, ids: list[int], params: Any) -> list[int]:
        script, number = self._texts[self._prompt(ids)], len(self.calls_of(session))
        return turn(script[number] if number < len(script) else "ok")

    def _prompt(self, ids: list[int]) -> str:
        return next(prompt for prompt in self._texts if _contains(ids, encode(prompt)))


def step(**arguments: Any) -> str:
    """A call of the tool `step`."""
    return call("step", json.dumps(arguments))


def task(prompt: str, group: str = "g", member: int = 0, **columns: Any) -> Task:
    messages: list[Message] = [{"role": "user", "content": prompt}]
    return Task(group, member, 7, messages, columns)


def engine(model: ScriptedGenerator, factory: Any, **options: Any) -> RolloutEngine:
    return RolloutEngine(model, renderer(), environments=factory, **{"failures": NO_RETRY, **options})


def get(url: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as answer:
        return json.loads(answer.read() or "null")


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[start : start + len(part)]) == list(part) for start in range(len(ids)))
