"""Policy-gradient losses over flat tokens, and how they become one scalar for the backward pass.

A loss function maps log-ratios and advantages to one loss per token (or per row); an aggregation divides the
sum by what the loss type divides by, counted over a whole optimizer step. Any split of the rows of a step
into micro-batches and processes therefore gives the same gradient ("bnpo" excepted, whose definition is
local).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.objectives.segments import row_counts, row_means, row_sums

IMPORTANCE_LEVELS = ("token", "sequence")
"""Whether each token has its own importance ratio or shares that of its row."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """What an optimizer step holds, counted over all its micro-batches on all processes.

    The losses of a step's micro-batches add up, and distributed training averages over processes; the factor
    `world_size` undoes that average, so that the result is the sum over the step divided by these counts.

    Attributes:
        rows: Rows with at least one trained token.
        tokens: Trained tokens.
        micro_batches: Micro-batches with at least one trained token.
        world_size: Processes whose gradients are averaged.
    """

    rows: int
    tokens: int
    micro_batches: int = 1
    world_size: int = 1


class Surrogate(NamedTuple):
    """A clipped loss and where clipping took the gradient away; one entry a token, or a row for `rloo_loss`.

    Attributes:
        loss: The loss, to be minimised.
        ratio: The importance ratio, differentiable.
        clipped_low: Ratio below 1 - epsilon_low at a negative advantage.
        clipped_high: Ratio above 1 + epsilon_high at a positive advantage.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def log_ratios(logps_N: Tensor, old_logps_N: Tensor | None, row_N: Tensor, rows: int, level: str = "token") -> Tensor:
    """Logarithm of the importance ratio of each token.

        token:     log pi(t) - log pi_old(t)
        sequence:  mean of that over the tokens of the row, the same for all of them

    The sequence level is that of GSPO (Zheng et al. 2025, https://arxiv.org/abs/2507.18071, equation 7).

    Args:
        logps_N: Logprobs under the policy, (N,).
        old_logps_N: Logprobs under the policy that sampled, (N,); None when it is the policy itself: then the
            ratio is 1 and its gradient that of `logps_N`.
        row_N: Row of each token, int64 (N,).
        rows: R.
        level: One of `IMPORTANCE_LEVELS`.

    Returns:
        (N,), differentiable in `logps_N`.

    Raises:
        ValueError: `level` is not one of `IMPORTANCE_LEVELS`.
    """
    log_ratio_N = logps_N - (logps_N.detach() if old_logps_N is None else old_logps_N)
    if level == "token":
        return log_ratio_N
    if level == "sequence":
        return row_means(log_ratio_N, row_N, rows)[row_N]
    raise ValueError(f"unknown importance_sampling_level {level!r}; it is one of {', '.join(IMPORTANCE_LEVELS)}")


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """The clipped surrogate of PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7).

        l = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A),   r = exp(log_ratio)

    Different bounds are those of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476). With `delta` the
    first r is min(r, delta), which bounds the loss of a negative advantage at a large ratio (Prime Intellect
    2025, INTELLECT-2, https://arxiv.org/abs/2505.07291).

    Args:
        log_ratio: Per token (N,) or per row (R,).
        advantages: The same shape; a row's advantage at each of its tokens.
        epsilon_low: Distance of the lower bound from 1.
        epsilon_high: Distance of the upper bound from 1.
        delta: Upper bound of the unclipped ratio, > 1 + epsilon_high; None for none.
    """
    ratio = log_ratio.exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return Surrogate(
        loss=-torch.minimum(bounded * advantages, clipped * advantages),
        ratio=ratio,
        clipped_low=(ratio < 1 - epsilon_low) & (advantages < 0),
        clipped_high=(ratio > 1 + epsilon_high) & (advantages > 0),
    )


def rloo_loss(
    logps_N: Tensor,
    old_logps_N: Tensor | None,
    advantages_R: Tensor,
    row_N: Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> Surrogate:
    """The clipped REINFORCE loss of whole rows.

    `clipped_surrogate` with one ratio a row, r = exp(sum over its tokens of log pi - log pi_old): the row is
    one action (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740).

    Args:
        logps_N: Logprobs under the policy, (N,).
        old_logps_N: Logprobs under the policy that sampled, or None as in `log_ratios`.
        advantages_R: Advantage of each row, (R,).
        row_N: Row of each token, int64 (N,).
        epsilon_low: Distance of the lower bound from 1.
        epsilon_high: Distance of the upper bound from 1.

    Returns:
        One entry for each row that has a trained token, in row order.
    """
    rows = len(advantages_R)
    log_ratio_R = row_sums(log_ratios(logps_N, old_logps_N, row_N, rows), row_N, rows)
    # A row without trained tokens would have ratio 1 and add its advantage to the logged loss.
    present_R = row_counts(row_N, rows) > 0
    return clipped_surrogate(log_ratio_R[present_R], advantages_R[present_R], epsilon_low, epsilon_high)


def row_loss(loss_P: Tensor, denominators: Denominators) -> Tensor:
    """Mean over the rows of the step, for losses that have one entry a row.

    Args:
        loss_P: Loss of each row with a trained token, (P,).
        denominators: Counts of the step.

    Returns:
        This micro-batch's part of the step's loss, a scalar.
    """
    return _share(loss_P.sum(), denominators.rows, denominators)


def token_loss(
    loss_N: Tensor,
    row_N: Tensor,
    rows: int,
    loss_type: str,
    denominators: Denominators,
    *,
    max_completion_length: int,
) -> Tensor:
    """Aggregate the losses of tokens as the loss type says.

    Args:
        loss_N: Loss of each trained token, (N,).
        row_N: Row of each token, int64 (N,).
        rows: R, the rows of this micro-batch.
        loss_type: A key of `LOSS_TYPES`.
        denominators: Counts of the step.
        max_completion_length: The constant that "dr_grpo" divides by.

    Returns:
        This micro-batch's part of the step's loss, a scalar. Without trained tokens it is 0 and still has a
        graph, so that the backward pass runs on every process.

    Raises:
        ValueError: `loss_type` is unknown.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"unknown loss_type {loss_type!r}; it is one of {', '.join(LOSS_TYPES)}")
    return LOSS_TYPES[loss_type](loss_N, row_N, rows, denominators, max_completion_length)


def _grpo(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, _: int) -> Tensor:
    """Mean over rows of the mean over the row's tokens (https://arxiv.org/abs/2402.03300, equation 3)."""
    return _share(row_means(loss_N, row_N, rows).sum(), counts.rows, counts)


def _dapo(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, _: int) -> Tensor:
    """Sum over all tokens over their number (DAPO, https://arxiv.org/abs/2503.14476)."""
    return _share(loss_N.sum(), counts.tokens, counts)


def _bnpo(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, _: int) -> Tensor:
    """Mean over the tokens of the micro-batch, then over the micro-batches: depends on how rows are split."""
    return _share(loss_N.sum() / max(loss_N.numel(), 1), counts.micro_batches, counts)


def _dr_grpo(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, length: int) -> Tensor:
    """Sum over all tokens over a constant, rows x length (https://arxiv.org/abs/2503.20783)."""
    return _share(loss_N.sum(), counts.rows * length, counts)


def _share(total: Tensor, denominator: int, counts: Denominators) -> Tensor:
    """Divide by a count of the step; a step without trained tokens has loss 0."""
    return total * (counts.world_size / max(denominator, 1))


LOSS_TYPES: dict[str, Callable[[Tensor, Tensor, int, Denominators, int], Tensor]] = {
    "grpo": _grpo,
    "dapo": _dapo,
    "bnpo": _bnpo,
    "dr_grpo": _dr_grpo,
}
"""The aggregation of each loss type."""
