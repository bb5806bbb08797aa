"""Which trained tokens a policy loss is restricted to. What is left out keeps its place in the denominators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentrl.objectives.segments import row_means


def on_policy_tokens(
    logps_N: Tensor, sampler_logps_N: Tensor, advantages_N: Tensor, row_N: Tensor, rows: int, threshold: float
) -> Tensor:
    """Off-policy sequence masking: leave out rows that got worse than average and have drifted far.

        M = 0 where A < 0 and 1/|o| sum over the row of log pi_sampler - log pi > threshold, else 1

    (DeepSeek-AI 2025, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 9.) M multiplies the policy loss
    only, not the KL term. Samples that the policy has become unlikely to draw teach little about what it does now.

    Args:
        logps_N: Logprobs under the policy, (N,).
        sampler_logps_N: Logprobs as they were when the tokens were drawn, (N,). No NaN.
        advantages_N: Advantages, (N,).
        row_N: Row of each token, int64 (N,).
        rows: R.
        threshold: delta in the paper, > 0, in nats a token.

    Returns:
        bool (N,), True where the token is kept.
    """
    drift_N = row_means(sampler_logps_N - logps_N.detach(), row_N, rows)[row_N]
    return ~((advantages_N < 0) & (drift_N > threshold))


def entropy_threshold(entropy_N: Tensor, share: float) -> Tensor:
    """The entropy from which on a token belongs to the `share` of highest entropy.

        tau = the (floor(share (N - 1)) + 1)-th largest entropy

    so that share 1 keeps all tokens and 0 the highest only; the tokens with at least tau are those at or above the
    (1 - share)-quantile with linear interpolation (Wang et al. 2025, Beyond the 80/20 Rule,
    https://arxiv.org/abs/2506.01939).

    Args:
        entropy_N: Entropies of the trained tokens, (N,), in any order.
        share: rho in the paper, in [0, 1].

    Returns:
        A scalar; infinity without tokens.
    """
    count = entropy_N.numel()
    if not count:
        return entropy_N.new_full((), torch.inf)
    kept = math.floor(share * (count - 1) + 1e-9) + 1  # 0.29 x 100 is 28.999999999999996
    return entropy_N.detach().kthvalue(count - kept + 1).values
