"""Importance weights between the engine that sampled the tokens and the trainer that scores them.

The two compute the same distribution with other kernels, precisions and batches, so the samples are slightly
off-policy before anything was learned. The weight of a token is

    rho = pi_trainer / pi_sampler,   both of the weights that sampled

for each token, or multiplied over the tokens of a row. Whatever reports the logprob of the tokens it drew can be
corrected so; a token whose logprob the sampler does not know (NaN) counts as drawn from the trainer's distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.objectives.segments import row_sums

TOKEN_MODES = ("token_truncate", "token_mask")
SEQUENCE_MODES = ("sequence_truncate", "sequence_mask")
CORRECTION_MODES = TOKEN_MODES + SEQUENCE_MODES
"""Whose weights are bounded, and what happens to those out of bounds: truncated to them, or set to 0."""


def sampling_weights(
    log_ratio_N: Tensor,
    row_N: Tensor,
    rows: int,
    mode: str,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Tensor:
    """The constrained importance weights.

        token:     rho_t = exp(log pi_trainer(t) - log pi_sampler(t))
        sequence:  rho = exp(sum over the row of log pi_trainer - log pi_sampler)
        truncate:  min(max(rho, C_min), C_max)
        mask:      rho where C_min <= rho <= C_max, else 0

    Truncation is that of Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl), which has the upper bound
    only; masking that of IcePop (Ling Team 2025, https://ringtech.notion.site/icepop); weights of whole rows those
    of When Speed Kills Stability (Liu et al. 2025, https://yingru.notion.site, 271211a558b7808d8b12d403fd15edda).

    Args:
        log_ratio_N: log pi_trainer - log pi_sampler, NaN where the sampler does not know, (N,).
        row_N: Row of each token, int64 (N,).
        rows: R.
        mode: One of `CORRECTION_MODES`.
        clip_min: C_min; None for none.
        clip_max: C_max; None for none.

    Returns:
        (N,) in the token modes, (R,) in the sequence modes, where a row without trained tokens has an empty
        product, constrained as the others. No gradient.

    Raises:
        ValueError: `mode` is unknown.
    """
    if mode not in CORRECTION_MODES:
        raise ValueError(f"unknown importance sampling mode {mode!r}; it is one of {', '.join(CORRECTION_MODES)}")
    log_weight = log_ratio_N.detach().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if mode in SEQUENCE_MODES:
        log_weight = row_sums(log_weight, row_N, rows)
    weight = log_weight.exp()
    low = 0.0 if clip_min is None else clip_min
    high = torch.finfo(weight.dtype).max if clip_max is None else clip_max  # an overflow is out of any bounds
    if mode.endswith("truncate"):
        return weight.clamp(low, high)
    return weight.where((weight >= low) & (weight <= high), 0.0)


def weights_of_tokens(weights: Tensor, row_N: Tensor, mode: str) -> Tensor:
    """Give each token its weight, (N,): its own, or in the sequence modes that of its row."""
    return weights[row_N] if mode in SEQUENCE_MODES else weights


def log_weights_of_rows(weights: Tensor, row_N: Tensor, rows: int, mode: str) -> Tensor:
    """Log of the weight of each row, (R,): in the token modes the product over its tokens; -inf where it is 0."""
    return weights.log() if mode in SEQUENCE_MODES else row_sums(weights.log(), row_N, rows)
