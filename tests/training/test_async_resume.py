"""What was played ahead outlives the run: nothing finished is lost with a checkpoint, nothing is trained twice."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.training.data import Shape
from agentrl.training.draws import Draw
from agentrl.training.finished import FinishedRow, load_finished, save_finished
from agentrl.training.metrics import make_record
from agentrl.types import Task
from tests.training.helpers import TOKENIZER, chat_rows
from tests.training.runs import length_and_ids, local, logged, make_trainer, rows, step_logs, weights, whole_and_resumed
from tests.training.test_async import Buttons, Stop, Unhurried, calling, chat_model, spanning_trajectory
from tests.waiting import wait_until

SHAPE = Shape(prompts=2, generations=2, steps=1)


def finished_row(member: int = 0) -> FinishedRow:
    """A rollout in two rows, with text that other readers break lines at (L04), and what functions logged of it."""
    trajectory = spanning_trajectory()
    trajectory.task = Task("0.1.0", member, 5, "p", {"row": 3}, "game")
    trajectory.completion = [{"role": "assistant", "content": "a\u2028b"}]
    trajectory.logprobs[5] = -2.5
    trajectory.forks = [trajectory.rows[0]]
    return FinishedRow(trajectory, [0.5, None], make_record(trajectory, [0.5, None]), {"note": "n", "list": [1]})


def test_finished_rollouts_come_back_as_they_were(tmp_path):
    row = finished_row()
    save_finished(tmp_path, [row, finished_row(1)], SHAPE)
    save_finished(tmp_path, [finished_row(2)], replace(SHAPE, rank=1))
    again = load_finished(tmp_path, SHAPE)
    assert list(again) == [("0.1.0", member) for member in range(3)]
    assert again["0.1.0", 0].of(row.trajectory.task) == row


def test_groups_of_other_sizes_are_played_again(tmp_path, caplog):
    """Their names mean other prompts by now."""
    save_finished(tmp_path, [finished_row()], SHAPE)
    with caplog.at_level(logging.WARNING):
        assert load_finished(tmp_path, replace(SHAPE, generations=4)) == {}
    assert "played again" in caplog.text


def test_a_rollout_that_is_no_json_is_left_out_and_named(tmp_path, caplog):
    picture = finished_row()
    picture.trajectory.completion = [{"role": "user", "content": [{"type": "image", "image": object()}]}]
    save_finished(tmp_path, [picture, finished_row(1)], SHAPE)
    assert list(load_finished(tmp_path, SHAPE)) == [("0.1.0", 1)]
    assert "a finished rollout of group 0.1.0 is not saved" in caplog.text


def test_draws_are_joined_row_by_row():
    draws = [Draw.of([finished_row(member)]) for member in range(3)]
    draws[1].own_metrics.append(("m", 1.0))
    joined = Draw.join(3, [([2], draws[0]), ([0, 1], Draw.of(draws[1].rows() + draws[2].rows()))])
    assert [t.task.member for t in joined.trajectories] == [1, 2, 0]
    assert joined.columns == {"note": ["n"] * 3, "list": [[1]] * 3}


class Slow(Buttons):
    """Rollouts of rows 3 and 5 go on once the door is open; notes which rows were played."""

    door = threading.Event()
    played: list[int] = []  # noqa: RUF012 - each test empties it

    def reset(self, seed: int, row: int, **_: Any) -> str:
        self.row = row
        return super().reset(seed)

    async def press(self) -> str:
        """Press the button."""
        if self.row in (3, 5):
            await asyncio.to_thread(self.door.wait, 60)
        self.count += 1
        self.played.append(self.row)
        return "pressed"


def test_l03_what_has_ended_is_saved_and_not_played_again(tmp_path):
    """Two windows ahead of a checkpoint, of whose rollouts half have ended: each row is trained once."""
    rewarded: list[int] = []

    def reward(row: list[int], environments: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        assert all(instance.row == r for instance, r in zip(environments, row, strict=True))
        rewarded.extend(row)
        log_extra("which", row)
        log_metric("rewarded", len(row))
        return [float(r) for r in row]

    class Saving(Stop):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and not Slow.door.is_set():
                wait_until(lambda: Slow.played.count(2) == Slow.played.count(4) == 2)  # they have ended
                control.should_save = control.should_training_stop = True

    def trainer() -> Any:
        return make_trainer(
            "async_grpo", tmp_path, max_staleness=2, max_steps=5, shuffle_dataset=False, max_completion_length=120,
            generator=calling(), dataset=chat_rows(10, row=list(range(10))), reward=reward, model=chat_model(),
            save_strategy="steps", save_steps=50, log_completions=True, num_completions_to_print=0,
            keywords={"environment_factory": Slow, "processing_class": TOKENIZER, "callbacks": [Saving("request")]},
        )  # fmt: skip

    Slow.door.clear()
    Slow.played.clear()
    first = trainer()
    first.train()
    assert sorted(Slow.played) == [0, 0, 1, 1, 2, 2, 4, 4]
    assert sorted(rewarded) == [0, 0, 1, 1, 2, 2, 4, 4]
    Slow.door.set()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert sorted(Slow.played) == sorted(rewarded) == [row for row in range(10) for _ in range(2)]
    assert logged(resumed, "rewards/reward/mean") == [0.5, 2.5, 4.5, 6.5, 8.5]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["async_grpo", "async_rloo"])
def test_a_resumed_run_trains_each_prompt_once_in_order(algorithm, tmp_path):
    """With the real generator, saved at each step, resumed in the middle."""
    options = {"max_staleness": 2, "generator": local, "dataset": rows(12), "save_strategy": "steps", "save_steps": 1}
    trained: list[list[int]] = []

    def make(steps: int) -> Any:
        trainer = make_trainer(algorithm, tmp_path, max_steps=steps, **options)
        collect = trainer.collector._take

        def take(identity: Any, tasks: list[Task]) -> Any:
            trained.append([task.columns["row"] for task in tasks[::2]])
            return collect(identity, tasks)

        trainer.collector._take = take
        Unhurried(trainer)
        return trainer

    make(6).train()
    whole, trained = trained, []
    trainer = make(6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trained == whole[3:]
    assert max(logged(trainer, "async/staleness/max")[3:]) == 2
    assert len(step_logs(trainer)) == 6


@pytest.mark.slow
def test_with_staleness_0_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole, resumed = whole_and_resumed(
        tmp_path, algorithm="async_grpo", at=3, steps=6, max_staleness=0, num_iterations=2, reward=length_and_ids
    )
    ours, theirs = weights(resumed), weights(whole)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert logged(resumed, "loss") == logged(whole, "loss")
