"""Metrics: pure functions of rollout records, and a store that averages between logs."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.training.clock import StepClock
from agentrl.training.completions import CompletionLog, print_rows, readable, select_rows
from agentrl.training.metrics import (
    MetricStore,
    RolloutRecord,
    clean_logs,
    length_metrics,
    make_record,
    outcome_metrics,
    tool_metrics,
)
from agentrl.types import Outcome
from tests.rollout.helpers import Counter, call, renderer, run_and_close, tasks, turn


def record(sampled=2, *, truncated=False, outcome=Outcome.FINISHED, calls=0, failures=0):
    return RolloutRecord("g", (1.0,), 3, sampled + 2, sampled, truncated, outcome, 1, calls, failures)


def test_lengths_count_sampled_tokens_and_terminated_ones_apart():
    metrics = length_metrics([record(2), record(6), record(10, truncated=True)])
    assert metrics["completions/mean_length"] == 6.0
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (2.0, 10.0)
    assert metrics["completions/mean_terminated_length"] == 4.0
    assert metrics["completions/max_terminated_length"] == 6.0
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)


def test_lengths_are_those_of_the_rows_that_are_trained_e06():
    """The budget cuts: a result that does not fit is no part of the row, and no length is above the cap."""
    cap = len(turn(call("inc"))) + 1
    generator = ScriptedGenerator(lambda *_: turn(call("inc")))
    engine = RolloutEngine(
        generator, renderer(), environments=Counter, limits=Limits(max_completion_length=cap), failures=FailurePolicy()
    )
    trajectories = run_and_close(engine, tasks(2))
    metrics = length_metrics([make_record(trajectory, [1.0]) for trajectory in trajectories])
    trained = [sum(trajectory.loss_mask) for trajectory in trajectories]
    assert trained == [cap - 1] * 2
    assert metrics["completions/max_length"] == metrics["completions/mean_length"] == cap - 1
    assert metrics["completions/clipped_ratio"] == 1.0


def test_without_terminated_rollouts_their_lengths_are_zero():
    assert length_metrics([record(4, truncated=True)])["completions/mean_terminated_length"] == 0.0


def test_rollouts_whose_environment_failed_have_no_length():
    failed = record(0, outcome=Outcome.ENV_FAILURE)
    assert length_metrics([record(4), failed])["completions/mean_length"] == 4.0
    assert outcome_metrics([record(4), failed])["outcomes/env_failure"] == 0.5


def test_tool_failures_are_a_share_of_the_calls():
    metrics = tool_metrics([replace(record(calls=3, failures=2), tool_timeouts=1), record(calls=1)])
    assert metrics == {
        "tools/call_frequency": 2.0,
        "tools/failure_frequency": 0.5,
        "tools/timeout_frequency": 0.25,
    }
    assert tool_metrics([record()])["tools/failure_frequency"] == 0.0


def test_the_time_of_a_tool_is_a_share_of_all_time_in_rollouts():
    metrics = tool_metrics(
        [
            replace(record(), sampling_seconds=2.0, tool_seconds={"search": 5.0, "add": 1.0}),
            replace(record(), sampling_seconds=1.0, tool_seconds={"search": 1.0}),
        ]
    )
    assert metrics["tools/time_share/search"] == pytest.approx(0.6)
    assert metrics["tools/time_share/add"] == pytest.approx(0.1)


def test_the_parts_of_a_step_make_up_its_time():
    clock = StepClock()
    with clock.part("rollouts"):
        time.sleep(0.02)
    with clock.part("rewards"):
        time.sleep(0.01)
    time.sleep(0.01)
    metrics = clock.metrics()
    parts = {name: metrics[f"step_time/{name}"] for name in ("rollouts", "rewards", "sync", "training")}
    assert metrics["step_time"] == pytest.approx(sum(parts.values()))
    assert parts["rollouts"] >= 0.02
    assert parts["rewards"] >= 0.01
    assert parts["training"] >= 0.01
    assert parts["sync"] == 0.0
    clock.begin()
    assert clock.metrics()["step_time/rollouts"] == 0.0


def test_retries_are_counted_for_each_rollout():
    assert outcome_metrics([replace(record(), retries=3), record()])["outcomes/retries"] == 1.5


def test_ragged_keys_are_averaged_over_the_values_there_are_H16():
    store = MetricStore()
    for metrics in ({"a": 1, "b": 2}, {"a": 3}, {"c": 5}):
        store.add_all(metrics)
    assert store.reduce(1) == {"a": 2.0, "b": 2.0, "c": 5.0}
    assert store.reduce(1) == {}, "a log starts afresh"


def test_means_are_weighted_and_extremes_are_extremes():
    store = MetricStore()
    store.add("entropy", 1.0, weight=1)
    store.add("entropy", 4.0, weight=2)
    store.add_all({"x/max": 1.0, "x/min_length": 5.0})
    store.add_all({"x/max": 3.0, "x/min_length": 2.0})
    assert store.reduce(1) == {"entropy": 3.0, "x/max": 3.0, "x/min_length": 2.0}


def test_values_without_weight_or_without_a_number_are_left_out():
    store = MetricStore()
    store.add("a", math.nan)
    store.add("b", 1.0, weight=0)
    assert store.reduce(1) == {}


def test_logs_are_strict_json_K04():
    logs = {"a": np.int64(3), "b": torch.tensor(1.5), "c": math.nan, "d": math.inf, "e": "x\u2028y"}
    line = json.dumps(clean_logs(logs), allow_nan=False)
    assert json.loads(line) == {"a": 3, "b": 1.5, "e": "x\u2028y"}


def test_rows_of_the_table_are_limited_and_can_be_unique_by_prompt():
    log = CompletionLog(["p", "p", "q"], ["a", "b", "c"], {"f": [1.0, None, 2.0]}, [0.5, -0.5, 0.0], {"n": [7]})
    assert [row["completion"] for row in select_rows(log, limit=2, unique_prompts=False)] == ["a", "b"]
    unique = select_rows(log, limit=None, unique_prompts=True)
    assert [row["completion"] for row in unique] == ["a", "c"]
    assert unique[1]["n"] is None


def test_model_output_is_never_markup():
    console = Console(record=True, width=120, force_terminal=True)
    log = CompletionLog(["[bold]p[/bold]"], ["[link=http://x]c[/link]"], {"[f]": [1.0]}, [0.0])
    print_rows(select_rows(log, limit=None, unique_prompts=False), 3, console)
    shown = console.export_text()
    assert "[bold]p[/bold]" in shown
    assert "[link=http://x]c[/link]" in shown


def test_conversations_are_readable():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"city": "Zürich"}}}]},
        {"role": "tool", "content": "5"},
    ]  # fmt: skip
    assert readable(messages) == 'user: look [image]\nassistant: <think>hm</think> add({"city": "Zürich"})\ntool: 5'
