"""A run that was saved and resumed is the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDataset

from agentrl.training.trainer import RolloutTrainer
from tests.training.runs import (
    distance,
    first_fast,
    length_and_ids,
    local,
    logged,
    make_trainer,
    rows,
    small_model,
    step_logs,
    weights,
)

SAVE = {"save_strategy": "steps", "save_steps": 2, "generator": local}


def whole_and_resumed(
    folder: Path, *, algorithm: str = "grpo", at: int = 2, steps: int = 4, **options: Any
) -> tuple[RolloutTrainer, RolloutTrainer]:
    """Train in one go; train again up to a checkpoint, and the rest with a new trainer that resumes from it."""
    options = {"dataset": rows(6), **SAVE, "save_steps": at, **options}
    whole = make_trainer(algorithm, folder / "whole", max_steps=steps, **options)
    whole.train()
    make_trainer(algorithm, folder / "parts", max_steps=at, **options).train()
    resumed = make_trainer(algorithm, folder / "parts", max_steps=steps, **options)
    resumed.train(resume_from_checkpoint=True)
    return whole, resumed


CASES = {
    "plain": ("grpo", {}),
    "accumulation": ("grpo", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "iterations": ("grpo", {"num_iterations": 2}),
    "kl": ("grpo", {"beta": 0.1}),
    "rloo": ("rloo", {"beta": 0.1}),
    "several steps a generation": ("grpo", {"per_device_train_batch_size": 2, "steps_per_generation": 2}),
    "ordered": ("grpo", {"shuffle_dataset": False}),
    "workers": ("grpo", {"dataloader_num_workers": 1}),
}


@pytest.mark.parametrize("case", first_fast(CASES, 3))
def test_a_resumed_run_is_the_uninterrupted_one(case, tmp_path):
    """Six prompts, two a window: the epoch ends inside the resumed half (or, with two uses, at the end)."""
    algorithm, options = CASES[case]
    whole, resumed = whole_and_resumed(tmp_path, algorithm=algorithm, **options)
    assert distance(weights(whole), weights(make_trainer(algorithm, tmp_path))) > 1e-3
    assert distance(weights(whole), weights(resumed)) < 1e-6
    for name in ("reward", "loss", "num_tokens", "epoch", "learning_rate"):
        assert logged(resumed, name) == pytest.approx(logged(whole, name), abs=1e-6), name
    assert len(set(logged(whole, "reward"))) > 2, "the rewards would not show a difference"


def test_num_tokens_goes_on_after_resuming(tmp_path):
    whole, resumed = whole_and_resumed(tmp_path)
    tokens = logged(resumed, "num_tokens")
    assert tokens == sorted(set(tokens)) == logged(whole, "num_tokens")
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen == tokens[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 2, "steps_per_generation": 4},
        pytest.param({"num_iterations": 3}, marks=pytest.mark.slow),
        pytest.param(
            {"per_device_train_batch_size": 2, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_window_that_was_cut_by_the_checkpoint_is_played_again(options, tmp_path):
    """With the policy of the checkpoint; its prompts stay the same, and the steps already taken are not repeated."""
    played: list[list[int]] = []

    def reward(row: list[int], **columns: Any) -> list[float]:
        played.append(row)
        return length_and_ids(**columns)

    whole, resumed = whole_and_resumed(tmp_path, reward=reward, steps=4, at=2, **options)
    once = len(played) // 2
    assert whole.state.global_step == resumed.state.global_step == 4
    del played[:]
    again = make_trainer("grpo", tmp_path / "parts", max_steps=4, dataset=rows(6), reward=reward, **SAVE, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert 1 <= len(played) <= once
    assert distance(weights(again), weights(resumed)) < 1e-6, "resuming twice gives the same run"
    assert all("loss" in log and "reward" in log for log in step_logs(again)[2:3])
    assert len(step_logs(again)) == 4


def numbered(count: int) -> IterableDataset:
    data = rows(count)
    return IterableDataset.from_generator(lambda: iter(data))


@pytest.mark.parametrize("at", [2, 4])
def test_l01_a_stream_goes_on_where_it_was_also_in_a_later_pass(at, tmp_path):
    """Four rows are two windows, so steps 3 and 4 are a second pass, and step 5 begins a third."""
    order: list[int] = []

    def reward(row: list[int], **columns: Any) -> list[float]:
        order.extend(row[::2])
        return length_and_ids(**columns)

    whole, resumed = whole_and_resumed(tmp_path, at=at, steps=6, dataset=numbered(4), reward=reward)
    assert order[:12] == [0, 1, 2, 3] * 3
    assert order[12:] == [0, 1, 2, 3] * 3
    assert distance(weights(whole), weights(resumed)) < 1e-6
    assert logged(resumed, "reward") == logged(whole, "reward")


def test_l01_a_stream_that_does_not_fill_a_window_is_refused(tmp_path):
    trainer = make_trainer("grpo", tmp_path, dataset=numbered(1))
    with pytest.raises(Exception, match=r"1 rows.*takes 2 prompts"):
        trainer.train()


def test_a_second_training_does_not_reuse_the_rollouts_of_the_first(tmp_path):
    """Window (0, 0) of the second run is another one than that of the first: the weights differ."""
    played: list[list[str]] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        played.append(completions)
        return length_and_ids(**columns)

    trainer = make_trainer("grpo", tmp_path, dataset=rows(2), reward=reward, generator=local, max_steps=1)
    trainer.train()
    trainer.train()
    assert len(played) == 2
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_a_second_training_does_not_log_what_the_first_left(tmp_path):
    trainer = make_trainer("grpo", tmp_path, reward=lambda completions, **_: [1.0] * 4, logging_steps=2, max_steps=3)
    trainer.train()
    trainer.collector.rewards.functions[0].function = lambda **_: [0.0] * 4
    trainer.train()
    assert logged(trainer, "reward")[-1:] == [0.0]


def test_training_from_a_checkpoint_samples_with_its_weights(tmp_path):
    """The generator must not go on with keys and values of other weights of the same step number."""
    first = make_trainer("grpo", tmp_path, max_steps=2, dataset=rows(6), **SAVE)
    first.train()
    other = make_trainer("grpo", tmp_path, max_steps=2, dataset=rows(6), model=small_model(seed=1), **SAVE)
    other.args.save_strategy = "no"
    other.train()
    other.args.max_steps = 4
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert max(logged(other, "sampling/sampling_logp_difference/max")) < 1e-4
