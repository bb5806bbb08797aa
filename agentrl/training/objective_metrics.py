"""Metrics of an objective: how often it left the trust region, and how it weighted what another engine sampled.

Shares and means are over the trained tokens, or over the rows that have any where all tokens of a row have one value.
"""

from __future__ import annotations

from torch import Tensor

from agentrl.objectives.losses import Surrogate
from agentrl.objectives.segments import row_counts, row_means
from agentrl.training.batching import MicroBatch
from agentrl.training.metrics import MetricStore
from agentrl.training.old_policy import logps_when_sampled
from agentrl.training.scoring import Scores


def clip_metrics(surrogate: Surrogate, row_N: Tensor, rows: int, metrics: MetricStore, *, level: str) -> None:
    """Add the shares of clipped tokens, or of clipped rows where a row has one ratio.

    Args:
        surrogate: One entry a token.
        row_N: Row of each token.
        rows: R.
        metrics: Where they go; `low_min` and `high_max` are over rows.
        level: "token", or "sequence" where all tokens of a row have the same ratio.
    """
    low_P = of_rows(surrogate.clipped_low, row_N, rows)
    high_P = of_rows(surrogate.clipped_high, row_N, rows)
    if level == "sequence":
        _add(metrics, low_P, high_P, per_row=(low_P, high_P))
    else:
        _add(metrics, surrogate.clipped_low.float(), surrogate.clipped_high.float(), per_row=(low_P, high_P))


def clip_metrics_of_rows(surrogate: Surrogate, metrics: MetricStore) -> None:
    """Add the shares of clipped rows, for losses with one entry a row."""
    low_P, high_P = surrogate.clipped_low.float(), surrogate.clipped_high.float()
    _add(metrics, low_P, high_P, per_row=(low_P, high_P))


def mean_metric(name: str, values_N: Tensor, row_N: Tensor, rows: int, metrics: MetricStore, *, level: str) -> None:
    """Add the mean over tokens, or at level "sequence" over rows, of values that tokens have."""
    values = of_rows(values_N, row_N, rows) if level == "sequence" else values_N.float()
    if weight := values.numel():
        metrics.add(name, values.mean().item(), weight)


def sampler_metrics(scores: Scores, batch: MicroBatch, metrics: MetricStore) -> None:
    """Add `sampling/sampling_logp_difference/*`: how far the trainer's logprobs are from those the sampler reported.

    Of stale targets nobody knows: the weights that drew them are gone.
    """
    difference = (logps_when_sampled(scores, batch) - batch.sampler_logps_N).abs()
    known_N = ~difference.isnan()  # NaN: the sampler does not know
    difference = difference[known_N if batch.stale_N is None else known_N & ~batch.stale_N]
    if known := difference.numel():
        metrics.add("sampling/sampling_logp_difference/mean", difference.mean().item(), known)
        metrics.add("sampling/sampling_logp_difference/max", difference.max().item(), how="max")


def weight_metrics(weight_N: Tensor, row_N: Tensor, rows: int, metrics: MetricStore, *, level: str) -> None:
    """Add `sampling/importance_sampling_ratio/*`, the constrained weights of tokens, or of rows at level "sequence"."""
    name = "sampling/importance_sampling_ratio"
    mean_metric(f"{name}/mean", weight_N, row_N, rows, metrics, level=level)
    if weight_N.numel():
        metrics.add(f"{name}/min", weight_N.min().item(), how="min")
        metrics.add(f"{name}/max", weight_N.max().item(), how="max")


def of_rows(values_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Mean over the tokens of each row that has any, (P,)."""
    return row_means(values_N.float(), row_N, rows)[row_counts(row_N, rows) > 0]


def _add(metrics: MetricStore, low: Tensor, high: Tensor, *, per_row: tuple[Tensor, Tensor]) -> None:
    if not (weight := low.numel()):
        return
    metrics.add("clip_ratio/low_mean", low.mean().item(), weight)
    metrics.add("clip_ratio/low_min", per_row[0].min().item(), how="min")
    metrics.add("clip_ratio/high_mean", high.mean().item(), weight)
    metrics.add("clip_ratio/high_max", per_row[1].max().item(), how="max")
    metrics.add("clip_ratio/region_mean", (low + high).mean().item(), weight)
