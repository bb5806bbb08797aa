"""A generation batch on its way to training: what it holds, and what is computed over all of its rows at once.

Rows of all processes are described by their `RolloutRecord`s, in process order; the functions here are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.objectives.advantages import combine_rewards, reward_statistics
from agentrl.objectives.credit import returns_to_go
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


@dataclass(frozen=True, slots=True)
class BatchRewards:
    """The rewards of a generation batch of R rows, over all processes.

    Attributes:
        values_RF: By reward function or environment, NaN where it gave none.
        weights_F: Their weights.
        group_R: Group of each row, integers.
        total_R: Weighted sum over what scored the row, the rewards of its turns included; NaN where nothing did.
        returns_RK: Return of each turn, see `agentrl.objectives.credit`; None when no turn was rewarded by itself.
    """

    values_RF: Tensor
    weights_F: Tensor
    group_R: Tensor
    total_R: Tensor
    returns_RK: Tensor | None = None

    def of_turn(self, k: int) -> BatchRewards:
        """The same rows, rewarded with the returns of turn k."""
        assert self.returns_RK is not None
        return replace(self, total_R=self.returns_RK[:, k], returns_RK=None)


def batch_rewards(records: Sequence[RolloutRecord], weights: Sequence[float], turn_discount: float) -> BatchRewards:
    """Put the rewards of a generation batch together."""
    values_RF, weights_F = reward_matrix(records), torch.tensor(weights)
    total_R = combine_rewards(values_RF, weights_F)
    returns_RK = None
    if any(record.turn_rewards is not None for record in records):
        # A row that only its turns were rewarded for has nothing to add as a whole.
        scored_R = torch.tensor([record.scored for record in records])
        outcome_R = torch.where(total_R.isnan() & scored_R, 0.0, total_R)
        by_turn = [record.turn_rewards or (0.0,) * record.turns for record in records]
        returns_RK = returns_to_go(by_turn, outcome_R, turn_discount)
        total_R = returns_to_go(by_turn, outcome_R, 1.0)[:, 0].float()
    return BatchRewards(values_RF, weights_F, group_numbers(records), total_R, returns_RK)


def group_numbers(records: Sequence[RolloutRecord]) -> Tensor:
    """Return a number for the group of each row, (R,)."""
    numbers = {group: index for index, group in enumerate(dict.fromkeys(record.group for record in records))}
    return torch.tensor([numbers[record.group] for record in records], dtype=torch.int64)


def row_size(record: RolloutRecord) -> RowSize:
    """Return what a row costs by."""
    return RowSize(record.group, record.prompt_tokens, record.completion_tokens, record.sampled_tokens)


def add_turn_advantages(
    batches: Sequence[MicroBatch], advantages_RK: Tensor, rows: Sequence[TrainingRow]
) -> list[MicroBatch]:
    """Give each target of micro-batches the advantage of its turn.

    Args:
        batches: Cut from the rows, in order.
        advantages_RK: Advantage of turn k of each row.
        rows: R rows.
    """
    by_row = [
        [advantages[k] for k, turn in enumerate(row.trajectory.turns) for _ in range(turn.start, turn.stop)]
        for row, advantages in zip(rows, advantages_RK.tolist(), strict=True)
    ]
    done, first = [], 0
    for batch in batches:
        own = range(first, first + batch.rows)
        first += batch.rows
        values = [value for r in own if rows[r].trained for value in by_row[r]]
        done.append(replace(batch, turn_advantages_N=torch.tensor(values, dtype=torch.float32)))
    return done


def staleness(row: TrainingRow, version: int) -> list[int]:
    """How many versions older than the given one the weights were that drew each target of a row."""
    return [version - drawn for turn in row.trajectory.turns for drawn in turn.versions] if row.trained else []


def drawn_before(trajectory: Trajectory, version: int) -> Trajectory:
    """The same, with what weights of this version or newer ones drew counted to the version before.

    For tokens that were drawn before a run was cut off: what has the same version now may be other weights.
    """
    newest = version - 1
    turns = [
        replace(
            turn,
            weights_version=min(turn.weights_version, newest),
            updates=tuple((index, min(later, newest)) for index, later in turn.updates),
        )
        for turn in trajectory.turns
    ]
    return replace(trajectory, turns=turns)


def mark_stale(batches: Sequence[MicroBatch], rows: Sequence[TrainingRow], version: int) -> list[MicroBatch]:
    """Note which targets of micro-batches were drawn by older weights than those of `version`.

    A target whose logprob the sampler does not know has no other ratio than that of a fresh one.

    Args:
        batches: Cut from the rows, in order.
        rows: R rows.
        version: Of the weights that the trainer has now.
    """
    marked, first = [], 0
    for batch in batches:
        own, first = rows[first : first + batch.rows], first + batch.rows
        behind_N = torch.tensor([behind for row in own for behind in staleness(row, version)], dtype=torch.int64)
        stale_N = (behind_N > 0) & ~batch.sampler_logps_N.isnan()
        marked.append(replace(batch, stale_N=stale_N if stale_N.any() else None))
    return marked


def window_metrics(
    records: Sequence[RolloutRecord], rewards: BatchRewards, signals_RC: Tensor, kl_R: Tensor | None, *, tools: bool
) -> dict[str, float]:
    """Return the metrics of a generation batch, but for those of each reward source.

    Args:
        records: Its rows.
        rewards: Their rewards.
        signals_RC: What the members of a group are compared by.
        kl_R: Their KL from the reference, where it is part of the reward.
        tools: Whether tools were offered.
    """
    if not records:
        return {}
    statistics = reward_statistics(rewards.total_R, rewards.group_R, signals_RC)
    metrics = length_metrics(records) | outcome_metrics(records)
    metrics |= {
        "reward": statistics.mean,
        "reward_std": statistics.std,
        "frac_reward_zero_std": statistics.frac_zero_std,
    }
    if by_turn := [sum(record.turn_rewards) for record in records if record.turn_rewards is not None]:
        metrics["rewards/turns/mean"] = fmean(by_turn)
        metrics["rewards/turns/std"] = stdev(by_turn) if len(by_turn) > 1 else 0.0
    if tools:
        metrics |= tool_metrics(records)
    if kl_R is not None:
        metrics["kl"] = kl_R.mean().item()
    return metrics
