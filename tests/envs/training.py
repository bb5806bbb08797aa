"""Training a tiny agent for a few steps, which is enough to choose a better argument of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.types import Message

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from tiny_agent import Lesson, Recipe, Transcript, make_tiny_agent
from tiny_agent.transcripts import calling

__all__ = ["calling", "rewards_of_training", "tiny_agent"]


def tiny_agent(game: Callable[[], list[Message]], tools: list[dict[str, Any]], folder: Path, games: int) -> str:
    """An agent that has read so many games."""
    transcripts = [Transcript(game(), tools) for _ in range(games)]
    small = Recipe(hidden_size=48, heads=2, layers=1)
    return str(make_tiny_agent([Lesson(transcripts, steps=120)], small, cache=folder))


def rewards_of_training(
    agent: str, source: Any, dataset: Any, folder: Path, *, steps: int, rollouts: int
) -> list[float]:
    """Train on tasks of one group a step; gives the mean reward of each step."""
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=rollouts,
        num_generations=rollouts,
        max_completion_length=80,
        max_tool_calling_iterations=2,
        learning_rate=3e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    trainer = GRPOTrainer(agent, args=args, train_dataset=dataset, environment_factory=source)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
