"""The distribution a token is drawn from, as pure tensor functions.

The generator draws from this distribution and the trainer scores under it, so both call the same functions
and an unchanged policy has ratio 1 whatever the sampling parameters are. The order is that of transformers'
logits
processors: repetition penalty, temperature, top-k, top-p, min-p. Everything is computed in float32.

Shapes: N positions, V vocabulary, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.generation.base import SamplingParams

_BLOCK = 256
"""Ids a block when drawing."""
_BELOW_ONE = 1.0 - 2.0**-52
"""The product of a float64 and this is less than the float64, however it is rounded."""
_NUCLEUS = 1024
"""Likeliest tokens looked at first for top-p."""


def process_logits(
    logits_NV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    suppress_tokens: Sequence[int] | None = None,
    seen_NV: Tensor | None = None,
    keep_N: Tensor | None = None,
) -> Tensor:
    """Turn a model's logits into the logprobs that sampling uses. Differentiable with respect to the logits.

    Args:
        logits_NV: Logits of N positions, any floating dtype.
        temperature: Divides the logits after the penalty.
        top_k: Keep the k likeliest tokens (and what ties with the last of them); 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches it.
        min_p: Keep tokens at least this fraction as likely as the likeliest; None keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of seen tokens.
        suppress_tokens: See `suppress`.
        seen_NV: Which ids occur in the row before the position; needed with a repetition penalty. See
            `seen_before`.
        keep_N: Ids that stay in the support even where top-k, top-p or min-p would drop them: the sampled
            ids when scoring, whose logprob must stay finite after the policy has moved.

    Returns:
        float32 logprobs [N, V], normalised over the kept tokens; -inf elsewhere.

    Raises:
        ValueError: A repetition penalty was given without `seen_NV`.
    """
    scores_NV = suppress(logits_NV, suppress_tokens, keep_N).float()
    if repetition_penalty != 1.0:
        if seen_NV is None:
            raise ValueError("repetition_penalty needs seen_NV: which ids occur before each position")
        penalised_NV = torch.where(scores_NV < 0, scores_NV * repetition_penalty, scores_NV / repetition_penalty)
        scores_NV = torch.where(seen_NV, penalised_NV, scores_NV)
    if temperature != 1.0:
        scores_NV = scores_NV / temperature
    if truncates(top_k=top_k, top_p=top_p, min_p=min_p):
        drop_NV = _dropped(scores_NV.detach(), top_k, top_p, min_p)
        if keep_N is not None:
            drop_NV &= torch.arange(drop_NV.shape[-1], device=drop_NV.device) != keep_N[:, None]
        scores_NV = scores_NV.masked_fill(drop_NV, -torch.inf)
    return scores_NV.log_softmax(-1)


def suppress(logits_NV: Tensor, tokens: Sequence[int] | None, keep_N: Tensor | None = None) -> Tensor:
    """Take tokens out of the support, before anything else is done to the logits.

    Args:
        logits_NV: Logits of N positions.
        tokens: Ids; None for none.
        keep_N: An id of each position that stays.

    Returns:
        The logits, -inf at the tokens.
    """
    if not tokens:
        return logits_NV
    left_NV = logits_NV.index_fill(-1, torch.tensor(tokens, device=logits_NV.device), -torch.inf)
    if keep_N is not None:
        left_NV = left_NV.scatter(-1, keep_N[:, None], logits_NV.gather(-1, keep_N[:, None]))
    return left_NV


def settings(params: SamplingParams) -> dict[str, Any]:
    """The keyword arguments of `process_logits` that sampling parameters stand for."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "suppress_tokens": params.suppress_tokens,
    }


def truncates(*, top_k: int = 0, top_p: float = 1.0, min_p: float | None = None) -> bool:
    """Whether these parameters remove tokens from the support."""
    return top_k > 0 or top_p < 1.0 or bool(min_p)


def needs_processing(
    *, top_k: int = 0, top_p: float = 1.0, min_p: float | None = None, repetition_penalty: float = 1.0
) -> bool:
    """Whether more than a temperature is set; if not, it is all `log_softmax(logits / temperature)`."""
    return repetition_penalty != 1.0 or truncates(top_k=top_k, top_p=top_p, min_p=min_p)


def _dropped(scores_NV: Tensor, top_k: int, top_p: float, min_p: float | None) -> Tensor:
    """Say which tokens top-k, then top-p, then min-p remove; the likeliest token always stays."""
    drop_NV = torch.zeros_like(scores_NV, dtype=torch.bool)
    if 0 < top_k < scores_NV.shape[-1]:
        drop_NV |= scores_NV < scores_NV.topk(top_k).values[:, -1:]
    if top_p < 1.0:
        drop_NV |= _outside_nucleus(scores_NV.masked_fill(drop_NV, -torch.inf), top_p)
    if min_p:
        # A ratio of probabilities is a difference of scores, so nothing needs to be normalised.
        gap_NV = scores_NV - scores_NV.amax(-1, keepdim=True)
        drop_NV |= gap_NV.exp() < min_p
    return drop_NV


def _outside_nucleus(scores_NV: Tensor, top_p: float) -> Tensor:
    """Say which tokens are outside the smallest set of likeliest tokens with probability `top_p`.

    A token stays when the tokens before it have less than `top_p` together. The set is nearly always small:
    the likeliest tokens are sorted first, and the whole vocabulary only for rows where they do not reach.
    """
    probs_NV = scores_NV.softmax(-1)
    head_NK, ids_NK = probs_NV.topk(min(_NUCLEUS, probs_NV.shape[-1]))
    kept_NK = head_NK.cumsum(-1) - head_NK < top_p
    drop_NV = torch.ones_like(probs_NV, dtype=torch.bool).scatter_(-1, ids_NK, ~kept_NK)
    if head_NK.shape[-1] < probs_NV.shape[-1] and bool((short_N := kept_NK[:, -1]).any()):
        sorted_MV, ids_MV = probs_NV[short_N].sort(dim=-1, descending=True)
        drop_NV[short_N] = drop_NV[short_N].scatter_(-1, ids_MV, sorted_MV.cumsum(-1) - sorted_MV >= top_p)
    return drop_NV


def first_occurrence(ids_T: Tensor, vocab_size: int) -> Tensor:
    """Index of each id's first occurrence in a row.

    Args:
        ids_T: The row's ids, int64.
        vocab_size: V.

    Returns:
        int64 [V]; T for ids that do not occur.
    """
    length = ids_T.shape[0]
    first_V = ids_T.new_full((vocab_size,), length)
    return first_V.scatter_reduce_(0, ids_T, torch.arange(length, device=ids_T.device), "amin")


def seen_before(first_NV: Tensor, position_N: Tensor) -> Tensor:
    """Which ids occur before each position.

    Args:
        first_NV: First occurrences, [V] of one row for all positions or [N, V] of each position's row.
        position_N: Index of the token that the position predicts.

    Returns:
        bool [N, V].
    """
    return first_NV < position_N[:, None]


def draw(logprobs_NV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution.

    One number from [0, 1) decides one row, so a row's token does not depend on the rows beside it. The search
    goes by blocks of the vocabulary, then within one block: a running sum in float64 (in float32 its rounding
    would move probability between tokens) over V entries costs several times what the softmax does.

    Returns:
        int64 ids [N]; never a token of probability 0.
    """
    rows, vocab_size = logprobs_NV.shape
    # Padded with probability 0 to whole blocks.
    probs_NKB = logprobs_NV.new_zeros(rows, -(-vocab_size // _BLOCK), _BLOCK)
    torch.exp(logprobs_NV, out=probs_NKB.view(rows, -1)[:, :vocab_size])
    uniforms_N1 = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_NV.device)[:, None]
    mass_NK = probs_NKB.sum(-1)
    cdf_NK = mass_NK.cumsum(-1, dtype=torch.float64)
    target_N1, block_N1 = _invert(cdf_NK, uniforms_N1)
    size_N1 = mass_NK.gather(-1, block_N1)
    # How far into the block the uniform falls, from 0 to 1.
    rest_N1 = (target_N1 - cdf_NK.gather(-1, block_N1) + size_N1) / size_N1
    probs_NB = probs_NKB.gather(1, block_N1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    _, cell_N1 = _invert(probs_NB.cumsum(-1, dtype=torch.float64), rest_N1)
    return (block_N1 * _BLOCK + cell_N1)[:, 0]


def _invert(cdf_NK: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Scale uniforms by the total of a running sum, and find the cell that each falls in; it has mass."""
    # Below the total even where the product rounds up to it: beyond it there are only cells without mass.
    target_N1 = uniforms_N1.clamp(0.0, _BELOW_ONE) * cdf_NK[:, -1:]
    return target_N1, torch.searchsorted(cdf_NK, target_N1, right=True)
