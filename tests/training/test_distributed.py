"""Two processes learn what one process would, log the same everywhere and never wait for each other in vain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import (
    distance,
    first_fast,
    length_and_ids,
    logged,
    make_trainer,
    rows,
    step_logs,
    untimed,
    weights,
)
from tests.training.worlds import run_world

SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


def train(algorithm: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, which may be one of several, and tell what happened."""
    seen: list[list[str]] = []

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        seen.append(prompts)
        return length_and_ids(**columns)

    trainer = make_trainer(algorithm, folder, reward=reward, dataset=rows(8), **SGD, **options)
    advantages = []
    note = trainer.reports.add
    trainer.reports.add = lambda window, **which: (  # type: ignore[method-assign]
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
    "rloo-kl": ("rloo", {"beta": 0.5, "num_iterations": 2}),
    "grpo": ("grpo", {"loss_type": "grpo"}),
    "dr_grpo": ("grpo", {"loss_type": "dr_grpo"}),
    "grpo-kl": ("grpo", {"loss_type": "grpo", "beta": 0.5}),
    "rloo": ("rloo", {"beta": 0.0}),
}


@pytest.mark.parametrize("name", first_fast(OBJECTIVES, 2))
def test_i03_two_processes_make_the_update_of_one(name, tmp_path):
    algorithm, options = OBJECTIVES[name]
    one = train(algorithm, tmp_path / "one", {**options, "per_device_train_batch_size": 4})
    options = {**options, "per_device_train_batch_size": 2}
    two = run_world(train, tmp_path / "two", algorithm, tmp_path / "two", options)
    assert distance(one["weights"], weights(make_trainer(algorithm, tmp_path))) > 1e-4
    for result in two:
        assert distance(result["weights"], one["weights"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_i05_accumulation_makes_the_update_of_one_batch(batch, tmp_path):
    one = train("grpo", tmp_path / "one", {"per_device_train_batch_size": 4})
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
    split = train("grpo", tmp_path / "split", options)
    assert distance(split["weights"], one["weights"]) < 1e-6
    for ours, whole in zip(split["logs"], one["logs"], strict=True):
        assert ours["loss"] == pytest.approx(whole["loss"], abs=1e-6)
        assert ours["reward"] == pytest.approx(whole["reward"], abs=1e-6)
    if batch == 1:
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        for result in run_world(train, tmp_path / "two", "grpo", tmp_path / "two", options):
            assert distance(result["weights"], one["weights"]) < 1e-6
            assert [log["loss"] for log in result["logs"]] == pytest.approx(
                [log["loss"] for log in one["logs"]], abs=1e-6
            )


def expected_advantages(rewards: list[float], generations: int) -> list[float]:
    """GRPO's, spelled out."""
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, generations)
    scaled = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return scaled.flatten().tolist()


def train_spanning(folder: Path) -> dict[str, Any]:
    """Groups of 4 over processes with 2 rows each."""
    rank = int(os.environ["RANK"])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [[0.0, 1.0], [5.0, -2.0]][rank]

    trainer = make_trainer("grpo", folder, reward=reward, per_device_train_batch_size=2, num_generations=4, max_steps=1)
    collect = trainer.collector.collect
    windows = []
    trainer.collector.collect = lambda *a, **k: windows.append(collect(*a, **k)) or windows[-1]  # type: ignore[method-assign,func-returns-value]
    trainer.train()
    tasks = {call.params.seed for call in trainer.collector.generator.calls}  # type: ignore[attr-defined]
    return {"advantages": windows[0].batches[0].advantages_R.tolist(), "logs": step_logs(trainer), "seeds": tasks}


def test_a_group_that_spans_processes_has_one_baseline(tmp_path):
    first, second = run_world(train_spanning, tmp_path, tmp_path)
    assert first["advantages"] + second["advantages"] == pytest.approx(
        expected_advantages([0.0, 1.0, 5.0, -2.0], 4), abs=1e-5
    )
    assert first["logs"][0]["reward"] == pytest.approx(1.0)
    assert first["logs"][0]["reward_std"] == pytest.approx(2.9439, abs=1e-4)
    assert first["logs"][0]["frac_reward_zero_std"] == 0.0
    assert not first["seeds"] & second["seeds"], "members of one group drew the same tokens"


def train_asymmetric(folder: Path) -> dict[str, Any]:
    """Log a metric on one rank only, then more often on the other."""
    rank, calls = int(os.environ["RANK"]), []

    def reward(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        calls.append(None)
        for value in {(0, 1): [1.0], (1, 2): [0.0, 0.0], (0, 2): [1.0]}.get((rank, len(calls)), []):
            log_metric("m", value)
        if rank == 1:
            log_metric("mine", 7.0)
        return [0.0, 1.0]

    trainer = make_trainer("grpo", folder, reward=reward, per_device_train_batch_size=2)
    trainer.train()
    return {"logs": step_logs(trainer)}


def test_k02_a_metric_on_one_rank_does_not_hang_and_means_are_over_values(tmp_path):
    for result in run_world(train_asymmetric, tmp_path, tmp_path):
        assert [log["m"] for log in result["logs"]] == pytest.approx([1.0, 1 / 3])
        assert [log["mine"] for log in result["logs"]] == [7.0, 7.0]


def test_metrics_are_equal_on_both_ranks_and_to_one_process(tmp_path):
    options = {"loss_type": "grpo", "beta": 0.1}
    one = train("grpo", tmp_path / "one", {**options, "per_device_train_batch_size": 4})["logs"]
    options["per_device_train_batch_size"] = 2
    first, second = (result["logs"] for result in run_world(train, tmp_path, "grpo", tmp_path, options))
    assert first == second
    for ours, whole in zip(first, one, strict=True):
        assert ours.keys() == whole.keys()
        for name in untimed(ours):
            assert ours[name] == pytest.approx(whole[name], abs=2e-5), name


def train_masked(folder: Path, options: dict[str, Any], unscored: list[int], count: int = 2) -> dict[str, Any]:
    """Train on two prompts of which some get no reward."""

    def reward(row: list[int], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        values = length_and_ids(completion_ids)
        return [None if r in unscored else value for r, value in zip(row, values, strict=True)]

    keywords = {"reward": reward, "dataset": rows(count), "shuffle_dataset": False}
    trainer = make_trainer("grpo", folder, **keywords, **SGD, **options)
    trainer.train()
    return {"weights": weights(trainer), "logs": step_logs(trainer)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_i09_a_rank_without_trained_rows_takes_part(checkpointing, tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_checkpointing": checkpointing, "max_steps": 1}
    alone = train_masked(tmp_path / "one", options, [], 1)
    first, second = run_world(train_masked, tmp_path / "two", tmp_path / "two", options, [1])
    assert first["logs"] == second["logs"]
    assert first["logs"][0].keys() == alone["logs"][0].keys()
    assert first["logs"][0]["loss"] == pytest.approx(alone["logs"][0]["loss"], abs=1e-6)
    assert first["logs"][0]["entropy"] == pytest.approx(alone["logs"][0]["entropy"], abs=1e-5)
    for result in (first, second):
        assert distance(result["weights"], alone["weights"]) < 1e-6


def test_i09_a_micro_batch_without_trained_rows_changes_nothing(tmp_path):
    options = {"per_device_train_batch_size": 2, "max_steps": 1}
    alone = train_masked(tmp_path / "one", options, [], 1)
    for unscored, count in (([1], 2), ([1, 2, 3], 4)):
        accumulated = {**options, "gradient_accumulation_steps": count}
        masked = train_masked(tmp_path / "two", accumulated, unscored, count)
        assert distance(masked["weights"], alone["weights"]) < 1e-6
        assert masked["logs"][0]["loss"] == pytest.approx(alone["logs"][0]["loss"], abs=1e-6)


def test_i09_a_step_without_any_trained_row_leaves_the_weights(tmp_path):
    options = {"per_device_train_batch_size": 2, "max_steps": 1}
    nothing = train_masked(tmp_path, {**options, "beta": 0.1}, [0], 1)
    assert nothing["logs"][0]["loss"] == 0.0
    assert nothing["logs"][0]["grad_norm"] == 0.0
    assert distance(nothing["weights"], weights(make_trainer("grpo", tmp_path))) == 0.0


@pytest.mark.slow
def test_processes_play_consecutive_slices_of_each_window(tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}
    one = train("grpo", tmp_path / "one", {**options, "per_device_train_batch_size": 4})["prompts"]
    first, second = (r["prompts"] for r in run_world(train, tmp_path / "two", "grpo", tmp_path / "two", options))
    assert len(first) == len(second) == len(one) == 2
    for mine, others, whole in zip(first, second, one, strict=True):
        assert mine + others == whole
        assert mine[0::2] == mine[1::2], "the members of a group are neighbours"
    assert one[0] != one[1]
    ordered = run_world(train, tmp_path / "three", "grpo", tmp_path / "three", {**options, "shuffle_dataset": False})
    prompts = [prompt for prompt in rows(8)["prompt"] for _ in range(2)]
    assert [r["prompts"] for r in ordered] == [[prompts[0:4], prompts[8:12]], [prompts[4:8], prompts[12:16]]]


def train_logging_completions(folder: Path) -> list[str]:
    """The prompts and the advantages in the table of completions."""
    trainer = make_trainer(
        "grpo", folder, per_device_train_batch_size=2, max_steps=1, log_completions=True, shuffle_dataset=False
    )
    collect = trainer.collector.collect
    windows = []
    trainer.collector.collect = lambda *a, **k: windows.append(collect(*a, **k)) or windows[-1]  # type: ignore[method-assign,func-returns-value]
    trainer.train()
    return windows[0].log.prompts


def test_the_table_of_completions_has_each_row_once_in_order(tmp_path):
    expected = [prompt for prompt in rows(2)["prompt"] for _ in range(2)]
    assert run_world(train_logging_completions, tmp_path, tmp_path) == [expected, expected]


def evaluate_few(folder: Path) -> dict[str, Any]:
    """Evaluate 3 rows in windows of 2: in the last one the second process has nothing to play."""
    keywords = {"eval_dataset": rows(3)}
    trainer = make_trainer(
        "grpo", folder, keywords=keywords, per_device_train_batch_size=2, per_device_eval_batch_size=2
    )
    return trainer.evaluate()


def test_k03_a_process_without_rows_in_the_last_evaluation_window(tmp_path):
    first, second = run_world(evaluate_few, tmp_path, tmp_path)
    timing = {name for name in first if "per_second" in name or "time" in name}
    assert {k: v for k, v in first.items() if k not in timing} == {k: v for k, v in second.items() if k not in timing}
    options = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    one = make_trainer("grpo", tmp_path, keywords={"eval_dataset": rows(3)}, **options).evaluate()
    for name in first.keys() - timing:
        assert first[name] == pytest.approx(one[name], abs=1e-5), name


def train_and_evaluate(folder: Path, batch: int) -> dict[str, Any]:
    """Two steps with an evaluation of 3 rows after each."""
    trainer = make_trainer(
        "grpo",
        folder,
        keywords={"eval_dataset": rows(3)},
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        eval_strategy="steps",
        eval_steps=1,
        **SGD,
    )
    trainer.train()
    names = ("eval_reward", "eval_loss", "eval_entropy", "eval_completions/mean_length")
    logs = [[log[name] for name in names] for log in trainer.state.log_history if "eval_reward" in log]
    return {"weights": weights(trainer), "logs": logs}


def test_two_processes_evaluate_between_steps(tmp_path):
    one = train_and_evaluate(tmp_path / "one", 4)
    assert len(one["logs"]) == 2
    for result in run_world(train_and_evaluate, tmp_path / "two", tmp_path / "two", 2):
        assert distance(result["weights"], one["weights"]) < 1e-6
        for ours, whole in zip(result["logs"], one["logs"], strict=True):
            assert ours == pytest.approx(whole, abs=2e-5)


def train_and_resume(folder: Path) -> list[Any]:
    """Train 4 steps, of which the last 2 once more from a checkpoint; all with Adam."""
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2, "dataset": rows(6)}
    whole = make_trainer("grpo", folder / "whole", **options, max_steps=4)
    whole.train()
    resumed = make_trainer("grpo", folder / "whole", **options, max_steps=4)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    return [distance(weights(whole), weights(resumed)), logged(whole, "reward")[2:], logged(resumed, "reward")[2:]]


@pytest.mark.slow
def test_a_resumed_run_of_two_processes_goes_on_where_it_was(tmp_path):
    for difference, expected, rewards in run_world(train_and_resume, tmp_path, tmp_path):
        assert difference < 1e-6
        assert rewards == expected
