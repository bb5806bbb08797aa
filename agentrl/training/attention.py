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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding
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
    """Run attention on each segment of packed tokens by itself, on all those of one shape at once.

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
    plan = _plan(tuple(segments), query.device)
    own = [group.size * group.own for group in plan.groups]
    seen = [group.size * group.length for group in plan.groups]
    # Looked up at once and split: the gradient of a part that is cut out is as long as all tokens together.
    looked_up = (
        _look_up(states[0].transpose(0, 1), places).split(sizes)
        for states, places, sizes in ((query, plan.query_T, own), (key, plan.key_K, seen), (value, plan.key_K, seen))
    )
    outputs = []
    for group, *parts in zip(plan.groups, *looked_up, strict=True):
        queries, keys, values = (part.unflatten(0, (group.size, -1)).transpose(1, 2) for part in parts)
        mask = _mask(group, sliding_window, query.device)
        outputs.append(attend(module, queries, keys, values, mask, **options)[0].flatten(0, 1))
    return _look_up(torch.cat(outputs), plan.output_T)[None], None


class _Group(NamedTuple):
    """Segments of one shape: how many, and each one's own tokens and all that it sees."""

    size: int
    own: int
    length: int


class _Plan(NamedTuple):
    """How attention runs on segments: once for all of a shape.

    Attributes:
        groups: The shapes.
        query_T: Which tokens ask, by group.
        key_K: Which tokens each segment of a group sees, its own last.
        output_T: Where what each token got is among those who asked.
    """

    groups: list[_Group]
    query_T: Tensor
    key_K: Tensor
    output_T: Tensor


@functools.lru_cache(maxsize=4)  # all layers of a forward and a backward pass ask for the same one
def _plan(segments: tuple[Segment, ...], device: torch.device) -> _Plan:
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    seen: list[list[int]] = []
    for number, segment in enumerate(segments):
        before = [] if segment.parent is None else seen[segment.parent]
        seen.append([*before, *range(segment.start, segment.stop)])
        alike[segment.stop - segment.start, segment.length].append(number)
    order = [number for numbers in alike.values() for number in numbers]
    query_T = torch.tensor([t for n in order for t in range(segments[n].start, segments[n].stop)], device=device)
    return _Plan(
        groups=[_Group(len(numbers), own, length) for (own, length), numbers in alike.items()],
        query_T=query_T,
        key_K=torch.tensor([t for n in order for t in seen[n]], device=device),
        output_T=query_T.argsort(),
    )


def _look_up(states_THD: Tensor, places: Tensor) -> Tensor:
    """States at places, each as often as it is looked up.

    By the one look-up whose gradient adds up in the same order every time, on every device and with any threads.
    """
    return embedding(places, states_THD.flatten(1)).unflatten(1, states_THD.shape[1:])


def _mask(group: _Group, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each position of a segment sees, (1, 1, own tokens, all tokens); None where causality says it all."""
    if group.own == group.length and (window is None or group.length <= window):
        return None
    key_K = torch.arange(group.length, device=device)
    query_Q1 = key_K[group.length - group.own :, None]
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
