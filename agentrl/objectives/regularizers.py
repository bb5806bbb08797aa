"""What is added to the policy loss to keep the policy near another one, or spread out."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_k3(logps_N: Tensor, ref_logps_N: Tensor, ratio_N: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token.

        k3 = exp(ref - logp) - (ref - logp) - 1

    (Schulman 2020, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html): never negative, and
    differentiable in the policy. Given the importance ratio, the estimate is multiplied by it, so that its
    gradient is an unbiased one of the reverse KL, also on-policy where the ratio is 1 (DeepSeek-AI 2025,
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    Args:
        logps_N: Logprobs under the policy, (N,).
        ref_logps_N: Logprobs under the reference, (N,).
        ratio_N: policy / sampling policy, differentiable, (N,); None leaves the factor out.

    Returns:
        (N,).
    """
    difference_N = ref_logps_N - logps_N
    k3_N = torch.expm1(difference_N) - difference_N
    return k3_N if ratio_N is None else ratio_N * k3_N


def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy in nats of the distributions that logits describe.

        H = -sum_v p_v log p_v

    Args:
        logits_NV: Logits, -inf for tokens outside the support, (N, V). A chunk of tokens at a time keeps
            memory low.

    Returns:
        (N,), differentiable: tokens outside the support contribute 0 to value and gradient.
    """
    logps_NV = logits_NV.log_softmax(dim=-1)
    p_NV = logps_NV.exp()
    return -(p_NV * logps_NV.masked_fill(logps_NV == -torch.inf, 0.0)).sum(dim=-1)
