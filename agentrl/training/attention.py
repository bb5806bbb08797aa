"""Attention within segments: packed rows that do not see each other, and beginnings that several rows see.

transformers builds a mask of length x length for packed rows under sdpa, so that packing costs more than the padding it
saves. Here the mask is never built. The forward pass carries the segments of the packed tokens as a keyword argument,
as it carries the sequence lengths for flash attention, and attention runs on each segment alone, causal, without a mask
where it needs none.

transformers looks its attention functions up by name, and gradient checkpointing looks them up again in the backward
pass. So importing this module teaches "sdpa" itself the argument; without the argument it is what it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.training.packing import Segment

Attention = Callable[..., tuple[Tensor, Any]]


def attend_segments(
    attend: Attention,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Sequence[Segment] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Run attention on each segment of packed tokens by itself.

    Args:
        attend: The attention function for one segment, in the form that transformers calls them.
        module: The layer.
        query: (1, heads, T, D).
        key: (1, key heads, T, D).
        value: (1, key heads, T, D).
        attention_mask: Not looked at where there are segments.
        segments: In order, covering all T tokens, each behind its parent; None: one call as it came.
        sliding_window: Tokens that a position sees, itself included; None for all.
        **options: Passed on.

    Returns:
        (1, T, heads, D), and None.
    """
    if segments is None:
        return attend(module, query, key, value, attention_mask, sliding_window=sliding_window, **options)
    # Split at once, not cut out one by one: the gradient of a cut is as long as all segments together.
    lengths = [segment.stop - segment.start for segment in segments]
    parts = zip(segments, *(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    seen: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for segment, queries, keys, values in parts:
        if segment.parent is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(seen[segment.parent], (keys, values), strict=True))
        seen.append((keys, values))
        mask = _mask(segment, sliding_window, query.device)
        outputs.append(attend(module, queries, keys, values, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def _mask(segment: Segment, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each position of a segment sees, (1, 1, own tokens, all tokens); None where causality says it all."""
    if not segment.before and (window is None or segment.length <= window):
        return None
    key_K = torch.arange(segment.length, device=device)
    query_Q1 = key_K[segment.before :, None]
    mask_QK = key_K <= query_Q1
    if window is not None:
        mask_QK &= key_K > query_Q1 - window
    return mask_QK[None, None]


@contextmanager
def recorded_windows() -> Iterator[list[int | None]]:
    """Give a list that meanwhile gets the sliding window of each call with segments."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    windows: list[int | None] = []

    def record(*args: Any, **options: Any) -> tuple[Tensor, Any]:
        if options.get("segments") is not None:
            windows.append(options.get("sliding_window"))
        return attend(*args, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = record
    try:
        yield windows
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # what is registered for all shows again


AttentionInterface.register("sdpa", functools.partial(attend_segments, ALL_ATTENTION_FUNCTIONS["sdpa"]))
