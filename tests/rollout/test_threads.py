"""Handing calls to threads, and their outcomes back to loops."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref

import pytest

from agentrl.rollout.threads import Threads

CALLS = 1500
SECONDS = 60.0
"""More than enough; a call that is forgotten waits for ever."""


@pytest.mark.parametrize("places", [1, 3, 64])
def test_every_call_of_many_is_run_and_answered_once_whoever_is_cancelled(places: int) -> None:
    """Two loops at once, with fewer threads than calls; a tenth is cancelled before, while or after it runs."""
    threads = Threads(max_threads=places)
    ran: list[int] = []

    async def use(first: int) -> list[int | None]:
        drawn = random.Random(first)

        async def one(number: int) -> int | None:
            call = asyncio.ensure_future(threads.run(lambda: ran.append(number) or number))
            if drawn.random() < 0.1:
                await asyncio.sleep(drawn.random() * 0.01)
                call.cancel()
            try:
                return await call
            except asyncio.CancelledError:
                return None

        async with asyncio.timeout(SECONDS):
            return await asyncio.gather(*(one(number) for number in range(first, first + CALLS)))

    answers: dict[int, list[int | None]] = {}
    loops = [threading.Thread(target=lambda at=at: answers.update({at: asyncio.run(use(at))})) for at in (0, CALLS)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    threads.close()
    answered = [number for at in (0, CALLS) for number in answers[at] if number is not None]
    assert len(answered) == len(set(answered)) > CALLS
    assert len(ran) == len(set(ran))
    assert set(answered) <= set(ran)
    for at in (0, CALLS):
        assert all(got in (number, None) for number, got in enumerate(answers[at], at))


def test_a_call_that_follows_the_last_answer_needs_no_further_thread() -> None:
    threads = Threads()
    used: set[int] = set()

    async def main() -> None:
        for _ in range(200):
            await threads.run(lambda: used.add(threading.get_ident()))

    asyncio.run(main())
    threads.close()
    assert len(used) == 1


def test_a_thread_that_rests_keeps_nothing_of_its_last_call() -> None:
    """An environment or an image that a tool was given is freed, though its thread waits for the next call."""
    threads = Threads()

    class Big:
        pass

    async def main() -> weakref.ref[Big]:
        big = Big()
        await threads.run(lambda big: None, big)
        return weakref.ref(big)

    try:
        left = asyncio.run(main())
        for _ in range(1000):
            if left() is None:
                break
            gc.collect()
        assert left() is None
    finally:
        threads.close()
