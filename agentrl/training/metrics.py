"""What is logged: metrics of a generation batch, and a store that averages them until the next log.

A rollout becomes a small `RolloutRecord`; the records of all processes are gathered as objects, so every process
computes the same metrics from the same rows, whatever their number on each process. The store is gathered the same
way when a log is written: a metric that only some processes have never makes the others wait, and means are weighted
by the number of values behind them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import gather_object

from agentrl.types import Outcome, Trajectory

How = Literal["mean", "min", "max"]


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """What the metrics need to know of one trajectory.

    Attributes:
        group: The group's identity.
        rewards: One entry a reward column, None where it did not apply.
        prompt_tokens: Length of the prompt.
        completion_tokens: Length of the completion, tool tokens included.
        sampled_tokens: Number of sampled tokens; tool tokens do not count.
        truncated: Whether a limit cut the episode.
        outcome: How it ended.
        turns: Sampled turns.
        tool_calls: Calls the model wrote.
        tool_failures: Calls that failed.
        tool_timeouts: Calls that took longer than they may.
        retries: Attempts before the one that counted.
        turn_rewards: One reward a turn besides `rewards`, None when the environment gave none by turn.
        sampling_seconds: Spent sampling.
        tool_seconds: Spent in the calls of each tool, by its name.
    """

    group: str
    rewards: tuple[float | None, ...]
    prompt_tokens: int
    completion_tokens: int
    sampled_tokens: int
    truncated: bool
    outcome: Outcome
    turns: int
    tool_calls: int
    tool_failures: int
    tool_timeouts: int = 0
    retries: int = 0
    turn_rewards: tuple[float, ...] | None = None
    sampling_seconds: float = 0.0
    tool_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Prompt and sampled tokens."""
        return self.prompt_tokens + self.sampled_tokens

    @property
    def scored(self) -> bool:
        """Whether anything rewarded the rollout."""
        return self.turn_rewards is not None or any(reward is not None for reward in self.rewards)


def make_record(trajectory: Trajectory, rewards: Sequence[float | None]) -> RolloutRecord:
    """Summarise a trajectory."""
    tool_seconds: defaultdict[str, float] = defaultdict(float)
    for turn in trajectory.turns:
        for result in turn.results:
            if result.seconds:  # an unknown tool, by whatever name the model calls it, takes none
                tool_seconds[result.call.name] += result.seconds
    by_turn = trajectory.turn_rewards if trajectory.outcome.is_signal else None
    return RolloutRecord(
        group=trajectory.task.group,
        rewards=tuple(rewards),
        prompt_tokens=len(trajectory.prompt_ids),
        completion_tokens=len(trajectory.completion_ids),
        sampled_tokens=trajectory.sampled_length,
        truncated=trajectory.truncated,
        outcome=trajectory.outcome,
        turns=len(trajectory.turns),
        tool_calls=trajectory.tool_calls,
        tool_failures=trajectory.tool_failures,
        tool_timeouts=trajectory.tool_timeouts,
        retries=trajectory.retries,
        turn_rewards=None if by_turn is None else tuple(by_turn),
        sampling_seconds=sum(turn.seconds for turn in trajectory.turns),
        tool_seconds=dict(tool_seconds),
    )


def length_metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Return the `completions/*` metrics; lengths count sampled tokens, over rollouts that were sampled at all.

    `clipped_ratio` is the share of truncated rollouts. Without any terminated one, the terminated lengths are 0.
    """
    played = [record for record in records if record.outcome is not Outcome.ENV_FAILURE]
    lengths = [record.sampled_tokens for record in played] or [0]
    terminated = [record.sampled_tokens for record in played if not record.truncated] or [0]
    metrics = {f"completions/{name}_length": value for name, value in _spread(lengths).items()}
    metrics |= {f"completions/{name}_terminated_length": value for name, value in _spread(terminated).items()}
    metrics["completions/clipped_ratio"] = float(np.mean([record.truncated for record in played] or [False]))
    return metrics


def tool_metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Return the `tools/*` metrics: calls for each rollout, and the shares of them that failed and timed out.

    `tools/time_share/{name}` is the share of a tool's calls in all time that was spent sampling and in calls.
    """
    calls = sum(record.tool_calls for record in records)
    failures = sum(record.tool_failures for record in records)
    timeouts = sum(record.tool_timeouts for record in records)
    seconds: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for name, spent in record.tool_seconds.items():
            seconds[name] += spent
    whole = sum(record.sampling_seconds for record in records) + sum(seconds.values())
    return {
        "tools/call_frequency": calls / max(len(records), 1),
        "tools/failure_frequency": failures / calls if calls else 0.0,
        "tools/timeout_frequency": timeouts / calls if calls else 0.0,
        **{f"tools/time_share/{name}": spent / whole for name, spent in sorted(seconds.items())},
    }


def outcome_metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    """Return the share of each outcome and the mean number of retries, under `outcomes/*`, and that of turns.

    Outcomes that did not occur are 0, so that averages over several batches are right.
    """
    metrics = {
        f"outcomes/{outcome.value}": sum(r.outcome is outcome for r in records) / len(records) for outcome in Outcome
    }
    return metrics | {
        "outcomes/retries": float(np.mean([record.retries for record in records])),
        "completions/mean_turns": float(np.mean([record.turns for record in records])),
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "min": float(min(values)), "max": float(max(values))}


@dataclass(slots=True)
class _Entry:
    how: How
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        if self.how == "mean":
            self.value += value * weight
        else:
            known = self.weight > 0
            pick = min if self.how == "min" else max
            self.value = pick(self.value, value) if known else value
        self.weight += weight

    @property
    def result(self) -> float:
        return self.value / self.weight if self.how == "mean" else self.value


@dataclass(slots=True)
class MetricStore:
    """Collects values of one mode (training or evaluation) until they are logged."""

    _entries: dict[str, _Entry] = field(default_factory=dict)

    def add(self, name: str, value: float, weight: float = 1.0, how: How = "mean") -> None:
        """Add a value; non-finite ones and those without weight are left out."""
        number = to_number(value)
        if number is not None and weight > 0:
            self._entries.setdefault(name, _Entry(how)).add(number, weight)

    def add_all(self, metrics: dict[str, float], weight: float = 1.0) -> None:
        """Add several values; those whose name says min or max are reduced so."""
        for name, value in metrics.items():
            last = name.rsplit("/", 1)[-1]
            how: How = "min" if last.startswith("min") else "max" if last.startswith("max") else "mean"
            self.add(name, value, weight, how)

    def entries(self) -> list[tuple[str, How, float, float]]:
        """Return what was collected on this process: name, reduction, value or weighted sum, weight."""
        return [(name, entry.how, entry.value, entry.weight) for name, entry in self._entries.items()]

    @classmethod
    def of(cls, entries: Sequence[Sequence[Any]]) -> MetricStore:
        """Make a store of what `entries` gave, as a checkpoint keeps it."""
        return cls({name: _Entry(how, value, weight) for name, how, value, weight in entries})

    def reduce(self, world_size: int) -> dict[str, float]:
        """Return the metrics over all processes and forget them. Every process has to call it."""
        local = self.entries()
        self._entries = {}
        merged: dict[str, _Entry] = {}
        for name, how, value, weight in gather_object(local) if world_size > 1 else local:
            merged.setdefault(name, _Entry(how)).add(value / weight if how == "mean" else value, weight)
        return {name: entry.result for name, entry in merged.items()}


def to_number(value: Any) -> float | None:
    """Turn a scalar of any kind into a finite Python number, None for what is not one."""
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        if getattr(value, "size", 1) != 1 and not isinstance(value, torch.Tensor):
            return None
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return None


def clean_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Make logs writable as strict JSON: scalars become Python numbers, NaN and infinities are left out."""
    cleaned: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, str):
            cleaned[name] = value
        elif (number := to_number(value)) is not None:
            cleaned[name] = number
    return cleaned
