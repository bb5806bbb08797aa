"""The entropy bonus in training: its update, its coefficient, its metrics, and how they survive a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.errors import ConfigurationError
from agentrl.training.arguments import GRPOConfig
from agentrl.training.trainer import RolloutTrainer
from tests.training.runs import distance, logged, make_trainer, rows, small_model, weights, whole_and_resumed
from tests.training.worlds import run_world

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 1}
ADAPTIVE: dict[str, Any] = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.04}


def flat(completions: list[str], **_: Any) -> list[float]:
    """No advantage anywhere: what moves the weights is the bonus alone."""
    return [1.0] * len(completions)


def mean_entropy(model: Any, trainer: RolloutTrainer) -> Tensor:
    """Entropy of a sampled token over all rows that were played, from full logits, by a loop over tokens."""
    terms = []
    for call in trainer.collector.generator.calls:  # type: ignore[attr-defined]
        logits = model(torch.tensor([[*call.ids, *call.sample.ids]])).logits[0]
        for position in range(len(call.ids), len(call.ids) + len(call.sample.ids)):
            p = logits[position - 1].softmax(-1)
            terms.append(-(p * p.log()).sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize(
    ("loss_type", "batch"), [("dapo", 4), ("dr_grpo", 1), ("grpo", 2), ("bnpo", 1)], ids=lambda value: str(value)
)
def test_the_update_is_that_of_the_mean_entropy_of_the_step(loss_type, batch, tmp_path):
    """I05: whatever the loss type divides by and however ragged rows are cut into micro-batches."""
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
    trainer = make_trainer(
        "grpo", tmp_path, reward=flat, entropy_coef=0.7, loss_type=loss_type, beta=0.0, **SGD, **options
    )
    trainer.train()
    model = small_model()
    entropy = mean_entropy(model, trainer)
    (-0.7 * entropy).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    assert distance(weights(trainer), dict(model.state_dict())) < 1e-6
    [policy], [loss] = logged(trainer, "policy_loss"), logged(trainer, "loss")
    assert policy == pytest.approx(0.0, abs=1e-7)
    assert loss == pytest.approx(-0.7 * entropy.item(), abs=1e-5)
    assert logged(trainer, "entropy_coef") == [0.7]


def test_without_a_bonus_its_metrics_are_missing(tmp_path):
    trainer = make_trainer("grpo", tmp_path, max_steps=1)
    trainer.train()
    assert logged(trainer, "policy_loss") == logged(trainer, "entropy_coef") == [None]


def adapted(entropies: list[float], target: float, coefficient: float, delta: float) -> list[float]:
    """The rule as documented, step by step."""
    path = []
    for entropy in entropies:
        coefficient = min(coefficient + delta, 0.2) if entropy <= target else max(coefficient - delta, 0.05)
        path.append(coefficient)
    return path


def train_adaptive(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    trainer = make_trainer("grpo", folder, dataset=rows(8), **options)
    trainer.train()
    return {name: logged(trainer, name) for name in ("entropy_coef", "entropy")} | {"weights": weights(trainer)}


BOUNDED = {**ADAPTIVE, **SGD, "max_steps": 4, "entropy_coef_min": 0.05, "entropy_coef_max": 0.2}
BATCH = {"per_device_train_batch_size": 4}


def test_the_coefficient_follows_the_exact_entropy_of_the_step(tmp_path):
    """I05: over micro-batches with different numbers of tokens. The target lies between the steps."""
    seen = train_adaptive(tmp_path, {**BOUNDED, **BATCH, "entropy_target": 100.0})["entropy"]
    options = {**BOUNDED, "entropy_target": sorted(seen)[1]}
    one = train_adaptive(tmp_path, {**options, **BATCH})
    assert one["entropy_coef"] == pytest.approx(adapted(one["entropy"], options["entropy_target"], 0.1, 0.04))
    assert len({round(coefficient, 6) for coefficient in one["entropy_coef"]}) > 2
    split = train_adaptive(tmp_path, {**options, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4})
    assert split["entropy_coef"] == pytest.approx(one["entropy_coef"])
    assert distance(split["weights"], one["weights"]) < 1e-5


@pytest.mark.slow
def test_two_processes_have_the_coefficient_of_one(tmp_path):
    """I03."""
    options = {**BOUNDED, "entropy_target": 100.0}
    one = train_adaptive(tmp_path / "one", {**options, **BATCH})
    split = {**options, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    for process in run_world(train_adaptive, tmp_path / "two", tmp_path / "two", split):
        assert process["entropy_coef"] == pytest.approx(one["entropy_coef"])
        assert process["entropy"] == pytest.approx(one["entropy"], abs=1e-5)
        assert distance(process["weights"], one["weights"]) < 1e-5


def test_it_is_applied_only_at_or_below_the_target(tmp_path):
    """Not in the first step either, for which nothing is measured yet."""
    before = weights(make_trainer("grpo", tmp_path))
    for target, steps, moves in [(0.0, 3, False), (100.0, 1, False), (100.0, 2, True)]:
        trainer = make_trainer(
            "grpo", tmp_path, reward=flat, entropy_target=target, **{**ADAPTIVE, **SGD, "max_steps": steps}
        )
        trainer.train()
        assert (distance(weights(trainer), before) > 1e-6) == moves


def test_the_coefficient_is_saved_and_restored(tmp_path):
    whole, resumed = whole_and_resumed(tmp_path, at=2, steps=4, entropy_target=100.0, **ADAPTIVE)
    assert logged(whole, "entropy_coef") == pytest.approx([0.14, 0.18, 0.22, 0.26])
    assert logged(resumed, "entropy_coef")[2:] == logged(whole, "entropy_coef")[2:]
    assert distance(weights(whole), weights(resumed)) == 0.0


def test_evaluation_shows_the_policy_loss_and_leaves_the_coefficient(tmp_path):
    """L06."""
    trainer = make_trainer(
        "grpo",
        tmp_path,
        keywords={"eval_dataset": rows(2)},
        per_device_eval_batch_size=4,
        **ADAPTIVE,
        entropy_target=100.0,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_policy_loss"] == pytest.approx(metrics["eval_loss"]), "nothing is measured yet"
    assert "eval_entropy_coef" not in metrics
    trainer.train()
    bonus = trainer.regularization.entropy_bonus
    state = bonus.coefficient, bonus.measured
    metrics = trainer.evaluate()
    assert (bonus.coefficient, bonus.measured) == state
    assert metrics["eval_loss"] == pytest.approx(
        metrics["eval_policy_loss"] - bonus.coefficient * metrics["eval_entropy"], abs=1e-5
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("entropy_coef", {"entropy_coef": math.inf}),
        ("entropy_coef", {"entropy_coef": 2.0, "use_adaptive_entropy": True}),
        ("entropy_coef_min", {"entropy_coef_min": 2.0}),
        ("entropy_coef_delta", {"entropy_coef_delta": -1.0}),
    ],
)
def test_wrong_values_are_refused_by_name(name, options, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        GRPOConfig(str(tmp_path), **options)
