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
    uniforms_N = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_NV.device)
    rows, vocab_size = logprobs_NV.shape
    probs_NV = logprobs_NV.exp()
    whole = vocab_size // _BLOCK * _BLOCK
    mass_NK = torch.cat(
        [
            probs_NV[:, :whole].view(rows, -1, _BLOCK).sum(-1),
            probs_NV[:, whole:].sum(-1, keepdim=True),
        ],
        dim=-1,
    )
    block_N, rest_N = _invert(mass_NK, uniforms_N)
    ids_NB = (block_N[:, None] * _BLOCK + torch.arange(_BLOCK, device=block_N.device)).clamp(max=vocab_size)
    inside_NB = ids_NB < vocab_size
    probs_NB = probs_NV.gather(-1, ids_NB.clamp(max=vocab_size - 1)) * inside_NB
    return ids_NB.gather(-1, _invert(probs_NB, rest_N)[0][:, None])[:, 0]


def _invert(mass_NK: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Find the cell that each uniform falls in, and how far into the cell it falls, in [0, 1)."""
    cdf_NK = mass_NK.double().cumsum(-1)
    total_N1 = cdf_NK[:, -1:]
    # Below the total even where the product rounds up to it: beyond it there are only cells without mass.
    target_N1 = torch.minimum(uniforms_N[:, None] * total_N1, total_N1.nextafter(torch.zeros_like(total_N1)))
    cell_N1 = torch.searchsorted(cdf_NK, target_N1, right=True)
    size_N1 = mass_NK.gather(-1, cell_N1).double()
    rest_N1 = (target_N1 - cdf_NK.gather(-1, cell_N1) + size_N1) / size_N1
    return cell_N1[:, 0], rest_N1[:, 0].clamp(0.0, 1.0)
