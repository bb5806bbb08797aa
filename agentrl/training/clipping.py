"""The `clip_ratio/*` metrics: how often the objective left the trust region."""

from __future__ import annotations

from torch import Tensor

from agentrl.objectives.losses import Surrogate
from agentrl.objectives.segments import row_counts, row_means
from agentrl.training.metrics import MetricStore


def clip_metrics(surrogate: Surrogate, row_N: Tensor, rows: int, metrics: MetricStore) -> None:
    """Add the shares of clipped tokens; `low_min` and `high_max` are over rows.

    Args:
        surrogate: One entry a token.
        row_N: Row of each token.
        rows: R.
        metrics: Where they go.
    """
    if not (tokens := row_N.numel()):
        return
    low_N, high_N = surrogate.clipped_low.float(), surrogate.clipped_high.float()
    present_R = row_counts(row_N, rows) > 0
    _add(
        metrics,
        low_N,
        high_N,
        tokens,
        lowest=row_means(low_N, row_N, rows)[present_R].min().item(),
        highest=row_means(high_N, row_N, rows)[present_R].max().item(),
    )


def clip_metrics_of_rows(surrogate: Surrogate, metrics: MetricStore) -> None:
    """Add the shares of clipped rows, for losses with one ratio a row."""
    if not (rows := surrogate.loss.numel()):
        return
    low_P, high_P = surrogate.clipped_low.float(), surrogate.clipped_high.float()
    _add(metrics, low_P, high_P, rows, lowest=low_P.min().item(), highest=high_P.max().item())


def _add(
    metrics: MetricStore, low: Tensor, high: Tensor, weight: int, *, lowest: float, highest: float
) -> None:
    metrics.add("clip_ratio/low_mean", low.mean().item(), weight)
    metrics.add("clip_ratio/low_min", lowest, how="min")
    metrics.add("clip_ratio/high_mean", high.mean().item(), weight)
    metrics.add("clip_ratio/high_max", highest, how="max")
    metrics.add("clip_ratio/region_mean", (low + high).mean().item(), weight)
