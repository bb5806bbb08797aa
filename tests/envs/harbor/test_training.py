"""Training on a Harbor task that processes data, in containers and in local sandboxes."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.envs import Harbor
from tests.envs.harbor.writing import says, write_task
from tests.envs.sandbox.conftest import docker_backend, local_backend

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from tiny_agent import Lesson, Recipe, Transcript, make_tiny_agent
from tiny_agent.transcripts import calling

INSTRUCTION = "Which column of 1,2,3;4,6,9 has the sum 12? Write its number to out.txt."
SUM = "{for (i = 1; i <= NF; i++) s[i] += $i} END {for (i in s) if (s[i] == 12) print i}"
TEST = (
    f"want=$(printf '1,2,3\\n4,6,9\\n' | awk -F, '{SUM}')\n"
    f'if [ "$(cat /app/out.txt)" = "$want" ]; then {says("1")}; else {says("0")}; fi'
)


def writer(tools: list[dict[str, Any]], folder: Path) -> Path:
    """An agent that has seen others write a number at random."""
    rng = random.Random(0)

    def game() -> Transcript:
        messages = [
            {"role": "user", "content": INSTRUCTION},
            calling({"name": "bash", "arguments": {"command": f"echo {rng.randrange(1, 4)} > out.txt"}}),
            {"role": "tool", "name": "bash", "content": "[no output]"},
            {"role": "assistant", "content": "Done."},
        ]
        return Transcript(messages, tools)

    small = Recipe(hidden_size=48, heads=2, layers=1)
    return make_tiny_agent([Lesson([game() for _ in range(200)], steps=120)], small, cache=folder)


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
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=5,
        per_device_train_batch_size=12,
        num_generations=12,
        max_completion_length=80,
        max_tool_calling_iterations=2,
        learning_rate=3e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    trainer = GRPOTrainer(str(agent), args=args, train_dataset=harbor.tasks(), environment_factory=harbor)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 5
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2, rewards
    if kind == "docker":
        assert backend.client.containers.list(all=True, filters={"label": "agentrl.owner"}) == []
        backend.client.close()
