"""What is added to the policy loss to keep the policy near another one, or spread out."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.objectives.aggregation import Denominators


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


def entropy_bonus(entropy_N: Tensor, counts: Denominators, selected_N: Tensor | None = None) -> Tensor:
    """A micro-batch's part of the mean entropy of a token over the optimizer step.

        H = sum over the step's trained tokens of H_t / their number

    The objective is `loss - coefficient * H`, whatever the loss itself is divided by. The parts of a step add
    up to H however its rows are split.

    Args:
        entropy_N: Entropy at each trained token, differentiable, (N,).
        counts: Counts of the step.
        selected_N: bool (N,), the tokens that take part; None: all. A selection is made within a micro-batch,
            so then the mean over its selected tokens counts by its share of the step's tokens.

    Returns:
        A scalar; 0 with a graph when there are no tokens.
    """
    kept = entropy_N if selected_N is None else entropy_N[selected_N]
    mean = kept.sum() / max(kept.numel(), 1)
    return mean * (entropy_N.numel() * counts.world_size / max(counts.tokens, 1))


def adapted_coefficient(
    coefficient: float, entropy: float, *, target: float, delta: float, lowest: float, highest: float
) -> float:
    """The entropy coefficient after an optimizer step of measured entropy.

    One step of `delta` up when the entropy is at or below the target, else one down, within bounds (He et al.
    2025, Skywork Open Reasoner 1, https://arxiv.org/abs/2505.22312).
    """
    if entropy <= target:
        return min(coefficient + delta, highest)
    return max(coefficient - delta, lowest)
