"""Two processes learn what one process would, log the same everywhere and never wait for each other in vain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import (
    distance,
    length_and_ids,
    logged,
    make_trainer,
    rows,
    run_world,
    step_logs,
    weights,
)

SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


def train(algorithm: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, which may be one of several, and tell what happened."""
    seen: list[list[str]] = []

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        seen.append(prompts)
        return length_and_ids(**columns)

    trainer = make_trainer(algorithm, folder, reward=reward, dataset=rows(8), **SGD, **options)
    advantages = []
    note = trainer._note
    trainer._note = lambda window, **which: (  # type: ignore[method-assign]
        advantages.append([a for batch in window.batches for a in batch.advantages_R.tolist()]),
        note(window, **which),
    )[1]
    trainer.train()
    return {
        "weights": weights(trainer),
        "logs": step_logs(trainer),
        "advantages": advantages,
        "prompts": seen,
    }


OBJECTIVES = {
    "dapo": ("grpo", {"loss_type": "dapo"}),
    "grpo": ("grpo", {"loss_type": "grpo"}),
    "dr_grpo": ("grpo", {"loss_type": "dr_grpo"}),
    "grpo-kl": ("grpo", {"loss_type": "grpo", "beta": 0.5}),
    "rloo": ("rloo", {"beta": 0.0}),
    "rloo-kl": ("rloo", {"beta": 0.5, "num_iterations": 2}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_i03_two_processes_make_the_update_of_one(name, tmp_path):
    algorithm, options = OBJECTIVES[name]
    one = train(algorithm, tmp_path / "one", {**options, "per_device_train_batch_size": 4})
    options = {**options, "per_device_train_batch_size": 2}
    two = run_world(train, tmp_path / "two", algorithm, tmp_path / "two", options)
    assert distance(one["weights"], weights(make_trainer(algorithm, tmp_path))) > 1e-4
    for result in two:
        assert distance(result["weights"], one["weights"]) < 1e-6
