"""Evaluation plays its own rows with its own group size and leaves training as it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from transformers import EarlyStoppingCallback

from agentrl.errors import ConfigurationError
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import EOS
from agentrl.training.trainer import RolloutTrainer
from tests.training.runs import (
    distance,
    length_and_ids,
    local,
    logged,
    make_trainer,
    rows,
    small_model,
    step_logs,
    weights,
)

EVERY_2 = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}


def evaluations(trainer: RolloutTrainer) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if any(name.startswith("eval_") for name in log)]


class Played:
    """A reward that notes the rows of each call."""

    __name__ = "played"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.calls.append(prompts)
        return length_and_ids(completion_ids)


def test_l06_each_mode_logs_its_own_metrics(tmp_path):
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=lambda prompts, **_: [5.0 if "unseen" in prompt else 1.0 for prompt in prompts],
        keywords={"eval_dataset": Dataset.from_dict({"prompt": ["unseen"]})},
        num_generations_eval=4,
        per_device_eval_batch_size=4,
        **EVERY_2,
    )
    trainer.train()
    assert [(log["step"], log["eval_reward"]) for log in evaluations(trainer)] == [(2, 5.0), (4, 5.0)]
    assert [(log["step"], log["reward"]) for log in step_logs(trainer)] == [(s, 1.0) for s in (1, 2, 3, 4)]
    assert not any("reward" in log for log in evaluations(trainer))
    assert not any(name.startswith("eval") for log in step_logs(trainer) for name in log)
    assert logged(trainer, "num_tokens") == sorted(logged(trainer, "num_tokens"))
    assert "eval_num_tokens" not in evaluations(trainer)[0]


def test_l06_evaluation_uses_its_own_group_size(tmp_path):
    reward = Played()
    options = {"num_generations": 4, "num_generations_eval": 2, "per_device_eval_batch_size": 2}
    keywords = {"eval_dataset": Dataset.from_dict({"prompt": ["unseen"]})}
    trainer = make_trainer("grpo", tmp_path, reward=reward, keywords=keywords, **options, **EVERY_2)
    trainer.train()
    assert [len(call) for call in reward.calls if call[0] == "unseen"] == [2, 2]
    assert [len(call) for call in reward.calls if call[0] != "unseen"] == [4, 4, 4, 4]


def test_l06_training_goes_on_in_training_mode_and_unchanged(tmp_path):
    """A run that evaluates learns what one that does not would; dropout stays active in training only."""
    modes: list[tuple[bool, bool]] = []

    def trained(name: str, **options: Any) -> RolloutTrainer:
        keywords = {"eval_dataset": rows(3)} if options else {}
        trainer = make_trainer("grpo", tmp_path / name, keywords=keywords, generator=local, **options, max_steps=4)
        compute_loss = trainer.compute_loss

        def noting(model: Any, inputs: Any, **rest: Any) -> Any:
            modes.append((model.training, torch.is_grad_enabled()))
            return compute_loss(model, inputs, **rest)

        trainer.compute_loss = noting  # type: ignore[method-assign]
        trainer.train()
        return trainer

    plain = trained("plain")
    modes.clear()
    evaluated = trained("evaluated", eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2)
    assert modes == ([(True, True)] * 2 + [(False, False)] * 3) * 2
    assert distance(weights(plain), weights(evaluated)) < 1e-6
    assert logged(plain, "reward") == logged(evaluated, "reward")


def test_l07_evaluate_before_train_is_not_divided_by_accumulation(tmp_path):
    """With a loss of 1 for each token; the trainer has made no step that could tell it how many to divide by."""
    keywords = {"eval_dataset": rows(4)}
    options = {"gradient_accumulation_steps": 4, "per_device_eval_batch_size": 4}
    trainer = make_trainer("grpo", tmp_path, keywords=keywords, **options)
    trainer.loss = lambda scores, batch, counts, metrics: (  # type: ignore[method-assign]
        (scores.logps_N * 0 + 1.0).sum() * counts.world_size / counts.tokens
    )
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(1.0)
    assert math.isfinite(metrics["eval_reward"])
    assert trainer.state.log_history[-1]["eval_loss"] == pytest.approx(1.0)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_l07_evaluate_then_train_then_evaluate(algorithm, tmp_path):
    keywords = {"eval_dataset": rows(3)}
    options = {"per_device_eval_batch_size": 2, "generator": local, "gradient_accumulation_steps": 2, "beta": 0.1}
    trainer = make_trainer(algorithm, tmp_path, keywords=keywords, **options)
    before = trainer.evaluate()
    again = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_reward"] == again["eval_reward"]
    assert before["eval_loss"] == again["eval_loss"]
    assert after["eval_reward"] != before["eval_reward"]
    assert after["eval_sampling/sampling_logp_difference/max"] < 1e-4
    assert after.keys() >= {"eval_loss", "eval_reward", "eval_reward_std", "eval_completions/mean_length", "epoch"}


@pytest.mark.parametrize("own", [False, True])
def test_evaluation_samples_with_the_weights_that_the_model_has(own, tmp_path):
    """Also when they were changed by hand between two evaluations, and with a generator that the caller made."""
    model = small_model()
    generator = local(model) if own else local
    trainer = make_trainer("grpo", tmp_path, model=model, keywords={"eval_dataset": rows(2)}, generator=generator)
    trainer.evaluate()
    trainer.model.load_state_dict(small_model(seed=3).state_dict())
    assert trainer.evaluate()["eval_sampling/sampling_logp_difference/max"] < 1e-4


class Listening(ScriptedGenerator):
    """Notes what it is told of the weights, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [197, 198, EOS])
        self.told: list[int] = []
        self.closed = 0

    def sync(self, weights_version: int) -> None:
        self.told.append(weights_version)

    def close(self) -> None:
        self.closed += 1


def test_the_generator_is_told_when_the_weights_may_have_changed(tmp_path):
    """Once a step, and at each call of the user: in between, weights may have been loaded. Closing is the maker's."""
    generator = Listening()
    keywords = {"eval_dataset": rows(4)}
    trainer = make_trainer("grpo", tmp_path, keywords=keywords, generator=generator, per_device_eval_batch_size=4)
    trainer.evaluate()
    trainer.evaluate()
    assert generator.told == [0, 0]
    trainer.train()
    assert generator.told == [0, 0, 0, 1]
    trainer.evaluate()
    assert generator.told == [0, 0, 0, 1, 2]
    assert generator.closed == 0


@pytest.mark.parametrize("options", [{}, {"scale_rewards": "batch"}])
def test_h02_one_generation_in_evaluation(options, tmp_path):
    values = iter([[0.3, 0.9]])
    keywords = {"eval_dataset": rows(2)}
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=lambda completions, **_: next(values),
        keywords=keywords,
        num_generations_eval=1,
        per_device_eval_batch_size=2,
        **options,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(0.6)
    assert metrics["eval_reward_std"] == pytest.approx(0.424264, abs=1e-5)
    assert metrics["eval_frac_reward_zero_std"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_h02_one_row_with_one_generation(tmp_path):
    for algorithm in ("grpo", "rloo"):
        options = {"num_generations_eval": 1, "per_device_eval_batch_size": 1}
        trainer = make_trainer(algorithm, tmp_path, keywords={"eval_dataset": rows(1)}, **options)
        metrics = trainer.evaluate()
        assert metrics["eval_reward_std"] == 0.0
        assert metrics["eval_loss"] == 0.0
        assert all(math.isfinite(value) for value in metrics.values())


def test_several_datasets_by_name(tmp_path):
    easy, hard = Dataset.from_dict({"prompt": ["easy"]}), Dataset.from_dict({"prompt": ["hard", "hard too"]})
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=lambda prompts, **_: [2.0 if prompt == "easy" else -1.0 for prompt in prompts],
        keywords={"eval_dataset": {"easy": easy, "hard": hard}},
        per_device_eval_batch_size=4,
        metric_for_best_model="eval_hard_reward",
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=2,
        **EVERY_2,
    )
    trainer.train()
    assert [log["eval_easy_reward"] for log in evaluations(trainer) if "eval_easy_reward" in log] == [2.0, 2.0]
    assert [log["eval_hard_reward"] for log in evaluations(trainer) if "eval_hard_reward" in log] == [-1.0, -1.0]
    assert trainer.state.best_metric == -1.0
    assert trainer.evaluate(hard, metric_key_prefix="other")["other_reward"] == -1.0
    assert trainer.evaluate({"mine": easy})["eval_mine_reward"] == 2.0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_dataset_dict_is_several_datasets_by_name(streamed, tmp_path):
    """Rows of a stream are all played too, each set under its own prefix, at each evaluation during training."""
    splits = DatasetDict({"easy": rows(1), "hard": rows(3)})
    if streamed:
        splits = IterableDatasetDict({name: split.to_iterable_dataset() for name, split in splits.items()})
    played: list[int] = []

    def reward(row: list[int], prompts: list[str], **_: Any) -> list[float]:
        played.extend(row)
        return [float(r) for r in row]

    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=reward,
        keywords={"eval_dataset": splits},
        per_device_eval_batch_size=2,
        num_generations_eval=1,
        **{**EVERY_2, "max_steps": 2},
    )
    trainer.train()
    [easy], [hard] = ([log for log in evaluations(trainer) if f"eval_{n}_reward" in log] for n in splits)
    assert (easy["eval_easy_reward"], hard["eval_hard_reward"]) == (0.0, 1.0)
    assert played[-4:] == [0, 0, 1, 2]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_row_is_played_and_counts_alike(count, tmp_path):
    """Windows of two prompts: with an odd number of rows the last one holds a single prompt."""
    played: list[int] = []

    def reward(row: list[int], **_: Any) -> list[float]:
        played.extend(row)
        return [float(r == count - 1) for r in row]

    options = {"per_device_eval_batch_size": 4}
    trainer = make_trainer("grpo", tmp_path, reward=reward, keywords={"eval_dataset": rows(count)}, **options)
    metrics = trainer.evaluate()
    assert played == [row for row in range(count) for _ in range(2)]
    assert metrics["eval_reward"] == pytest.approx(1 / count)
    completions = metrics["eval_samples_per_second"] * metrics["eval_runtime"]
    assert completions == pytest.approx(2 * count, rel=0.2)


def test_evaluation_plays_other_episodes_than_training(tmp_path):
    """The same prompt at the same place: seeds of training must not come back in evaluation."""
    trainer = make_trainer(
        "grpo", tmp_path, dataset=rows(2), keywords={"eval_dataset": rows(2)}, shuffle_dataset=False, max_steps=1
    )
    trainer.train()
    generator = trainer.collector.generator
    trained = {call.params.seed for call in generator.calls}  # type: ignore[attr-defined]
    count = len(generator.calls)  # type: ignore[attr-defined]
    trainer.evaluate()
    calls = trainer.collector.generator.calls  # type: ignore[attr-defined]
    evaluated = {call.params.seed for call in (calls[count:] if len(calls) > count else calls)}
    assert len(trained) == len(evaluated) == 4
    assert not trained & evaluated


def reward_by_step(values: dict[int, float]) -> Any:
    def reward(prompts: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if prompts[0] == "unseen":
            return [values[trainer_state.global_step]] * len(prompts)
        return [float(i) for i in range(len(prompts))]

    return reward


def test_the_best_model_is_loaded_at_the_end_by_reward(tmp_path):
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=reward_by_step({1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}),
        keywords={"eval_dataset": Dataset.from_dict({"prompt": ["unseen"]})},
        generator=local,
        metric_for_best_model="eval_reward",
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
        per_device_eval_batch_size=2,
        **{**EVERY_2, "eval_steps": 1},
    )
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(0.9)
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    best = make_trainer("grpo", tmp_path, model=type(trainer.model).from_pretrained(tmp_path / "checkpoint-2"))
    assert distance(weights(trainer), weights(best)) == 0.0
    assert trainer.state.global_step == 4
    trainer.collector.rewards.functions[0].function = lambda prompts, **_: [1.0] * len(prompts)
    assert trainer.evaluate()["eval_sampling/sampling_logp_difference/max"] < 1e-4, "sampled from the last weights"


def test_training_stops_early_by_reward(tmp_path):
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=reward_by_step({1: 0.5, 2: 0.4, 3: 0.3, 4: 0.9}),
        keywords={
            "eval_dataset": Dataset.from_dict({"prompt": ["unseen"]}),
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
        },
        metric_for_best_model="eval_reward",
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
        per_device_eval_batch_size=2,
        **{**EVERY_2, "eval_steps": 1},
    )
    trainer.train()
    assert trainer.state.global_step == 3


def test_the_group_size_of_a_stand_alone_evaluation_is_checked(tmp_path):
    options = {"num_generations_eval": 3, "per_device_eval_batch_size": 4}
    trainer = make_trainer("grpo", tmp_path, keywords={"eval_dataset": rows(2)}, **options)
    with pytest.raises(ConfigurationError, match="num_generations_eval=3"):
        trainer.evaluate()


def test_predict_plays_a_test_set(tmp_path):
    trainer = make_trainer("grpo", tmp_path, per_device_eval_batch_size=4)
    metrics = trainer.predict(rows(3)).metrics
    assert metrics["test_reward"] == pytest.approx(
        make_trainer("grpo", tmp_path, keywords={"eval_dataset": rows(3)}, per_device_eval_batch_size=4).evaluate()[
            "eval_reward"
        ]
    )


class Door:
    """Opens with any text; counts its openings and closings."""

    made: list[Door] = []  # noqa: RUF012 - shared by all on purpose

    def __init__(self) -> None:
        self.resets = self.closings = 0
        Door.made.append(self)

    def reset(self, **_: Any) -> None:
        self.resets += 1

    def get_reward(self) -> float:
        return float(self.resets)

    def close(self) -> None:
        self.closings += 1


def test_environments_are_closed_after_training_and_after_evaluation(tmp_path):
    Door.made = []
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"q{i}"}] for i in range(4)]})
    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=None,
        dataset=chats,
        keywords={"eval_dataset": chats, "environment_factory": Door},
        per_device_eval_batch_size=4,
        **EVERY_2,
    )
    trainer.evaluate()
    trainer.train()
    trained = len(Door.made)
    assert all(door.closings == 1 for door in Door.made)
    metrics = trainer.evaluate()
    assert len(Door.made) > trained
    assert all(door.closings == 1 for door in Door.made)
    assert metrics["eval_rewards/Door/mean"] >= 1.0
