"""Dynamic sampling: groups that teach nothing are drawn again, in step, reproducibly and on the books."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDataset

from agentrl.errors import ConfigurationError
from agentrl.training.arguments import GRPOConfig
from agentrl.training.data import Schedule, Shape, make_tasks
from tests.training.runs import distance, logged, make_trainer, rows, weights, whole_and_resumed
from tests.training.worlds import run_world


class Recorder:
    """A reward that is the same for all members of a group, unless the row's number is one of `spread`."""

    def __init__(self, *spread: int) -> None:
        self.spread = spread
        self.rounds: list[list[int]] = []

    def __call__(self, completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        self.rounds.append(row)
        return [float(sum(ids)) if r in self.spread else 1.0 for ids, r in zip(completion_ids, row, strict=True)]


def dynamic(folder: Path, reward: Any, rounds: int = 5, algorithm: str = "grpo", **options: Any) -> Any:
    options = {"dataset": rows(8), "shuffle_dataset": False, "max_steps": 1, "beta": 0.0, **options}
    return make_trainer(algorithm, folder, reward=reward, dynamic_sampling_max_rounds=rounds, **options)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_flat_groups_are_replaced_and_others_kept(algorithm, tmp_path):
    """Window 0 has rows 0 and 1; row 1 spreads and stays. Row 0 makes room for rows until one spreads."""
    reward = Recorder(1, 5)
    trainer = dynamic(tmp_path, reward, algorithm=algorithm, rounds=10)
    trainer.train()
    first, *again = reward.rounds
    assert first == [0, 0, 1, 1]
    assert [len(drawn) for drawn in again] == [2] * len(again)
    drawn = [row for row, _ in again]
    assert drawn[-1] == 5
    assert len(set(drawn)) == len(drawn), "a prompt that taught nothing is not tried twice"
    assert not {0, 1} & set(drawn), "the window's own prompts are not fresh"
    assert logged(trainer, "dynamic_sampling/rounds") == [len(again)]
    assert logged(trainer, "dynamic_sampling/groups_redrawn") == [len(again)]
    assert logged(trainer, "frac_reward_zero_std") == [0.0]


def test_nothing_that_was_played_leaves_the_books(tmp_path):
    """Tokens of replaced rows are counted, and a reward over all that was played is logged."""
    reward = Recorder(1, 5)
    trainer = dynamic(tmp_path, reward, rounds=10)
    trainer.train()
    calls = trainer.collector.generator.calls
    assert len(calls) == sum(map(len, reward.rounds)) > 4
    assert logged(trainer, "num_tokens") == [sum(len(call.ids) + len(call.sample.ids) for call in calls)]
    numbers = [row for drawn in reward.rounds for row in drawn]
    values = [float(sum(call.sample.ids)) if row in (1, 5) else 1.0 for call, row in zip(calls, numbers, strict=True)]
    assert logged(trainer, "dynamic_sampling/reward") == [pytest.approx(sum(values) / len(values))]
    kept = [value for value, row in zip(values, numbers, strict=True) if row in (1, 5)]
    assert logged(trainer, "reward") == [pytest.approx(sum(kept) / 4)]


def test_it_stops_after_the_stated_rounds_with_full_rows(tmp_path):
    """H14: when nothing spreads the step still runs, with a loss of 0."""
    reward = Recorder()
    trainer = dynamic(tmp_path, reward, rounds=2)
    trainer.train()
    assert [len(drawn) for drawn in reward.rounds] == [4, 4, 4]
    assert logged(trainer, "dynamic_sampling/rounds") == [2]
    assert logged(trainer, "dynamic_sampling/groups_redrawn") == [4]
    assert logged(trainer, "frac_reward_zero_std") == [1.0]
    assert logged(trainer, "loss") == [0.0]


def test_it_is_off_by_default(tmp_path):
    reward = Recorder()
    trainer = make_trainer("grpo", tmp_path, reward=reward, dataset=rows(8), max_steps=2)
    trainer.train()
    assert [len(drawn) for drawn in reward.rounds] == [4, 4]
    assert logged(trainer, "dynamic_sampling/rounds") == [None, None]


def test_new_groups_have_seeds_and_names_of_their_own():
    shape = Shape(prompts=2, generations=2, steps=2)
    schedule = Schedule(rows(5), shape, seed=3, shuffle=True)
    step = schedule[0]
    tasks = make_tasks(step, shape, seed=7)
    for number in (1, 2):
        tasks += make_tasks(schedule.redraw(step.window, [1], number), shape, seed=7, redraw=number)
    assert [task.group for task in tasks] == ["0.0.0"] * 2 + ["0.0.1"] * 2 + ["0.0.1.1"] * 2 + ["0.0.1.2"] * 2
    assert len({task.seed for task in tasks}) == 4
    assert len({task.columns["row"] for task in tasks}) == 4


def test_a_small_dataset_gives_its_prompts_again():
    shape = Shape(prompts=2, generations=2, steps=2)
    schedule = Schedule(rows(2), shape, seed=3, shuffle=True)
    again = schedule.redraw((0, 0), [0, 1], 1)
    assert sorted(row["row"] for row in again.rows.values()) == [0, 1]


def test_the_order_of_windows_is_not_touched(tmp_path):
    """Windows take the rows that they would have taken without."""
    reward = Recorder(0, 5)
    dynamic(tmp_path, reward, rounds=3, max_steps=4).train()
    windows = [[first, first, first + 1, first + 1] for first in (0, 2, 4, 6)]
    assert [drawn for drawn in reward.rounds if drawn in windows] == windows


def test_a_resumed_run_draws_the_same_prompts(tmp_path):
    options = {"dataset": rows(8), "reward": Recorder(1, 2, 6), "dynamic_sampling_max_rounds": 3, "at": 2, "steps": 4}
    whole, resumed = whole_and_resumed(tmp_path, **options)
    assert sum(logged(whole, "dynamic_sampling/rounds")) > 0
    for name in ("dynamic_sampling/rounds", "reward", "num_tokens"):
        assert logged(resumed, name) == logged(whole, name)
    assert distance(weights(whole), weights(resumed)) == 0.0


def test_what_functions_log_stays_with_its_row(tmp_path):
    """A replaced row takes its columns of `log_extra` and its reward with it."""

    def reward(completion_ids: list[list[int]], row: list[int], log_extra: Any, **_: Any) -> list[float]:
        log_extra("row", row)
        return [float(sum(ids)) if r in (1, 5) else 1.0 for ids, r in zip(completion_ids, row, strict=True)]

    trainer = dynamic(tmp_path, reward, rounds=10, log_completions=True)
    windows = []
    collect = trainer.collector.collect
    trainer.collector.collect = lambda *a, **k: windows.append(collect(*a, **k)) or windows[-1]
    trainer.train()
    log = windows[0].log
    assert log.extra["row"] == [5, 5, 1, 1]
    assert log.prompts == [f"prompt {'x' * (row % 3)}{row}" for row in (5, 5, 1, 1)]


def test_only_the_groups_without_a_spread_are_played_again(tmp_path):
    """Should those few fail, that is judged over the last rollouts (`FailureWindow`), not over the few."""
    trainer = dynamic(tmp_path, Recorder(1), rounds=1)
    asked = []
    run = trainer.collector.engine.run
    trainer.collector.engine.run = lambda tasks: asked.append(len(tasks)) or run(tasks)
    trainer.train()
    assert asked == [4, 2]


def train_spanning(folder: Path) -> dict[str, Any]:
    """Groups of 4 over processes with 4 rows each: position 1 spans both, only process 0 has position 0."""
    reward = Recorder(1, 5)
    trainer = dynamic(folder, reward, rounds=10, per_device_train_batch_size=6, num_generations=4, dataset=rows(12))
    trainer.train()
    return {
        "rank": int(os.environ["RANK"]),
        "rounds": [sorted(set(drawn)) for drawn in reward.rounds],
        "logs": {name: logged(trainer, name) for name in ("dynamic_sampling/rounds", "reward", "num_tokens")},
    }


@pytest.mark.slow
def test_processes_stay_in_step_when_only_one_has_rows_to_draw(tmp_path):
    """Three groups of four over two processes: the middle one spans both and spreads, so each redraws its own."""
    first, second = run_world(train_spanning, tmp_path, tmp_path)
    assert first["logs"] == second["logs"]
    assert first["rounds"][0] == [0, 1]
    assert second["rounds"][0] == [1, 2]
    assert first["logs"]["dynamic_sampling/rounds"][0] > 0


def test_it_needs_a_dataset_with_a_length(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(rows(8)))
    with pytest.raises(ConfigurationError, match=r"dynamic_sampling_max_rounds=2.*length"):
        dynamic(tmp_path, Recorder(), rounds=2, dataset=stream)


def test_a_negative_number_of_rounds_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"^dynamic_sampling_max_rounds=-1"):
        GRPOConfig(str(tmp_path), dynamic_sampling_max_rounds=-1)
