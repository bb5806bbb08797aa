"""The `clip_ratio/*` metrics: how often the objective left the trust region."""

from __future__ import annotations

from torch import Tensor

from agentrl.objectives.losses import Surrogate
from agentrl.objectives.segments import row_counts, row_means
from agentrl.training.metrics import MetricStore


def clip_metrics(surrogate: Surrogate, row_N: Tensor, rows: int, metrics: MetricStore, *, level: str) -> None:
    """Add the shares of clipped tokens, or of clipped rows where a row has one ratio.

    Args:
        surrogate: One entry a token.
        row_N: Row of each token.
        rows: R.
        metrics: Where they go; `low_min` and `high_max` are over rows.
        level: "token", or "sequence" where all tokens of a row have the same ratio.
    """
    present_R = row_counts(row_N, rows) > 0
    low_P = row_means(surrogate.clipped_low.float(), row_N, rows)[present_R]
    high_P = row_means(surrogate.clipped_high.float(), row_N, rows)[present_R]
    if level == "sequence":
        _add(metrics, low_P, high_P, per_row=(low_P, high_P))
    else:
        _add(metrics, surrogate.clipped_low.float(), surrogate.clipped_high.float(), per_row=(low_P, high_P))


def clip_metrics_of_rows(surrogate: Surrogate, metrics: MetricStore) -> None:
    """Add the shares of clipped rows, for losses with one entry a row."""
    low_P, high_P = surrogate.clipped_low.float(), surrogate.clipped_high.float()
    _add(metrics, low_P, high_P, per_row=(low_P, high_P))


def _add(metrics: MetricStore, low: Tensor, high: Tensor, *, per_row: tuple[Tensor, Tensor]) -> None:
    if not (weight := low.numel()):
        return
    metrics.add("clip_ratio/low_mean", low.mean().item(), weight)
    metrics.add("clip_ratio/low_min", per_row[0].min().item(), how="min")
    metrics.add("clip_ratio/high_mean", high.mean().item(), weight)
    metrics.add("clip_ratio/high_max", per_row[1].max().item(), how="max")
    metrics.add("clip_ratio/region_mean", (low + high).mean().item(), weight)
