"""AsyncGRPOTrainer on a real vLLM server, on the CPU; skipped without `.venv-vllm`, as in CI."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from transformers.utils import get_json_schema

from agentrl import AsyncGRPOConfig, AsyncGRPOTrainer
from agentrl.generation.vllm_http import Replica
from agentrl.testing.vllm import VllmServer, free_port
from agentrl.training import sampler_check
from agentrl.training.sampler_check import EXACT
from agentrl.types import Trajectory
from tests.envs.training import calling
from tests.generation.test_vllm_real import BIN, START_SECONDS, pytestmark  # noqa: F401
from tests.training.runs import logged, weights
from tests.waiting import eventually

STEPS = 7
GROUPS = 2
"""Of a step."""


class Digit:
    """A digit is guessed once. Guesses of windows that are played ahead are answered after the next update alone."""

    updates: Updates

    def reset(self, row: int, **_: Any) -> str:
        self.reward, self.ahead, self.began = 0.0, row >= GROUPS, self.updates.version
        return "Guess my digit."

    async def guess(self, digit: int) -> str:
        """Guess the digit.

        Args:
            digit: The guess.
        """
        if self.ahead:
            await eventually(lambda: self.updates.version > self.began)
        self.reward = float(digit == 3)
        return "right" if digit == 3 else "wrong"

    def get_reward(self) -> float:
        return self.reward


class Updates:
    """Keeps the policy's weights as they were at each update of the server."""

    def __init__(self, trainer: AsyncGRPOTrainer) -> None:
        self.version = 0
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self._trainer, self._sync = trainer, trainer.collector.generator.sync
        trainer.collector.generator.sync = self.sync

    def sync(self, version: int) -> None:
        self._sync(version)
        self.weights[version], self.version = weights(self._trainer), version


def agent(folder: Path) -> Path:
    """One that guesses at random, and says something more afterwards."""
    from tiny_agent import Lesson, Recipe, Transcript, make_tiny_agent

    schema, drawn = get_json_schema(Digit.guess), random.Random(0)

    def game() -> Transcript:
        digit = drawn.randint(1, 5)
        messages = [
            {"role": "user", "content": "Guess my digit."},
            calling({"name": "guess", "arguments": {"digit": digit}}),
            {"role": "tool", "name": "guess", "content": "right" if digit == 3 else "wrong"},
            {"role": "assistant", "content": "Done."},
        ]
        return Transcript(messages, [schema])

    recipe = Recipe(hidden_size=64, layers=2, heads=2)  # a head of 32, the smallest that vLLM's CPU kernels know
    return make_tiny_agent([Lesson([game() for _ in range(500)], steps=60)], recipe, cache=folder)


@torch.no_grad()
def off_by(trajectory: Trajectory, policies: dict[int, torch.nn.Module]) -> float:
    """The largest difference between the recorded logprobs and those of the policies, by the version of each token."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
    first = len(trajectory.prompt_ids)
    logps = {}
    largest = 0.0
    for turn in trajectory.turns:
        for position, version in enumerate(turn.versions, turn.start):
            if version not in logps:
                logps[version] = policies[version](ids).logits[0].log_softmax(-1)
            said = float(logps[version][first + position - 1, ids[0, first + position]])
            largest = max(largest, abs(said - trajectory.logprobs[position]))
    return largest


def test_async_training_on_a_real_server_knows_which_weights_drew_each_token(tmp_path, monkeypatch):
    """Rollouts go on across updates; each span's logprobs are those of its version; the agent learns all the same."""
    monkeypatch.setattr(sampler_check, "UPDATES_CHECKED", STEPS)  # else of the first few alone
    probes: list[float] = []
    judge = sampler_check.judge

    def noting(found: dict[str, torch.Tensor], **how: Any) -> None:
        probes.extend(float(values.max()) for values in found.values())
        judge(found, **how)

    monkeypatch.setattr(sampler_check, "judge", noting)
    folder = agent(tmp_path / "agents")
    with VllmServer(BIN / "vllm", folder, tmp_path) as server:
        Replica(server.url).wait_until_up(START_SECONDS)
        trainer = AsyncGRPOTrainer(
            str(folder),
            environment_factory=Digit,
            train_dataset=Dataset.from_dict({"row": list(range(GROUPS * STEPS))}),
            args=AsyncGRPOConfig(
                str(tmp_path / "run"),
                max_staleness=1,
                max_steps=STEPS,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                per_device_train_batch_size=GROUPS * 16,
                num_generations=16,
                max_completion_length=80,
                shuffle_dataset=False,
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=server.url,
                vllm_server_timeout=START_SECONDS,
                vllm_group_port=free_port(),
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            ),
        )
        Digit.updates = updates = Updates(trainer)
        wait, played = trainer.collector.engine.wait, []

        def noting_played(*args: Any) -> list[Trajectory]:
            played.append(wait(*args))
            return played[-1]

        monkeypatch.setattr(trainer.collector.engine, "wait", noting_played)
        trainer.train()

    policies = {}
    for version, state in updates.weights.items():
        policies[version] = AutoModelForCausalLM.from_pretrained(folder)
        policies[version].load_state_dict(state)
    assert max(off_by(trajectory, policies) for window in played for trajectory in window) <= EXACT
    shifted = {version + 1: policy for version, policy in policies.items()} | {0: policies[0]}
    assert max(off_by(trajectory, shifted) for trajectory in played[-1]) > EXACT, "other weights would show"
    for step, window in enumerate(played[1:], 1):
        across = [t for t in window if len(t.turns) > 1]
        assert across, "the agent calls its tool"
        for trajectory in across:
            versions = [version for turn in trajectory.turns for version in turn.versions]
            assert (versions[0], versions[-1]) == (step - 1, step)
    assert len(probes) == STEPS
    assert max(probes) <= EXACT
    assert max(logged(trainer, "async/staleness/max")) == 1
    rewards = logged(trainer, "reward")
    assert fmean(rewards[-2:]) > fmean(rewards[:2]), rewards
