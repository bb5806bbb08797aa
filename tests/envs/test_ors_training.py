"""Training on an ORS server, and many rollouts on one that dies, hangs and lies now and then."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs import ORS
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Message, Outcome, Task
from tests.envs.ors_play import state, use
from tests.envs.proxy import Fault, Link, Proxy, edited, lost, passed, replaced, silent, unheard
from tests.envs.training import calling, rewards_of_training, tiny_agent
from tests.rollout.helpers import renderer, turn


def guesser(tools: list[dict[str, Any]], folder: Path) -> str:
    """An agent that has read games of a player who guesses at random."""
    rng = random.Random(0)

    def game() -> list[Message]:
        number = rng.randrange(10)
        return [
            {"role": "user", "content": "Guess my number between 0 and 9."},
            calling({"name": "guess", "arguments": {"number": number}}),
            {"role": "tool", "name": "guess", "content": rng.choice(["higher", "lower"])},
            {"role": "assistant", "content": "Done."},
        ]

    return tiny_agent(game, tools, folder, games=300)


@pytest.mark.slow
def test_training_on_a_server_raises_the_reward(start_ors, tmp_path: Path) -> None:
    """Three lines for the user: the right digit is always the same, which can be learnt."""
    server = start_ors("digit")
    ors = ORS(url=server.url)
    agent = guesser(ors().tool_schemas, tmp_path / "agents")
    rewards = rewards_of_training(agent, ors, ors.tasks("train"), tmp_path, steps=9, rollouts=24)
    assert len(rewards) == 9
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert state(server)["open"] == 0


def faulty(seed: int, share: float) -> tuple[Fault, Counter[int | None]]:
    """A proxy's way with calls, a share of which meets one fault or another; and how many met which."""
    rng = random.Random(seed)
    faults = [
        lost(b"HTTP/1.1"),
        lost(b"event: task_id"),
        lost(b"event: end"),
        unheard,
        silent,
        edited(b'"ok":true', b'"ok":tru!'),
        edited(b'"finished":', b'"finishe!":'),
        edited(b'"reward":', b'"Reward":'),
        replaced("500 Oops", "no"),
        replaced("429 Slow", "", "Retry-After: 0"),
        replaced("404 Not Found", ""),
        replaced("200 OK", 'event: end\ndata: {"ok": true, "output": {"reward": 99}}\n\n', kind="text/event-stream"),
    ]

    async def fault(request: bytes, link: Link) -> None:
        kind = rng.randrange(len(faults)) if rng.random() < share else None
        met[kind] += 1
        await (passed if kind is None else faults[kind])(request, link)

    met: Counter[int | None] = Counter()
    return fault, met


@pytest.mark.slow
def test_two_hundred_rollouts_on_a_server_that_dies_hangs_and_lies(start_ors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of all calls goes wrong, and once the server is killed: no wrong reward, no session left."""
    monkeypatch.setattr("agentrl.envs.ors.session.DELETE_SECONDS", 5.0)
    servers = [start_ors("guess")]
    calls = 0

    def speak(session: str, ids: list[int], params: Any) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 150:
            servers[-1].kill()
            servers.append(start_ors("guess"))
            proxy.upstream = servers[-1].port
        said = spoken[session] = spoken[session] + 1
        return turn(use("guess", number=5) if said == 1 else use("guess", number=4))

    spoken: Counter[str] = Counter()
    with Proxy(servers[0].port) as proxy:
        fault, met = faulty(seed=0, share=0.1)
        for _ in range(2000):
            proxy.spoil("/call", fault)
        engine = RolloutEngine(
            ScriptedGenerator(speak),
            renderer(),
            environments=ORS(url=proxy.url, silence=6),
            failures=FailurePolicy(retries=2, delay=0.05),
        )
        try:
            lost_ones, right = 0, 0
            for step in range(10):
                tasks = [Task(f"g{step}", n, 7, None, {"task": json.dumps({"number": 4})}) for n in range(20)]
                trajectories = engine.run(tasks)
                for trajectory in trajectories:
                    assert_row_invariants(trajectory)
                    lost_ones += trajectory.outcome is Outcome.ENV_FAILURE
                    right += (trajectory.outcome, trajectory.reward) == (Outcome.ENV_DONE, 1.25)
                engine.release(trajectories)
        finally:
            engine.close()
    assert len(met) > 8, met
    assert right + lost_ones == 200, "no rollout has a wrong reward"
    assert lost_ones < 20
    assert state(servers[-1])["open"] == 0
