"""What is said of a run while it goes: each warning has its reason in the metrics, and says what to do."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from agentrl.training.grpo import GRPOTrainer
from agentrl.training.status import LiveStatus, plot, summary, warnings_of
from tests.training.helpers import logged, make

GOOD = {
    "reward": 0.5,
    "frac_reward_zero_std": 0.2,
    "tools/failure_frequency": 0.1,
    "tools/time_share/search": 0.3,
    "completions/clipped_ratio": 0.05,
    "sampling/importance_sampling_ratio/mean": 1.01,
    "entropy": 0.8,
    "outcomes/env_failure": 0.0,
}


def test_a_run_that_goes_well_is_not_warned_of():
    assert warnings_of([GOOD] * 12) == []
    assert warnings_of([]) == []
    assert warnings_of([{"loss": 1.0}]) == []


@pytest.mark.parametrize(
    ("metric", "late", "seen", "advice"),
    [
        ("frac_reward_zero_std", 0.9, "equal in 90% of the groups", "dynamic_sampling_max_rounds"),
        ("tools/failure_frequency", 0.4, "40% of the tool calls fail, 10% did at first", "agentrl view"),
        ("tools/time_share/search", 0.8, "80% of the time of rollouts is spent in the tool search", "max_concurrency"),
        ("completions/clipped_ratio", 0.5, "50% of the rollouts are cut", "max_completion_length"),
        ("sampling/importance_sampling_ratio/mean", 0.7, "ratio is 0.70", "docs/exactness.md"),
        ("entropy", 0.05, "fell from 0.800 to 0.050", "entropy_coef"),
        ("outcomes/env_failure", 0.1, "10% of the rollouts are lost", "journal"),
    ],
    ids=[
        *("all rewards are equal", "tool failures rise", "one tool takes most of the time", "completions are cut"),
        *("the ratio is off 1", "entropy collapses", "environments fail"),
    ],
)
def test_what_goes_wrong_is_told_with_what_to_do(metric, late, seen, advice):
    [warned] = warnings_of([GOOD] * 7 + [GOOD | {metric: late}] * 5)
    assert warned.metric == metric
    assert seen in warned.seen
    assert advice in warned.advice


def test_failures_that_were_always_there_are_not_rising():
    assert warnings_of([GOOD | {"tools/failure_frequency": 0.4}] * 12) == []


def test_the_plot_goes_from_the_smallest_to_the_largest():
    assert plot([0.0, 0.5, 1.0]) == "▁▄█"
    assert plot([2.0] * 3) == "▄▄▄"
    assert plot([]) == ""
    assert len(plot([float(i) for i in range(1000)])) == 60
    assert "0.000 in the first tenth, 9.000 in the last" in summary([{"reward": float(i)} for i in range(10)], 3.0)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_is_shown_while_it_goes_and_summed_up(tmp_path, terminal):
    shown = io.StringIO()
    status = LiveStatus(Console(file=shown, force_terminal=terminal, width=200))
    trainer = make(GRPOTrainer, tmp_path)
    trainer.add_callback(status)
    trainer.train()
    assert [log["reward"] for log in status.logs] == logged(trainer, "reward")
    assert "in the first tenth" in shown.getvalue()
    assert ("step 2/2" in shown.getvalue()) is not terminal
    assert sys.stderr is not shown
