"""Processes that share an engine see the same requests in the same order, whoever has any."""

from __future__ import annotations

import os
import random
from typing import Any

from torch import distributed

from agentrl.generation.lockstep import Lockstep
from tests.training.worlds import run_world


class Engine:
    """Counts a request down; all shards have to be stepped together."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.seen: list[str] = []

    def step(self) -> list[str]:
        steps: list[Any] = [None, None]
        distributed.all_gather_object(steps, sorted(self.left.items()))  # as the layers of a sharded model would
        assert steps[0] == steps[1]
        self.left = {name: count - 1 for name, count in self.left.items()}
        done = [name for name, count in self.left.items() if count <= 0]
        for name in done:
            del self.left[name]
        return done


def shard(pending: list[tuple[int, int]]) -> dict[str, Any]:
    rank, lockstep, engine, done = int(os.environ["RANK"]), Lockstep(2), Engine(), []
    chance = random.Random(rank)
    for counts in pending:
        lockstep.begin()
        waiting = [(f"{lockstep.prefix}{len(done)}.{i}", chance.randint(1, 5)) for i in range(counts[rank])]
        mine = {name for name, _ in waiting}
        while lockstep.running:
            if waiting and chance.random() < 0.5:
                name, steps = waiting.pop()
                lockstep.add(name, steps)
                if steps == 5:
                    lockstep.drop(name)
                    mine.discard(name)
            if not waiting and not mine:
                lockstep.end()
            news = lockstep.exchange(idle=not engine.left)
            for name, steps in news.added:
                engine.seen.append(name)
                engine.left[name] = steps
            for name in news.dropped:
                engine.left.pop(name, None)
            if engine.left:
                finished = [name for name in engine.step() if name in mine]
                mine -= set(finished)
                done += finished
    return {"seen": engine.seen, "done": done, "prefix": lockstep.prefix}


def test_shards_of_one_engine_get_the_same_requests_and_no_round_hangs(tmp_path):
    """5 and 3 pending requests, then 5 and 0, then none at all; L10: each gets the answers to its own."""
    first, second = run_world(shard, tmp_path, [(5, 3), (5, 0), (0, 0), (0, 2)])
    assert first["seen"] == second["seen"]
    assert len(first["seen"]) == 15
    assert all(name.startswith(first["prefix"]) for name in first["done"])
    assert all(name.startswith(second["prefix"]) for name in second["done"])


def test_alone_there_is_nothing_to_exchange():
    lockstep = Lockstep(1)
    lockstep.begin()
    assert not lockstep.running
    lockstep.add("a", 1)
    assert lockstep.exchange(idle=True).added == [("a", 1)]
    assert lockstep.exchange(idle=True).added == []
