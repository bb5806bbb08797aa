"""The benchmarks of survival at a reduced size: a run loses nothing, holds on to nothing and learns no failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def run(name: str, *options: str) -> list[str]:
    """Run a benchmark in a process of its own, since it kills and counts; gives its lines if all was well."""
    ended = subprocess.run([sys.executable, BENCHMARKS / name, *options], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout.splitlines()


def test_chaos_leaves_true_rewards_and_nothing_else():
    """Every trained trajectory has the reward and the advantage that its episode was worth; nothing leaks (F, G, H)."""
    lines = run("chaos.py", "--rollouts", "160")
    assert lines[-1] == "nothing lost, nothing poisoned, nothing left"
    [failures] = [line for line in lines if "env_failure" in line]
    assert "finished" in failures


def test_kills_lose_no_finished_turn_and_change_no_weight():
    """`kill -9` at random moments and within commits: whole journals, and the weights of the run that was spared."""
    lines = run("kills.py", "--kills", "6", "--games", "1")
    assert "finished turns lost: 0 of " in lines[-1]
    assert lines[-1].endswith("damaged journals: 0; trainings that ended differently: 0")


def test_a_long_training_holds_on_to_nothing():
    """No object, thread, file or socket is left by a step, and memory stays where it is."""
    lines = run("memory.py", "--steps", "100", "--prompts", "8")
    assert lines[-1] == "nothing is held on to"
