"""SIGTERM: the run saves and leaves in time, whatever it is at, and goes on later as if nothing had been."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from agentrl.training.checkpoints import last_complete
from agentrl.training.preemption import EXIT_CODE, Preempted, Preemption
from tests.training.runs import logged, make_trainer, rows, weights
from tests.training.test_journal_resume import Presses, Turns, assert_same, game
from tests.training.worlds import run_world


class Hanging(Presses):
    """Hangs in a call, after it has said so in a file."""

    told: Path | None = None

    def press(self, times: int) -> str:
        """Press the button.

        Args:
            times: How often.
        """
        answer = super().press(times)
        if self.told is not None and type(self).calls == 25:  # in the third window
            self.told.touch()
            time.sleep(600)
        return answer


class Signalled(TrainerCallback):
    """Sends SIGTERM in the midst of the second optimizer step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def hang(folder: Path, told: Path, threads: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(threads)
    Hanging.told = told
    game(folder, Turns(), Hanging, save_steps=100, **options).train()


def signalled(folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    trainer = game(folder, Turns(), save_steps=100)
    trainer.add_callback(Signalled())
    trainer.train()


def start(target: Any, *arguments: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.test_journal_resume", "peft"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def left_after_sigterm(folder: Path, **options: Any) -> int | None:
    """The exit code of a run that gets SIGTERM while a tool hangs."""
    told = folder / "told"
    process = start(hang, folder, told, torch.get_num_threads(), options)
    try:
        while not told.exists():
            assert process.is_alive()
            time.sleep(0.02)
        process.terminate()
        process.join(300)
        return process.exitcode
    finally:
        process.kill()


def test_a_run_that_collects_saves_and_leaves_although_a_tool_hangs(tmp_path):
    """No checkpoint was due; it has one of the last optimizer step, and the rest is in the journal."""
    assert left_after_sigterm(tmp_path) == EXIT_CODE == 143
    assert last_complete(tmp_path) == str(tmp_path / "checkpoint-2")
    whole = game(tmp_path / "whole", Turns(), Hanging)
    whole.train()
    generator = Turns()
    resumed = game(tmp_path, generator, Hanging)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, whole)
    assert 0 < len(generator.calls) < 30, "31 turns are in the last two windows"


@pytest.mark.slow
def test_when_the_grace_time_is_over_the_process_ends_as_it_is(tmp_path):
    """Saving and closing would take longer than a tenth of a second."""
    assert left_after_sigterm(tmp_path, preemption_grace=0.01) == EXIT_CODE


def test_in_the_midst_of_an_optimizer_step_it_leaves_at_its_end(tmp_path):
    process = start(signalled, tmp_path, torch.get_num_threads())
    process.join(300)
    assert process.exitcode == EXIT_CODE
    assert last_complete(tmp_path) == str(tmp_path / "checkpoint-2")


def test_a_handler_of_somebody_else_stays(tmp_path):
    """Such as transformers' own, which saves with `enable_jit_checkpoint`."""
    trainer = make_trainer("grpo", tmp_path, dataset=rows(4), max_steps=1, enable_jit_checkpoint=True)
    theirs = signal.getsignal(signal.SIGTERM)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer.add_callback(Look())
    trainer.train()
    assert callable(theirs)
    assert seen == [theirs]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_handler_is_gone_after_training_and_never_set_in_a_thread(tmp_path):
    trainer = make_trainer("grpo", tmp_path, dataset=rows(4), max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert logged(trainer, "reward")
    trainer.train()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_between_two_windows_stops_the_next_one():
    preemption = Preemption(1e8)
    with preemption.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
        with pytest.raises(Preempted), preemption.interruptible():
            pass


class SignalledInAPlace(TrainerCallback):
    """Sends SIGTERM to one of two processes, in the midst of the second optimizer step or at its end."""

    def __init__(self, event: str) -> None:
        def send(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == (1 if event == "on_pre_optimizer_step" else 2) and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        setattr(self, event, send)


def leave(folder: Path, moment: str) -> int | str | None:
    """Train until one of the processes gets SIGTERM; gives back the exit code."""
    generator = Turns()
    trainer = game(folder, generator, save_steps=100)
    if moment.startswith("on_"):
        trainer.add_callback(SignalledInAPlace(moment))
    else:
        policy = generator._script

        def deadly(*given: Any) -> list[int]:
            if trainer.state.global_step == 2 and trainer.args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return policy(*given)

        generator._script = deadly
    with pytest.raises(SystemExit) as ending:
        trainer.train()
    return ending.value.code


def finish(folder: Path, resume: bool) -> dict[str, Any]:
    trainer = game(folder, Turns(), save_steps=100)
    trainer.train(resume_from_checkpoint=resume or None)
    metrics = ("reward", "loss", "grad_norm", "num_tokens")
    return {"weights": weights(trainer), "logs": {name: logged(trainer, name) for name in metrics}}


@pytest.mark.slow
def test_of_several_processes_all_save_and_leave_when_one_gets_the_signal(tmp_path):
    """While it plays, in an optimizer step, and after one; the run that goes on is the one that was never stopped."""
    [whole, _] = run_world(finish, tmp_path / "whole", tmp_path / "whole", False)
    for moment in ("playing", "on_pre_optimizer_step", "on_log"):
        folder = tmp_path / moment
        assert run_world(leave, folder / "left", folder, moment) == [EXIT_CODE] * 2
        assert last_complete(folder) == str(folder / "checkpoint-2")
        for resumed in run_world(finish, folder / "resumed", folder, True):
            assert [
                key for key, value in whole["weights"].items() if not torch.equal(value, resumed["weights"][key])
            ] == []
            assert resumed["logs"] == whole["logs"]
