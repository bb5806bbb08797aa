"""Episodes that are played while the caller does something else."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.errors import GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.rollout.admission import Admission
from agentrl.rollout.busy import Busy
from agentrl.rollout.engine import RolloutEngine
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome
from tests.rollout.helpers import call, renderer, tasks, turn
from tests.waiting import LONG, wait_until


def gated(begun: list[list[int]] | None = None, **options: Any) -> tuple[RolloutEngine, threading.Event, list[int]]:
    """An engine whose episodes call a tool that waits for an event; its calls, and which prompts began."""
    opened, called, asked = threading.Event(), [], set()

    def calls_once(session: str, ids: list[int], __: SamplingParams) -> list[int]:
        again = session in asked
        asked.add(session)
        if begun is not None and not again:
            begun.append(list(ids))
        return turn("done") if again else turn(call("gate"))

    def gate() -> str:
        """Wait."""
        called.append(1)
        assert opened.wait(LONG)
        return "open"

    return RolloutEngine(ScriptedGenerator(calls_once), renderer(), tools=[gate], **options), opened, called


def test_several_plays_go_on_beside_each_other_and_beside_the_caller():
    engine, opened, called = gated()
    first, second = engine.start(tasks(2)), engine.start(tasks(1))
    wait_until(lambda: len(called) == 3)
    assert not first.finished
    opened.set()
    assert [t.outcome for t in engine.wait(first, [second])] == [Outcome.FINISHED] * 2
    assert len(engine.wait(second)) == 1
    assert sorted(first.finished) == [0, 1]
    engine.close()


def test_an_error_of_another_play_is_raised_while_one_is_waited_for():
    """At once: the play that is waited for would never end."""
    engine, opened, called = gated()
    waiting = engine.start(tasks(1))
    wait_until(lambda: called)

    async def broken(*_: Any) -> Any:
        raise GenerationError("the server is gone")

    engine.generator = ScriptedGenerator([])
    engine.generator.sample = broken  # type: ignore[method-assign]
    other = engine.start(tasks(1))
    with pytest.raises(GenerationError, match="the server is gone"):
        engine.wait(waiting, [other])
    assert waiting.future.cancelled()
    opened.set()
    engine.close()


def test_no_more_run_at_once_than_have_a_place_and_who_is_waited_for_comes_first():
    begun: list[list[int]] = []
    engine, opened, called = gated(begun, max_concurrency=2)
    ahead = engine.start(tasks(5))
    wait_until(lambda: len(called) == 2)
    urgent = engine.start(tasks(1, prompt=[{"role": "user", "content": "This first."}]), urgent=True)
    wait_until(lambda: engine._admission._urgent and len(engine._admission._others) == 3)
    assert len(called) == 2
    opened.set()
    assert len(engine.wait(ahead)) == 5
    engine.wait(urgent)
    engine.close()
    assert [ids != begun[0] for ids in begun] == [False, False, True, False, False, False]


def test_a_place_is_not_lost_with_whoever_is_cancelled():
    async def play() -> int:
        admission, inside = Admission(1), asyncio.Event()

        async def hold() -> None:
            async with admission.place(urgent=False):
                inside.set()
                await asyncio.sleep(3600)

        holding, waiting = asyncio.create_task(hold()), asyncio.create_task(hold())
        await inside.wait()
        await asyncio.sleep(0)
        waiting.cancel()
        holding.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        late, given = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
        late.cancel()  # gives its place on, to one that is cancelled before it wakes up
        await asyncio.sleep(0)
        given.cancel()
        await asyncio.gather(late, given, return_exceptions=True)
        async with asyncio.timeout(LONG), admission.place(urgent=False):
            return 1

    assert asyncio.run(play()) == 1


def test_overlapping_activities_count_once(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("agentrl.rollout.busy.time", SimpleNamespace(monotonic=lambda: clock[0]))
    busy = Busy()
    with busy, busy:
        clock[0] += 2
        during = busy.seconds
    clock[0] += 3
    assert during == busy.seconds == 2
