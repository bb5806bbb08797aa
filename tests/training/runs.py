"""Small training runs: a trainer of a tiny Llama that takes seconds, and what to ask it afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from agentrl.generation.base import SamplingParams
from agentrl.generation.local import LocalGenerator
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import EOS, FIX_VOCAB_SIZE, fix_tokenizer
from agentrl.training.arguments import RolloutConfig
from agentrl.training.async_grpo import AsyncGRPOTrainer
from agentrl.training.async_rloo import AsyncRLOOTrainer
from agentrl.training.grpo import GRPOTrainer
from agentrl.training.rloo import RLOOTrainer
from agentrl.training.trainer import RolloutTrainer

TRAINERS: dict[str, type[RolloutTrainer]] = {
    "grpo": GRPOTrainer,
    "rloo": RLOOTrainer,
    "async_grpo": AsyncGRPOTrainer,
    "async_rloo": AsyncRLOOTrainer,
}


def first_fast(cases: Iterable[Any], count: int) -> list[Any]:
    """Cases of a parametrised test, of which all after the first `count` are slow."""
    return [
        pytest.param(case, marks=[pytest.mark.slow] if index >= count else [], id=str(case))
        for index, case in enumerate(cases)
    ]


def rows(count: int) -> Dataset:
    """Prompts of different lengths, with the row's number as column `row`."""
    return Dataset.from_dict(
        {"prompt": [f"prompt {'x' * (i % 3)}{i}" for i in range(count)], "row": list(range(count))}
    )


def length_and_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs from row to row and depends on nothing but the sampled ids."""
    return [(sum(ids) % 11) / 10 - 0.1 * len(ids) for ids in completion_ids]


def scripted(model: PreTrainedModel | None = None) -> ScriptedGenerator:
    """Samples by the turn's seed alone, 1 to 5 ids and the stop id: the same rows for any weights and processes."""

    def turn(_: str, __: list[int], params: SamplingParams) -> list[int]:
        draw = random.Random(params.seed)
        return [draw.randrange(132, 226) for _ in range(draw.randint(1, 5))] + [EOS]

    return ScriptedGenerator(turn)


def local(model: PreTrainedModel) -> LocalGenerator:
    """The real generator, with a cache that fits tiny models."""
    return LocalGenerator(model, max_cache_tokens=8192)


def make_config(algorithm: str, folder: Path | str, **options: Any) -> RolloutConfig:
    """A configuration for seconds-long runs on the CPU: two generations, logs at each step, nothing saved."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    return TRAINERS[algorithm].config_class(str(folder), **{**defaults, **options})


def make_trainer(
    algorithm: str,
    folder: Path | str,
    *,
    model: PreTrainedModel | None = None,
    reward: Any = length_and_ids,
    dataset: Any = None,
    generator: Any = scripted,
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> RolloutTrainer:
    """A trainer of a tiny Llama.

    Args:
        algorithm: "grpo" or "rloo".
        folder: Where checkpoints go.
        model: The policy; by default the same random one each time.
        reward: A reward function or several.
        dataset: Training rows; by default 4.
        generator: A function of the model.
        keywords: Further keywords of the trainer.
        **options: Arguments of the configuration.
    """
    return TRAINERS[algorithm](
        model if model is not None else small_model(),
        reward,
        make_config(algorithm, folder, **options),
        rows(4) if dataset is None else dataset,
        generator=generator,
        **{"processing_class": fix_tokenizer(), **(keywords or {})},
    )


def small_model(**overrides: Any) -> PreTrainedModel:
    """A random Llama for the ids of `fix_tokenizer`, whose logits are spread out little enough to stay random."""
    return tiny_model("llama", vocab_size=FIX_VOCAB_SIZE, **{"initializer_range": 0.1, **overrides})


def weights(trainer: RolloutTrainer) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def step_logs(trainer: RolloutTrainer) -> list[dict[str, Any]]:
    """The training logs, one a logged step."""
    return [log for log in trainer.state.log_history if "loss" in log]


def untimed(log: dict[str, Any]) -> set[str]:
    """The names of what was logged, without what is measured with a clock."""
    return {name for name in log if not name.startswith(("step_time", "tools/time_share/"))}


def logged(trainer: RolloutTrainer, name: str) -> list[Any]:
    """The values of one training metric, step by step; None where a log lacks it."""
    return [log.get(name) for log in step_logs(trainer)]


def whole_and_resumed(
    folder: Path, *, algorithm: str = "grpo", at: int = 2, steps: int = 4, **options: Any
) -> tuple[RolloutTrainer, RolloutTrainer]:
    """Train in one go; train again up to a checkpoint, and the rest with a new trainer that resumes from it."""
    options = {"dataset": rows(6), "save_strategy": "steps", "save_steps": at, "generator": local, **options}
    whole = make_trainer(algorithm, folder / "whole", max_steps=steps, **options)
    whole.train()
    make_trainer(algorithm, folder / "parts", max_steps=at, **options).train()
    resumed = make_trainer(algorithm, folder / "parts", max_steps=steps, **options)
    resumed.train(resume_from_checkpoint=True)
    return whole, resumed
