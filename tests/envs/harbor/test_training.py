"""Training on a Harbor task that processes data, in containers and in local sandboxes."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs import Harbor
from agentrl.types import Message
from tests.envs.harbor.writing import says, write_task
from tests.envs.sandbox.conftest import containers, docker_backend, local_backend
from tests.envs.training import calling, rewards_of_training, tiny_agent

INSTRUCTION = "Which column of 1,2,3;4,6,9 has the sum 12? Write its number to out.txt."
SUM = "{for (i = 1; i <= NF; i++) s[i] += $i} END {for (i in s) if (s[i] == 12) print i}"
TEST = (
    f"want=$(printf '1,2,3\\n4,6,9\\n' | awk -F, '{SUM}')\n"
    f'if [ "$(cat /app/out.txt)" = "$want" ]; then {says("1")}; else {says("0")}; fi'
)


def writer(tools: list[dict[str, Any]], folder: Path) -> str:
    """An agent that has seen others write a number at random."""
    rng = random.Random(0)

    def game() -> list[Message]:
        return [
            {"role": "user", "content": INSTRUCTION},
            calling({"name": "bash", "arguments": {"command": f"echo {rng.randrange(1, 4)} > out.txt"}}),
            {"role": "tool", "name": "bash", "content": "[no output]"},
            {"role": "assistant", "content": "Done."},
        ]

    return tiny_agent(game, tools, folder, games=200)


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["docker", "local"])
def test_training_raises_the_reward(kind: str, agents: Path, tmp_path: Path) -> None:
    """The same task on both backends: three lines for the user, and nothing left afterwards."""
    backend: Any = docker_backend() if kind == "docker" else local_backend()
    write_task(tmp_path / "tasks" / "sums", "[environment]\nmemory_mb = 128", TEST, instruction=INSTRUCTION)
    harbor = Harbor(tmp_path / "tasks", backend=backend)
    agent = writer(harbor().tool_schemas, agents)
    rewards = rewards_of_training(agent, harbor, harbor.tasks(), tmp_path, steps=5, rollouts=12)
    assert len(rewards) == 5
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2, rewards
    if kind == "docker":
        assert containers(backend, os.getpid()) == set()
        backend.client.close()
