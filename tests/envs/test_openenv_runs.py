"""Runs on OpenEnv servers: training, and many rollouts on servers that fail all the time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.envs import OpenEnv
from agentrl.envs.openenv import connection
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.types import Outcome
from tests.envs.playing import WELL, Model, engine, get, step, task
from tests.envs.servers import OPENENV, ROOT, ServerProcess
from tests.envs.stub_openenv import LIES, stub_server
from tests.waiting import wait_until

ADD = step(what="add")
HONEST = 2.0
"""What two honest steps are worth."""

MANY, AT_ONCE = 200, 20
PATIENCE = 5.0
"""Seconds after which a server counts as hung: a busy one answers sooner."""

RETRIED = FailurePolicy(retries=3, delay=0.05, max_rate=0.5)

pytestmark = [pytest.mark.slow, OPENENV]


def batches() -> list[list[Any]]:
    return [[task(WELL, group=f"{n}", member=m) for m in range(AT_ONCE)] for n in range(MANY // AT_ONCE)]


def assert_no_reward_is_wrong(trajectories: list[Any]) -> None:
    for trajectory in trajectories:
        assert_row_invariants(trajectory)
    assert len(trajectories) == MANY
    assert {(t.outcome, t.reward) for t in trajectories} <= {(Outcome.FINISHED, HONEST), (Outcome.ENV_FAILURE, None)}
    played = sum(trajectory.outcome is Outcome.FINISHED for trajectory in trajectories)
    attempts = len(trajectories) + sum(trajectory.retries for trajectory in trajectories)
    assert played >= MANY * 0.98, "three attempts more should do in nearly all cases"
    assert attempts >= MANY * 1.05, "what was to be survived did not happen"


def test_a_server_that_lies_or_hangs_in_a_tenth_of_200_episodes_makes_no_wrong_reward() -> None:
    drawn = random.Random(1)
    lies = [lie for lie in LIES if lie != "bad arguments"]  # that one is the model's business

    def mood() -> str:
        return drawn.choice(lies) if drawn.random() < 0.1 else ""

    with stub_server(mood) as stub:
        factory = OpenEnv(stub.url, step_timeout=5, max_sessions=8)
        playing = engine(Model({WELL: (ADD, ADD)}), factory, failures=RETRIED)
        trajectories = []
        try:
            for rows in batches():
                played = playing.run(rows)
                playing.release(played)
                trajectories += played
        finally:
            playing.close()
        wait_until(lambda: stub.sessions == 0)
    assert_no_reward_is_wrong(trajectories)


def test_a_server_that_dies_or_hangs_again_and_again_makes_no_wrong_reward(
    start_openenv: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every third batch it is killed and comes back, or hangs (SIGSTOP) and goes on too late."""
    monkeypatch.setattr(connection, "CLOSE_SECONDS", 0.1)
    server = start_openenv("trouble", sessions=AT_ONCE)
    port, turns = server.port, iter(range(10**6))
    running = [server]

    async def misfortune() -> None:
        turn = next(turns)
        if turn % (6 * AT_ONCE) == AT_ONCE // 2:
            running[-1].kill()
            running.append(start_openenv("trouble", sessions=AT_ONCE, port=port))
        elif turn % (6 * AT_ONCE) == 3 * AT_ONCE + AT_ONCE // 2:
            hung = running[-1]
            hung.pause()
            asyncio.get_running_loop().call_later(PATIENCE + 1, hung.resume)

    factory = OpenEnv(server.url, ping_interval=0.2, ping_timeout=PATIENCE)
    model = Model({WELL: (ADD, ADD)}, {(WELL, 1): misfortune})
    playing = engine(model, factory, failures=FailurePolicy(retries=5, delay=0.2, max_rate=0.5))
    trajectories = []
    try:
        for rows in batches():
            played = playing.run(rows)
            playing.release(played)
            trajectories += played
    finally:
        playing.close()
    wait_until(lambda: get(f"{server.url}/sessions")["open"] == 0)
    assert len(running) > 2
    assert_no_reward_is_wrong(trajectories)


def test_the_tiny_agent_learns_on_16_sessions(
    start_openenv: Callable[..., ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from tiny_agent import Lesson, Recipe, make_tiny_agent
    from tiny_agent.transcripts import Transcript, calling

    server = start_openenv("digit", sessions=16)
    factory = OpenEnv(server.url)
    [schema] = factory().tool_schemas
    drawn = random.Random(0)

    def game() -> Transcript:
        """A guess at random, and no second one."""
        number = drawn.randint(0, 9)
        answer = "correct" if number == 3 else "higher" if number < 3 else "lower"
        messages = [
            {"role": "user", "content": "Guess my number between 0 and 9."},
            calling({"name": "step", "arguments": {"number": number}}),
            {"role": "tool", "name": "step", "content": answer},
            {"role": "assistant", "content": "Done."},
        ]
        return Transcript(messages, [{"type": "function", "function": schema}])

    recipe = Recipe(hidden_size=64, layers=2, heads=2)
    agent = make_tiny_agent([Lesson([game() for _ in range(500)], steps=50)], recipe, cache=tmp_path)
    trainer = GRPOTrainer(
        model=str(agent),
        environment_factory=factory,
        args=GRPOConfig(
            output_dir=str(tmp_path / "run"),
            max_steps=6,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            per_device_train_batch_size=32,
            num_generations=16,
            max_completion_length=80,
            max_tool_calling_iterations=2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
    )
    trainer.train()
    rewards = [entry["rewards/OpenEnv/mean"] for entry in trainer.state.log_history if "rewards/OpenEnv/mean" in entry]
    wait_until(lambda: get(f"{server.url}/sessions")["open"] == 0)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2, rewards
    assert get(f"{server.url}/sessions")["made"] <= 6 * 32
