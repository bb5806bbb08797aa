"""A tiny model, tokenizer and environment for trainer tests, and one function that puts a trainer together."""

from __future__ import annotations

from typing import Any

import datasets

from agentrl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer

TRAINERS = [GRPOTrainer, RLOOTrainer]
TOKENIZER = qwen_like_tokenizer("compact")


def text_rows(count: int = 4, **columns: Any) -> datasets.Dataset:
    """Plain-text prompts."""
    return datasets.Dataset.from_dict({"prompt": [f"p{i}" for i in range(count)], **columns})


def chat_rows(count: int = 4, **columns: Any) -> datasets.Dataset:
    """Conversational prompts."""
    prompts = [[{"role": "user", "content": f"q{i}"}] for i in range(count)]
    return datasets.Dataset.from_dict({"prompt": prompts, **columns})


def model(**options: Any) -> Any:
    """A random two-layer Qwen3 for `TOKENIZER`."""
    return tiny_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=1024, **options)


def constant(completions: list[Any], **_: Any) -> list[float]:
    """Reward rows 0, 1, 2, ... by their place, so that groups have a spread."""
    return [float(i) for i in range(len(completions))]


def make(cls: type, tmp_path: Any, *, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """A trainer with small settings; `options` and `config` win over them."""
    config_class = GRPOConfig if issubclass(cls, GRPOTrainer) else RLOOConfig
    settings: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    options = {
        "model": model() if "model" not in options else options["model"],
        "processing_class": TOKENIZER,
        "args": config_class(str(tmp_path), **(settings | (config or {}))),
        **{name: value for name, value in options.items() if name != "model"},
    }
    if "environment_factory" not in options:
        options = {"train_dataset": text_rows(), "reward_funcs": constant} | options
    return cls(**options)


class Game:
    """Reward is how often the tool was called; ends when told to."""

    instances: list[Game] = []  # noqa: RUF012 - each test resets it

    def __init__(self) -> None:
        type(self).instances.append(self)
        self.closed = 0
        self.resets = 0

    def reset(self, **kwargs: Any) -> str:
        self.resets += 1
        self.count = 0
        return "go"

    def get_reward(self) -> float:
        return float(self.count)

    def close(self) -> None:
        self.closed += 1

    def press(self) -> str:
        """Press the button."""
        self.count += 1
        return "pressed"


def logged(trainer: Any, name: str) -> list[float]:
    """The values of one metric over the logs."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
