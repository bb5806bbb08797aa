"""A generation batch on its way to training: what it holds, and what is computed over all of its rows at once.

Rows of all processes are described by their `RolloutRecord`s, in process order; the functions here are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.objectives.advantages import reward_statistics
from agentrl.training.balance import RowSize
from agentrl.training.batching import MicroBatch
from agentrl.training.completions import CompletionLog
from agentrl.training.metrics import RolloutRecord, length_metrics, outcome_metrics, tool_metrics
from agentrl.types import Trajectory


@dataclass(slots=True)
class Window:
    """A generation batch, ready for training; this process's share of it.

    Attributes:
        identity: Which window it is.
        rows: Rows of the whole batch, over all processes.
        batches: Its micro-batches, in order.
        metrics: Metrics of the whole batch, over all processes.
        own_metrics: What reward functions logged on this process.
        tokens_seen: Prompt and sampled tokens of the whole batch.
        log: Readable rows of the whole batch, for `log_completions`.
    """

    identity: Any
    rows: int
    batches: list[MicroBatch]
    metrics: dict[str, float]
    own_metrics: list[tuple[str, float]]
    tokens_seen: int
    log: CompletionLog = field(default_factory=CompletionLog)


class TrainingRow(NamedTuple):
    """A trajectory, and whether it is learned from."""

    trajectory: Trajectory
    trained: bool

    def for_another_process(self) -> TrainingRow:
        """Leave away what only rewards and logs read, some of which cannot leave its process."""
        lean = replace(self.trajectory.task, prompt=None, columns={})
        trajectory = replace(self.trajectory, task=lean, prompt="", completion="", environment=None, extra={})
        return TrainingRow(trajectory, self.trained)


def reward_matrix(records: Sequence[RolloutRecord]) -> Tensor:
    """Return the rewards, (R, F), NaN where none applied."""
    width = len(records[0].rewards) if records else 0
    values = [[float("nan") if reward is None else reward for reward in record.rewards] for record in records]
    return torch.tensor(values, dtype=torch.float64).reshape(len(records), width)


def group_numbers(records: Sequence[RolloutRecord]) -> Tensor:
    """Return a number for the group of each row, (R,)."""
    numbers = {group: index for index, group in enumerate(dict.fromkeys(record.group for record in records))}
    return torch.tensor([numbers[record.group] for record in records], dtype=torch.int64)


def row_size(record: RolloutRecord) -> RowSize:
    """Return what a row costs by."""
    return RowSize(record.group, record.prompt_tokens, record.completion_tokens, record.sampled_tokens)


def window_metrics(
    records: Sequence[RolloutRecord], total_R: Tensor, group_R: Tensor, kl_R: Tensor | None, *, tools: bool
) -> dict[str, float]:
    """Return the metrics of a generation batch, but for those of each reward source.

    Args:
        records: Its rows.
        total_R: Their weighted rewards, NaN where nothing scored a row.
        group_R: Their groups.
        kl_R: Their KL from the reference, where it is part of the reward.
        tools: Whether tools were offered.
    """
    if not records:
        return {}
    statistics = reward_statistics(total_R, group_R)
    metrics = length_metrics(records) | outcome_metrics(records)
    metrics |= {
        "reward": statistics.mean,
        "reward_std": statistics.std,
        "frac_reward_zero_std": statistics.frac_zero_std,
    }
    if tools:
        metrics |= tool_metrics(records)
    if kl_R is not None:
        metrics["kl"] = kl_R.mean().item()
    return metrics
