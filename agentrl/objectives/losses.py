"""Policy-gradient losses over flat tokens: from log-ratios and advantages to one loss a token (or a row).

How these losses become one scalar is the business of `aggregation`; what they are weighted by because another engine
sampled the tokens, that of `importance`; which tokens they are restricted to, that of `selection`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.objectives.segments import row_counts, row_means, row_sums

IMPORTANCE_LEVELS = ("token", "sequence")
"""Whether each token has its own importance ratio or shares that of its row."""

LARGEST_LOG_RATIO = 20.0
"""Ratios are at most e to this. The sum of a row's log-ratios passes 88 easily, where float32 has no number for the
ratio, and the gradient that clipping multiplies by 0 would be 0 x inf = NaN. No bound of clipping lies near e^20; the
loss of a negative advantage beyond it is constant, as beyond c in dual-clip PPO (Ye et al. 2020,
https://arxiv.org/abs/1912.09729, equation 5)."""


class Surrogate(NamedTuple):
    """A clipped loss and where clipping acted; one entry a token, or a row for `rloo_loss`.

    Attributes:
        loss: The loss, to be minimised.
        clipped_low: Ratio below the lower bound at a negative advantage.
        clipped_high: Ratio above the upper bound at a positive advantage.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


class WeightedLoss(NamedTuple):
    """A loss of REINFORCE with a constant weight, one entry a token.

    Attributes:
        loss: -weight x advantage x log pi, to be minimised.
        weight: The weight; no gradient.
    """

    loss: Tensor
    weight: Tensor


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


def ratios(log_ratio: Tensor) -> Tensor:
    """The importance ratio, min(exp(log_ratio), exp(LARGEST_LOG_RATIO)); without gradient where the bound acts."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float, delta: float | None = None
) -> Surrogate:
    """The clipped surrogate of PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7).

        l = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A),   r = exp(log_ratio)

    with r at most exp(`LARGEST_LOG_RATIO`). Different bounds are those of DAPO (Yu et al. 2025,
    https://arxiv.org/abs/2503.14476). With `delta` the first r is min(r, delta), which bounds the loss of a negative
    advantage at a large ratio (Prime Intellect 2025, INTELLECT-2, https://arxiv.org/abs/2505.07291, two-sided
    clipping).

    Args:
        log_ratio: Per token (N,) or per row (R,).
        advantages: The same shape; a row's advantage at each of its tokens.
        epsilon_low: Distance of the lower bound from 1.
        epsilon_high: Distance of the upper bound from 1.
        delta: Upper bound of the unclipped ratio, > 1 + epsilon_high; None for none.
    """
    ratio = ratios(log_ratio)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return Surrogate(
        loss=-torch.minimum(bounded * advantages, clipped * advantages),
        clipped_low=(ratio < 1 - epsilon_low) & (advantages < 0),
        clipped_high=(ratio > 1 + epsilon_high) & (advantages > 0),
    )


def cispo_loss(logps_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, epsilon_max: float) -> Surrogate:
    """REINFORCE whose importance weight is clipped, so that no token loses its gradient.

        l = -sg(min(r, epsilon_max)) A log pi,   r = exp(log_ratio)

    CISPO (MiniMax 2025, MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.1) without its lower bound,
    which the paper leaves unused, in the notation of ScaleRL (Khatri et al. 2025,
    https://arxiv.org/abs/2510.13786): the bound is a value of the ratio, not a distance from 1.

    Args:
        logps_N: Logprobs under the policy, (N,).
        log_ratio_N: Log-ratios, of either level, (N,).
        advantages_N: Advantages, (N,).
        epsilon_max: Largest weight, > 0.

    Returns:
        The loss; `clipped_high` is where the weight was clipped at a positive advantage, `clipped_low` nowhere.
    """
    ratio_N = log_ratio_N.detach().exp()
    clipped_N = (ratio_N > epsilon_max) & (advantages_N > 0)
    loss_N = -ratio_N.clamp(max=epsilon_max) * advantages_N * logps_N
    return Surrogate(loss_N, clipped_low=torch.zeros_like(clipped_N), clipped_high=clipped_N)


def sapo_loss(log_ratio_N: Tensor, advantages_N: Tensor, temperature_pos: float, temperature_neg: float) -> Tensor:
    """A smooth gate in the place of clipping.

        l = -f(r) A,   f(r) = 4 / tau sigmoid(tau (r - 1)),   tau = tau_pos if A > 0 else tau_neg

    At r = 1 the gate has slope 1, as the ratio itself; the slope fades on both sides (Gao et al. 2025, Soft
    Adaptive Policy Optimization, https://arxiv.org/abs/2511.20347).

    Args:
        log_ratio_N: Log-ratios, of either level, (N,).
        advantages_N: Advantages, (N,).
        temperature_pos: tau_pos, > 0.
        temperature_neg: tau_neg, > 0; the larger, the faster the slope fades.

    Returns:
        (N,).
    """
    tau_N = torch.full_like(log_ratio_N, temperature_neg).masked_fill(advantages_N > 0, temperature_pos)
    return -(4 / tau_N) * torch.sigmoid(tau_N * (ratios(log_ratio_N) - 1)) * advantages_N


def vespo_loss(
    logps_N: Tensor,
    log_weight_R: Tensor,
    advantages_N: Tensor,
    row_N: Tensor,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> WeightedLoss:
    """REINFORCE with a smooth weight of the importance weight of the whole row.

        l = -sg(phi(w)) A log pi,   phi(w) = w^k exp(lambda (1 - w))

    where w is the importance weight of the row, the product over its tokens, without normalisation by length;
    k and lambda depend on the sign of A. phi(1) = 1 (Shen et al. 2026, VESPO, https://arxiv.org/abs/2602.10693).

    Args:
        logps_N: Logprobs under the policy, (N,).
        log_weight_R: Log of the importance weight of each row, -inf for a row that is left out, (R,).
        advantages_N: Advantages, (N,).
        row_N: Row of each token, int64 (N,).
        k_pos: k at advantages >= 0, > 0: how fast phi falls towards w = 0.
        lambda_pos: lambda there, > 0: how fast phi falls towards large w.
        k_neg: k at negative advantages, > 0.
        lambda_neg: lambda there, > 0.
    """
    log_w_N = log_weight_R.detach()[row_N]
    positive_N = advantages_N >= 0
    k_N = torch.full_like(log_w_N, k_neg).masked_fill(positive_N, k_pos)
    lambda_N = torch.full_like(log_w_N, lambda_neg).masked_fill(positive_N, lambda_pos)
    # In log space: where w overflows, phi is exp(-inf) = 0 as it should be.
    phi_N = (k_N * log_w_N + lambda_N * (1 - log_w_N.exp())).exp()
    return WeightedLoss(-phi_N * advantages_N * logps_N, phi_N)


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
