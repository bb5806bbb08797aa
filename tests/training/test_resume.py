"""A run that was saved and resumed is the run that was never interrupted."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from agentrl.errors import ConfigurationError
from agentrl.objectives.aggregation import Denominators
from agentrl.testing.models import tiny_model
from agentrl.training.batching import MicroBatch, collate
from agentrl.training.checkpoints import STATE, InFlight, last_complete, load_in_flight, restored, save_in_flight
from agentrl.training.data import Shape
from agentrl.training.metrics import MetricStore
from agentrl.training.trainer import RolloutTrainer
from agentrl.training.windows import Window
from agentrl.types import Outcome, Task, Trajectory
from tests.training.helpers import TOKENIZER, chat_rows
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

SAVE = {"save_strategy": "steps", "save_steps": 3, "generator": local}
AT, STEPS = 3, 6
"""Where runs are cut, and how long they are."""


class SeededGame:
    """Asks for a number that its seed decides; guessing is a tool. Ends after a guess."""

    def reset(self, seed: int, **_: Any) -> str:
        self.number, self.right = seed % 100, False
        return f"Guess {self.number}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self.right = number == self.number
        return str(self.number)

    def get_reward(self) -> float:
        return self.number / 100


def stream(count: int) -> IterableDataset:
    data = rows(count)
    return IterableDataset.from_generator(lambda: iter(data))


def with_noise(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that draws from the global random states."""
    return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in completion_ids]


class Case(NamedTuple):
    """A run: the algorithm, and how its trainer is made. Two prompts a window, unless the options say otherwise."""

    algorithm: str = "grpo"
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    rows: int = 8
    streamed: bool = False
    environment: bool = False
    adapters: bool = False
    dropout: float = 0.0

    def make(self, folder: Path, **options: Any) -> RolloutTrainer:
        model = small_model(attention_dropout=self.dropout)
        keywords: dict[str, Any] = {}
        if self.adapters:
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        if self.environment:
            keywords = {"environment_factory": SeededGame, "processing_class": TOKENIZER}
            model = tiny_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=1024)
            options = {"dataset": chat_rows(self.rows), **options}
        dataset = stream(self.rows) if self.streamed else rows(self.rows)
        options = {"dataset": dataset, "max_steps": STEPS, **SAVE, **self.options, **options}
        return make_trainer(self.algorithm, folder, model=model, keywords=keywords, **options)


SMALL = {"per_device_train_batch_size": 2}
CASES = {
    # Cut between two windows.
    "shuffled": Case(),
    "stream": Case(rows=4, streamed=True),
    "rloo": Case("rloo", {"beta": 0.1}),
    "environment": Case(environment=True),
    "random rewards": Case(options={"reward": with_noise}),
    # Cut in the middle of one: it is used at steps 3 and 4, or at steps 1 to 4.
    "iterations": Case(options={"num_iterations": 2}),
    "generation": Case(options={**SMALL, "steps_per_generation": 4}),
    "rloo generation": Case("rloo", {**SMALL, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}),
    "stream generation": Case(options={**SMALL, "steps_per_generation": 4}, rows=4, streamed=True),
    "environment generation": Case(options={**SMALL, "steps_per_generation": 4}, environment=True),
    "adapters generation": Case(options={**SMALL, "steps_per_generation": 4, "beta": 0.1}, adapters=True),
    "dropout generation": Case(options={**SMALL, "steps_per_generation": 4, "reward": with_noise}, dropout=0.3),
    "accumulation": Case(
        options={**SMALL, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}
    ),
    "kl": Case(options={**SMALL, "steps_per_generation": 4, "beta": 0.1, "shuffle_dataset": False}),
    # Forked, since a worker with another parent than the killed process would not notice and stay.
    "workers": Case(options={"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}),
}
FAST = ["shuffled", "iterations", "stream generation", "rloo generation", "environment generation"]
FAST += ["dropout generation"]


class Killed(TrainerCallback):
    """Ends the process as a power cut would, when the step after the checkpoint has its rollouts."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(name: str, folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    trainer = CASES[name].make(folder)
    trainer.add_callback(Killed())
    trainer.train()


def kill_one(name: str, folder: Path) -> None:
    """Play a case in another process, which is killed three steps on its way."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.runs", "peft"])
    process = context.Process(target=train_and_die, args=(name, folder, torch.get_num_threads()))
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in CASES])
def test_a_killed_run_goes_on_as_if_it_had_not_been(name, tmp_path):
    """Six steps, or three, `kill -9` and three: the same weights bit for bit, the same logs, no rollout played twice.

    Also in the middle of a window, whose rollouts are those of a policy that is gone.
    """
    whole = CASES[name].make(tmp_path / "whole")
    whole.train()
    kill_one(name, tmp_path / "parts")
    resumed = CASES[name].make(tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    assert distance(weights(whole), weights(CASES[name].make(tmp_path / "new"))) > 1e-3
    assert whole.state.global_step == resumed.state.global_step == STEPS
    ours, theirs = weights(resumed), weights(whole)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    for metric in ("reward", "loss", "grad_norm", "entropy", "num_tokens", "epoch", "learning_rate"):
        assert logged(resumed, metric) == logged(whole, metric), metric
    played = [log["step"] for log in step_logs(whole) if "reward" in log]
    assert played == [log["step"] for log in step_logs(resumed) if "reward" in log]


def test_metrics_that_no_log_has_shown_are_kept(tmp_path):
    """Logged at steps 4 and 8, saved at step 6: the window of steps 5 to 8 is in the second log all the same."""
    case = Case(options={**SMALL, "steps_per_generation": 4, "logging_steps": 4, "save_steps": 6, "max_steps": 8})
    whole = case.make(tmp_path)
    whole.train()
    resumed = case.make(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert len(logged(whole, "reward")) == 2
    for metric in ("reward", "entropy", "rewards/length_and_ids/mean", "num_tokens"):
        assert logged(resumed, metric) == logged(whole, metric), metric


def test_num_tokens_goes_on_after_resuming(tmp_path):
    case = Case(options={**SMALL, "steps_per_generation": 2})
    whole = case.make(tmp_path)
    whole.train()
    resumed = case.make(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    tokens = [value for value in logged(resumed, "num_tokens") if value is not None]
    assert tokens == sorted(set(tokens))
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen == tokens[-1]


def test_l03_each_prompt_is_trained_once_although_workers_read_ahead(tmp_path):
    """Ten prompts, one a step, read three ahead; saved after four, then resumed with a worker that starts anew."""
    options = {**SMALL, "dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, "save_steps": 4}
    seen: list[int] = []

    def reward(row: list[int], **columns: Any) -> list[float]:
        seen.extend(row[::2])
        return length_and_ids(**columns)

    Case(options=options, rows=10).make(tmp_path, max_steps=4, reward=reward).train()
    assert len(seen) == 4
    Case(options=options, rows=10).make(tmp_path, max_steps=10, reward=reward).train(resume_from_checkpoint=True)
    assert sorted(seen) == list(range(10))


def folder_with_checkpoints(folder: Path) -> RolloutTrainer:
    trainer = Case(options={"save_steps": 1, "max_steps": 2, "num_iterations": 2}).make(folder)
    trainer.train()
    return trainer


@pytest.mark.parametrize("damage", ["cut state", "no state", "no share"])
def test_a_checkpoint_that_was_not_written_whole_is_passed_over(damage, tmp_path):
    """As a run leaves it that was killed while it saved."""
    folder_with_checkpoints(tmp_path)
    last = tmp_path / "checkpoint-2"
    if damage == "cut state":
        text = (last / STATE).read_text()
        (last / STATE).write_text(text[: len(text) // 2])
    elif damage == "no state":
        (last / STATE).unlink()
    else:  # of the second of two processes
        shape = Shape(prompts=2, generations=2, steps=1, iterations=2, rank=0, world_size=2)
        save_in_flight(last, InFlight(), shape)
    assert last_complete(tmp_path) == str(tmp_path / "checkpoint-1")
    resumed = Case(options={"max_steps": 2, "num_iterations": 2}).make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert len(step_logs(resumed)) == 2
    assert resumed.state.global_step == 2


def test_without_a_complete_checkpoint_resuming_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no complete checkpoint"):
        make_trainer("grpo", tmp_path).train(resume_from_checkpoint=True)


def test_a_window_in_flight_comes_back_as_it_was(tmp_path):
    """Every field of every micro-batch; L04: also metric names with separators that other readers break lines at."""
    shape = Shape(prompts=2, generations=2, steps=2, iterations=2)
    batches = [whole_batch(offset) for offset in (0, 7)]
    window = Window((3, 1), 4, batches, metrics={}, own_metrics=[], tokens_seen=9)
    metrics = MetricStore()
    metrics.add("a\u2028b\u0085c", 0.1, weight=3)
    metrics.add("max", 7, how="max")
    save_in_flight(tmp_path, InFlight(window, metrics), shape)
    again = load_in_flight(tmp_path, shape)
    assert again.window is not None
    assert (again.window.identity, again.window.rows) == ((3, 1), 4)
    for before, after in zip(batches, again.window.batches, strict=True):
        for spec in fields(MicroBatch):
            old, new = getattr(before, spec.name), getattr(after, spec.name)
            assert type(old) is type(new), spec.name
            assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new, spec.name
    assert again.metrics.reduce(1) == metrics.reduce(1)


def whole_batch(offset: int) -> MicroBatch:
    """A micro-batch whose per-row tensors are views of one, as those of a collected window are."""
    trajectories = [sampled_trajectory(offset + i) for i in range(2)]
    batch = collate(trajectories, pad_token_id=0)
    shared = torch.arange(4.0)
    counts = Denominators(2, batch.tokens, 1, 1)
    return replace(batch, advantages_R=shared[2:], old_logps_N=batch.sampler_logps_N * 2, denominators=counts)


def sampled_trajectory(number: int) -> Trajectory:
    ids = [100 + number, 101, 102][: 2 + number % 2]
    return Trajectory(
        task=Task(group="0", member=0, seed=0, prompt="p", environment=None, columns={}),
        prompt="p",
        prompt_ids=[50, 51],
        completion="",
        completion_ids=ids,
        loss_mask=[1] * len(ids),
        logprobs=[-0.5] * len(ids),
        outcome=Outcome.FINISHED,
        turns=[],
    )


class Place(NamedTuple):
    start: int
    note: str | None = None


@dataclass
class Nested:
    counts: Denominators | None
    places: tuple[Place, ...]
    pair: tuple[int, str]
    name: str = "n"


def test_what_json_flattens_gets_its_types_back():
    value = Nested(Denominators(1, 2, 3, 4), (Place(1), Place(2, "x")), (5, "five"))
    text = json.loads(json.dumps(asdict(value)))
    assert restored(Nested, text) == value
    assert all(type(place) is Place for place in restored(Nested, text).places)


def test_windows_that_are_cut_otherwise_by_now_are_played_again(tmp_path, caplog):
    """A new batch size makes the saved rows useless; the run goes on with the policy of the checkpoint."""
    Case(options={**SMALL, "steps_per_generation": 4, "max_steps": 3}).make(tmp_path).train()
    resumed = Case(options={**SMALL, "steps_per_generation": 8, "max_steps": 4}).make(tmp_path)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "windows are now cut by" in caplog.text
    assert "reward" in step_logs(resumed)[-1]
    assert resumed.state.global_step == 4


def test_a_checkpoint_of_weights_only_is_resumed_from_without_a_window(tmp_path):
    options = {**SMALL, "steps_per_generation": 4, "save_only_model": True}
    Case(options={**options, "max_steps": 3}).make(tmp_path).train()
    assert not list((tmp_path / "checkpoint-3").glob("rollouts-*"))
    resumed = Case(options={**options, "max_steps": 4}).make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert "reward" in step_logs(resumed)[-1]


@pytest.mark.parametrize("at", [2, 4])
def test_l01_a_stream_goes_on_where_it_was_also_in_a_later_pass(at, tmp_path):
    """Four rows are two windows, so steps 3 and 4 are a second pass, and step 5 begins a third."""
    order: list[int] = []

    def reward(row: list[int], **columns: Any) -> list[float]:
        order.extend(row[::2])
        return length_and_ids(**columns)

    options = {"dataset": stream(4), "reward": reward, "save_steps": at}
    whole = Case().make(tmp_path / "whole", **options)
    whole.train()
    Case().make(tmp_path / "parts", max_steps=at, **options).train()
    resumed = Case().make(tmp_path / "parts", **options)
    resumed.train(resume_from_checkpoint=True)
    assert order[:12] == [0, 1, 2, 3] * 3
    assert order[12:] == [0, 1, 2, 3] * 3
    assert distance(weights(whole), weights(resumed)) < 1e-6
    assert logged(resumed, "reward") == logged(whole, "reward")


def test_l01_a_stream_that_does_not_fill_a_window_is_refused(tmp_path):
    trainer = make_trainer("grpo", tmp_path, dataset=stream(1))
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
    first = make_trainer("grpo", tmp_path, max_steps=2, dataset=rows(6), **{**SAVE, "save_steps": 2})
    first.train()
    other = make_trainer("grpo", tmp_path, max_steps=2, dataset=rows(6), model=small_model(seed=1), **SAVE)
    other.args.save_strategy = "no"
    other.train()
    other.args.max_steps = 4
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert max(logged(other, "sampling/sampling_logp_difference/max")) < 1e-4
