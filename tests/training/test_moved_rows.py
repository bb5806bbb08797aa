"""Rows move among the micro-batches and the processes of an optimizer step, which learns the same from them."""

from __future__ import annotations

import dataclasses
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from agentrl.training.batching import collate
from agentrl.training.windows import TrainingRow
from agentrl.types import Outcome, Task, Trajectory
from tests.training.runs import distance, make_trainer, step_logs, weights
from tests.training.worlds import run_world

SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "shuffle_dataset": False}


def ragged(count: int) -> Dataset:
    """Prompts whose lengths differ by far more than completions do, the long ones first."""
    return Dataset.from_dict({"prompt": ["x" * (4 + 60 * (i % 4 < 2)) for i in range(count)], "row": [*range(count)]})


def train(algorithm: str, folder: Path, options: dict[str, Any], *, kept: bool = False) -> dict[str, Any]:
    """Train, and tell which rows, numbered over all processes, each window's micro-batches were made of."""
    trainer = make_trainer(algorithm, folder, dataset=ragged(8), **SGD, **options)
    arranger: Any = trainer.collector.arranger
    plan = arranger.plan
    plans: list[list[list[int]]] = []

    def note(records: Any, mine: slice, size: int, batches: int, together: int) -> list[list[int]]:
        plans.append(plan(records, mine, size, batches, 0 if kept else together))
        return plans[-1]

    arranger.plan = note
    trainer.train()
    return {"weights": weights(trainer), "plans": plans, "logs": step_logs(trainer)}


OBJECTIVES = [
    ("grpo", {"loss_type": "dapo", "beta": 0.1}),
    ("rloo", {"beta": 0.5, "num_iterations": 2}),
    pytest.param("grpo", {"loss_type": "grpo"}, marks=pytest.mark.slow),
    pytest.param("grpo", {"loss_type": "dr_grpo", "num_iterations": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("algorithm", "options"), OBJECTIVES, ids=str)
def test_rows_move_between_processes_and_the_update_stays(algorithm, options, tmp_path):
    """The first process plays the long prompts, and hands rows over."""
    one = train(algorithm, tmp_path / "one", {**options, "per_device_train_batch_size": 8}, kept=True)
    split = {**options, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    two = run_world(train, tmp_path / "two", algorithm, tmp_path / "two", split)
    assert distance(one["weights"], weights(make_trainer(algorithm, tmp_path))) > 1e-4
    for first, second in zip(two[0]["plans"], two[1]["plans"], strict=True):
        assert sorted(chain.from_iterable(first + second)) == list(range(8))
        assert set(chain.from_iterable(first)) != {0, 1, 2, 3}
    for result in two:
        assert distance(result["weights"], one["weights"]) < 1e-6
        for ours, whole in zip(result["logs"], one["logs"], strict=True):
            for name in ("loss", "reward", "entropy", "kl", "completions/mean_length"):
                assert ours.get(name) == pytest.approx(whole.get(name), abs=2e-5), name


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_rows_stay_in_their_optimizer_step(algorithm, tmp_path):
    """A window of 4 micro-batches for optimizer steps of 2; sorted by length only within each."""
    options = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
    result = train(algorithm, tmp_path, options)
    assert len(result["plans"]) == 1
    for plan in result["plans"]:
        assert sorted(chain.from_iterable(plan[:2])) == [0, 1, 2, 3]
        assert sorted(chain.from_iterable(plan[2:])) == [4, 5, 6, 7]


@pytest.mark.parametrize("option", [{"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}], ids=str)
def test_losses_that_look_at_whole_micro_batches_keep_them(option, tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **option}
    assert train("grpo", tmp_path, options)["plans"] == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2


def test_what_training_does_not_read_stays_in_its_process():
    task = Task("group", 0, 0, prompt="p", columns={"handle": open})
    generator = (i for i in range(3))  # which cannot be pickled
    trajectory = Trajectory(task, "p", [1], "c", [2], [1], [-0.5], Outcome.FINISHED, environment=generator)
    row = TrainingRow(dataclasses.replace(trajectory, extra={"handle": generator}), True)
    handed = pickle.loads(pickle.dumps(row.for_another_process()))
    batches = [collate([r.trajectory], pad_token_id=0, trained=[r.trained]) for r in (row, handed)]
    assert batches[0].input_ids.tolist() == batches[1].input_ids.tolist()
    assert batches[0].target_ids_N.tolist() == batches[1].target_ids_N.tolist() == [2]
