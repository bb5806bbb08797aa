"""A run that was killed while it collected goes on from its journal, and is the run that was never interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigurationError
from agentrl.generation.base import SamplingParams
from agentrl.rollout.journal import writer
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.journal.records import RolloutRecord, RolloutSummary, State
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.training.trainer import RolloutTrainer
from agentrl.viewer.index import Index
from tests.training.helpers import TOKENIZER, chat_rows
from tests.training.runs import local, logged, make_trainer, rows, weights

STEPS, SAVED = 4, 2
"""Optimizer steps, one window each, and after how many there is a checkpoint."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Presses:
    """Counts presses. Its answers depend on its seed and the calls, as its author promises."""

    replayable = True
    deadly: int | None = None  # the call that kills the process, counted over all instances
    calls = 0

    def reset(self, seed: int, **_: Any) -> str:
        self.count = seed % 7
        return f"{self.count}"

    def press(self, times: int) -> str:
        """Press the button.

        Args:
            times: How often.
        """
        type(self).calls += 1
        if type(self).calls == self.deadly:
            die()
        self.count += times
        return f"pressed {self.count}"

    def get_reward(self) -> float:
        return float(self.count % 5)


class Forgetful(Presses):
    """Promises to do the same again, and does not."""

    resets = 0

    def reset(self, seed: int, **_: Any) -> str:
        type(self).resets += 1
        return super().reset(seed)

    def press(self, times: int) -> str:
        """Press the button.

        Args:
            times: How often.
        """
        return super().press(times) + f" in a world of {os.getpid()}"


class Unpromising(Presses):
    replayable = False


class Turns(ScriptedGenerator):
    """Calls or answers by the turn's seed alone; the turn of number `deadly` kills the process."""

    def __init__(self, deadly: int | None = None) -> None:
        self.deadly = deadly
        super().__init__(self._play)

    def _play(self, session: str, ids: list[int], params: SamplingParams) -> list[int]:
        if len(self.calls) + 1 == self.deadly:
            die()
        draw = random.Random(params.seed)
        text = f"I am done, {draw.randrange(10)}."
        if draw.random() < 0.7:
            arguments = json.dumps({"name": "press", "arguments": {"times": draw.randrange(9)}})
            text = f"<tool_call>\n{arguments}\n</tool_call>"
        return TOKENIZER.encode(text + "<|im_end|>")


def seen(environments: list[Any], **_: Any) -> list[float]:
    """A reward that needs the instance as it was at the end of its episode."""
    return [environment.count / 10 for environment in environments]


def game(folder: Path, generator: Any, environment: type = Presses, **options: Any) -> RolloutTrainer:
    model = tiny_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=1024)
    keywords = {"environment_factory": environment, "processing_class": TOKENIZER}
    settings = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS, "max_completion_length": 900}
    settings |= {"reward": None, "dataset": chat_rows(8), "generator": generator, "keywords": keywords}
    return make_trainer("grpo", folder, model=model, **{**settings, **options})


def break_commit(number: int) -> None:
    """Kill the process in the middle of a transaction of the journal, which holds its n-th entry."""
    original, count = writer._File.run, 0

    def run(self: Any, jobs: list[Any]) -> list[Any]:
        nonlocal count
        count += len(jobs)
        if count >= number:
            jobs = [*jobs, lambda connection: die()]
        return original(self, jobs)

    writer._File.run = run  # type: ignore[method-assign]


def play_and_die(folder: Path, moment: str, number: int, options: dict[str, Any], threads: int) -> None:
    torch.set_num_threads(threads)
    if moment == "commit":
        break_commit(number)
    environment = options.get("environment", Presses)
    environment.deadly = number if moment == "tool" else None
    game(folder, lambda _: Turns(number if moment == "sample" else None), **options).train()


def kill(folder: Path, moment: str, number: int, **options: Any) -> None:
    """Train in another process until it is killed at its n-th sample, tool call or commit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.test_journal_resume", "peft"])
    arguments = (folder, moment, number, options, torch.get_num_threads())
    process = context.Process(target=play_and_die, args=arguments)
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == -signal.SIGKILL


def turns_kept(folder: Path, first_step: int = SAVED) -> int:
    with Records(folder) as records:
        return sum(s.turns for s in records.summaries(kind="train") if s.step >= first_step)


def resume(folder: Path, **options: Any) -> tuple[RolloutTrainer, int]:
    """Resume; gives back the trainer and how many turns it sampled."""
    generator = Turns()
    trainer = game(folder, generator, **options)
    trainer.train(resume_from_checkpoint=True)
    return trainer, len(generator.calls)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RolloutTrainer, Path]:
    folder = tmp_path_factory.mktemp("whole")
    trainer = game(folder, Turns())
    trainer.train()
    return trainer, folder


def assert_same(resumed: RolloutTrainer, whole: RolloutTrainer) -> None:
    ours, theirs = weights(resumed), weights(whole)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    for metric in ("reward", "loss", "grad_norm", "entropy", "num_tokens", "completions/mean_length"):
        assert logged(resumed, metric) == logged(whole, metric), metric


def played(folder: Path) -> list[Any]:
    """What a journal says was played, in order of tasks."""
    with Records(folder) as records:
        return [[(r.sample.ids, r.turn.row) for r in rollout.turns] for rollout in by_task(records)]


def by_task(records: Records) -> list[RolloutRecord]:
    summaries = sorted(records.summaries(kind="train"), key=lambda s: (s.step, s.group, s.member))
    return list(records.rollouts(summaries))


SLOW = [
    (m, n) for m, numbers in {"sample": (10, 36, 58), "tool": (6, 42), "commit": (12, 100)}.items() for n in numbers
]


@pytest.mark.parametrize(
    ("moment", "number"),
    [("sample", 45), ("commit", 82), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_run_killed_while_it_collects_goes_on_from_its_journal(moment, number, whole, tmp_path):
    """`kill -9` between turns, within a commit or a tool: the same weights bit for bit, no finished turn sampled twice.

    With the low numbers there is no checkpoint yet, and the run begins again with what its journal holds.
    """
    trainer, folder = whole
    kill(tmp_path, moment, number)
    first = SAVED if list(tmp_path.glob("checkpoint-*")) else 0
    before = turns_kept(tmp_path, first)
    resumed, sampled = resume(tmp_path)
    assert before > 0 or moment == "commit"
    assert sampled + before == turns_kept(folder, first)
    assert played(tmp_path) == played(folder)
    if first:
        assert_same(resumed, trainer)
    else:
        assert [key for key, value in weights(resumed).items() if not torch.equal(value, weights(trainer)[key])] == []


def states(folder: Path) -> list[RolloutSummary]:
    with Records(folder) as records:
        return records.summaries(kind="train", superseded=True)


def test_an_environment_that_does_not_do_the_same_again_is_found_out(tmp_path, caplog):
    """It promised to be replayable; its rollout starts again, and nothing is trained on a state that never was."""
    kill(tmp_path, "sample", 6, environment=Forgetful)
    resume(tmp_path, environment=Forgetful)
    assert "is played again from its beginning: turn 0: press(" in caplog.text
    assert State.SUPERSEDED in {summary.state for summary in states(tmp_path)}


def test_without_the_promise_unfinished_rollouts_start_again_and_finished_ones_are_kept(tmp_path):
    kill(tmp_path, "sample", 14, environment=Unpromising)
    before = states(tmp_path)
    resume(tmp_path, environment=Unpromising)
    after = {summary.id: summary.state for summary in states(tmp_path)}
    ended = [summary.id for summary in before if summary.state is State.ENDED]
    assert ended
    assert {after[number] for number in ended} == {State.ENDED}
    unfinished = [summary.id for summary in before if summary.state is not State.ENDED]
    assert {after[number] for number in unfinished} == {State.SUPERSEDED}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [Presses, Unpromising])
def test_reward_functions_get_the_environments_of_finished_rollouts(environment, tmp_path):
    """Rebuilt where the environment allows it; else the rollout is played again."""
    reference = game(tmp_path / "whole", Turns(), environment, reward=seen)
    reference.train()
    kill(tmp_path, "sample", 45, environment=environment, reward=seen)
    resumed, _ = resume(tmp_path, environment=environment, reward=seen)
    assert_same(resumed, reference)


def test_other_weights_or_settings_use_nothing_of_the_journal(tmp_path):
    kill(tmp_path, "sample", 9)
    before = {summary.id for summary in states(tmp_path)}
    _, sampled = resume(tmp_path, temperature=0.9, max_steps=1, save_strategy="no")
    assert sampled == sum(summary.turns for summary in states(tmp_path) if summary.id not in before) > 0


def test_a_run_that_begins_anew_uses_nothing_of_the_journal(tmp_path):
    kill(tmp_path, "sample", 9)
    generator = Turns()
    game(tmp_path, generator, max_steps=1, save_strategy="no").train()
    with Records(tmp_path) as records:
        assert [run.id for run in records.runs()] == [1, 2]
        assert len(generator.calls) == sum(summary.turns for summary in records.summaries(run=2))
        info = records.runs()[1].info
    assert (info["algorithm"], info["config"]["max_steps"]) == ("GRPO", 1)


def test_the_local_generator_samples_the_same_tokens_again(tmp_path):
    """Rows decode in another batch after the resume, which rounds logprobs otherwise; tokens and weights are equal."""
    options = {"generator": local, "dataset": rows(8), "max_steps": 2, "save_strategy": "no", "temperature": 0.7}
    reference = make_trainer("grpo", tmp_path / "whole", **options)
    reference.train()
    first = make_trainer("grpo", tmp_path / "parts", **options)
    first.train()
    with writer.open_for_writing(tmp_path / "parts" / "_rollouts.db") as database:  # as if killed in the second window
        database.execute("UPDATE rollouts SET state = 'playing', outcome = NULL, \"limit\" = NULL WHERE id IN (6, 7)")
        database.execute("DELETE FROM turns WHERE rollout IN (6, 7)")
    resumed = make_trainer("grpo", tmp_path / "parts", **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, reference)
    with Records(tmp_path / "parts") as records, Records(tmp_path / "whole") as others:
        kept, expected = by_task(records), by_task(others)
        assert len(kept) == 8
        for ours, theirs in zip(kept, expected, strict=True):
            assert [t.sample.ids for t in ours.turns] == [t.sample.ids for t in theirs.turns]
            for mine, its in zip(ours.turns, theirs.turns, strict=True):
                assert mine.sample.logprobs == pytest.approx(its.sample.logprobs, abs=1e-5)


def test_rewards_and_advantages_are_kept(whole):
    _, folder = whole
    with Records(folder) as records:
        for summary in records.summaries(kind="train"):
            assert summary.rewards == {"Presses": summary.reward}
            assert len(summary.advantages) == 1


def test_what_was_logged_is_kept(whole):
    trainer, folder = whole
    logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    [metrics] = Index(folder).logs().values()
    assert dict(metrics["loss"]) == logged
    assert len(logged) > 1
    assert "entropy" in metrics


def test_without_a_journal_and_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no complete checkpoint, and no journal"):
        game(tmp_path, Turns()).train(resume_from_checkpoint=True)
