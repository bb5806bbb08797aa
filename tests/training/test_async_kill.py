"""An asynchronous run that was killed with `kill -9` goes on with what it had played, also ahead of itself."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from agentrl.rollout.journal import writer
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.journal.records import RolloutSummary, State
from agentrl.training.trainer import RolloutTrainer
from agentrl.training.windows import drawn_before
from agentrl.types import Task, Trajectory
from tests.training.runs import length_and_ids, logged, make_trainer, rows, weights
from tests.training.test_async import own_weights, spanning_trajectory
from tests.waiting import wait_until

SAVED, KILLED, STEPS = 3, 5, 7
"""Optimizer steps, one window each, at the last checkpoint, at the kill, and at the end."""
STALENESS = 1


def run(folder: Path, **options: Any) -> RolloutTrainer:
    """A trainer of text, with the real generator. It plays the window of the next step while a step is made."""
    defaults: dict[str, Any] = {
        "max_staleness": STALENESS,
        "max_steps": STEPS,
        "dataset": rows(2 * STEPS),
        "generator": own_weights,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "shuffle_dataset": False,
    }
    return make_trainer("async_grpo", folder, **{**defaults, **options})


class Killed(TrainerCallback):
    """Kills the process when what is played ahead has ended, and keeps the weights that it had."""

    trainer: RolloutTrainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == KILLED:
            ahead = self.trainer.collector._ahead  # type: ignore[attr-defined]
            wait_until(lambda: all(window.play.future.done() for window in ahead.values()))
            torch.save(weights(self.trainer), Path(args.output_dir) / "weights.pt")
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    callback = Killed()
    callback.trainer = run(folder, keywords={"callbacks": [callback]})
    callback.trainer.train()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.test_async_kill"])
    process = context.Process(target=train_and_die, args=(folder, torch.get_num_threads()))
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == -signal.SIGKILL
    return folder


def played(folder: Path) -> list[RolloutSummary]:
    with Records(folder) as records:
        return records.summaries(kind="train", superseded=True)


class Taken:
    """Notes the weights when training is where it was killed, and what each window was trained on."""

    def __init__(self, trainer: RolloutTrainer) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.versions: list[set[int]] = []
        collector = trainer.collector
        take = collector._take

        def look(identity: Any, tasks: list[Task]) -> Any:
            if trainer.state.global_step == KILLED:
                self.weights.append(weights(trainer))
            draw = take(identity, tasks)
            self.versions.append({v for t in draw.trajectories for turn in t.turns for v in turn.versions})
            return draw

        collector._take = look  # type: ignore[method-assign]


def resumed(folder: Path, **options: Any) -> tuple[RolloutTrainer, Taken]:
    trainer = run(folder, **options)
    taken = Taken(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    return trainer, taken


def test_what_a_killed_run_has_played_ahead_is_not_played_again(killed, tmp_path):
    """`kill -9`, two steps after the checkpoint: trained again from the same rollouts, the weights are the same.

    So what the lost weights drew is as stale as its versions say. Each rollout is played once.
    """
    folder = shutil.copytree(killed, tmp_path / "run")
    before = played(folder)
    assert {(s.step, s.state) for s in before} == {(step, State.ENDED) for step in range(KILLED + 1)}
    trainer, taken = resumed(folder)
    after = played(folder)
    assert after[: len(before)] == [s for s in before if s.step < SAVED] + [
        s for s in after if SAVED <= s.step <= KILLED
    ]
    assert {s.step for s in after[len(before) :]} == set(range(KILLED + 1, STEPS))
    assert len(after) == 4 * STEPS
    expected = torch.load(killed / "weights.pt", weights_only=True)
    assert [key for key, value in taken.weights[0].items() if not torch.equal(value, expected[key])] == []
    assert all(versions <= {step - 1, step} for step, versions in enumerate(taken.versions, SAVED))
    assert max(logged(trainer, "async/staleness/max")) <= STALENESS


def other_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Not that of the killed run."""
    return [-reward for reward in length_and_ids(completion_ids, **columns)]


def test_what_other_weights_drew_is_as_stale_as_the_setting_allows_or_played_again(killed, tmp_path):
    """The resumed run learns otherwise, say from a mended reward.

    What it would have started at its checkpoint counts as having waited for it, and no token of that as fresh, whatever
    its version: here one that the lost weights of step 4 are said to have drawn. All further windows are played again.
    """
    folder = shutil.copytree(killed, tmp_path / "run")
    (folder / f"checkpoint-{SAVED}" / "finished-0.jsonl").unlink()  # which has the first window, with its old reward
    before = len(played(folder))
    with writer.open_for_writing(folder / "_rollouts.db") as database:
        windows = f"SELECT id FROM windows WHERE step = {SAVED + 1}"
        rollouts = f"SELECT id FROM rollouts WHERE window IN ({windows})"
        database.execute(f"UPDATE turns SET weights_version = {SAVED + 1} WHERE rollout IN ({rollouts})")
    _, taken = resumed(folder, reward=other_reward)
    assert {s.step for s in played(folder)[before:]} == set(range(SAVED + STALENESS + 1, STEPS))
    assert taken.versions[1] == {SAVED}


def test_what_became_too_stale_by_another_setting_is_played_again(killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    before = len(played(folder))
    trainer, _ = resumed(folder, max_staleness=0)
    assert {s.step for s in played(folder)[before:]} == set(range(SAVED, STEPS))
    assert logged(trainer, "async/staleness/max")[SAVED:] == [0] * (STEPS - SAVED)


def test_no_token_from_before_a_kill_is_fresh():
    """Its ratio is then the one against its recorded logprob, see `mark_stale`."""
    trajectory: Trajectory = spanning_trajectory()
    older = drawn_before(trajectory, 5)
    assert [turn.versions for turn in trajectory.turns] == [[3, 3, 5], [4]]
    assert [turn.versions for turn in older.turns] == [[3, 3, 4], [4]]
    assert drawn_before(trajectory, 6) == trajectory


def half_flat(row: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rows of even numbers teach nothing."""
    return [0.0 if r % 2 == 0 else reward for r, reward in zip(row, length_and_ids(completion_ids), strict=True)]


def test_groups_that_were_drawn_again_are_not_played_again(tmp_path):
    """They belong to their window, though it was opened twice."""
    options = {"reward": half_flat, "dynamic_sampling_max_rounds": 2, "max_steps": 4, "save_steps": 1}
    first = run(tmp_path, **options)
    first.train()
    assert all(logged(first, "dynamic_sampling/groups_redrawn"))
    before = played(tmp_path)
    second = run(tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [s.id for s in played(tmp_path)] == [s.id for s in before]
    ours, theirs = weights(second), weights(first)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
