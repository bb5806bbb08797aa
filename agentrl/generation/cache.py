"""A key/value cache whose rows come and go: one slot a session, kept for as long as the session lives.

Each layer holds its keys and values as [slots, heads, length, head_dim]. Before a forward pass the caller
sets the `Step`: which slots its rows are, and at which (slot, position) the new tokens go. `update` writes
them and returns what the rows hold. Rows in consecutive slots are read as a view, without a copy; that is
why the scheduler keeps the decoding rows at the front. Slots and length change by `resize`, one layer at a
time.

The cache knows no tokens: which positions of a slot are valid is known to the scheduler and to the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True)
class Step:
    """Where one forward pass over B rows of Q tokens (padded on the right) reads and writes.

    Attributes:
        rows: The B slots, as a slice when they are consecutive, else as an int64 tensor.
        batch: Row in the batch of each of the N real tokens, int64 [N].
        column: Column in the batch of each, int64 [N].
        slot: Slot that each goes to, int64 [N].
        position: Position in the slot that each goes to, int64 [N].
        length: Positions of the rows to read.
    """

    rows: slice | Tensor
    batch: Tensor
    column: Tensor
    slot: Tensor
    position: Tensor
    length: int

    def new(self, states_BHQD: Tensor) -> Tensor:
        """The states of the real tokens, [N, heads, head_dim]."""
        if states_BHQD.shape[2] == 1:
            return states_BHQD[:, :, 0]  # one of each row, and no copy
        return states_BHQD[self.batch, :, self.column]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer, by slot."""

    is_sliding = False

    def __init__(self, cache: SlotCache):
        super().__init__()
        self.cache = cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots; called with the first keys [B, heads, Q, head_dim] and values of a layer."""
        slots, length = self.cache.slots, self.cache.length
        self.keys = key_states.new_zeros(slots, key_states.shape[1], length, key_states.shape[-1])
        self.values = value_states.new_zeros(slots, value_states.shape[1], length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values [B, heads, Q, head_dim]; return all that the rows hold."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        step = self.cache.step
        # Advanced indices around the heads' slice put the tokens first: both sides are [N, heads, head_dim].
        self.keys[step.slot, :, step.position] = step.new(key_states)
        self.values[step.slot, :, step.position] = step.new(value_states)
        if isinstance(step.rows, slice):
            return self.keys[step.rows, :, : step.length], self.values[step.rows, :, : step.length]
        # The length is cut first, so that only what is read is gathered.
        return self.keys[:, :, : step.length][step.rows], self.values[:, :, : step.length][step.rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns; the masks are explicit, but models ask."""
        return self.cache.step.length, 0

    def get_seq_length(self) -> int:
        """Unused by models that are given position ids; the rows have no common length."""
        return 0

    def get_max_length(self) -> int:
        """Positions of a slot."""
        return self.cache.length


class SlotCache(Cache):
    """The layers of a model, resized and moved together.

    Attributes:
        slots: Number of slots.
        length: Positions of a slot.
        step: Where the current forward pass reads and writes.
    """

    step: Step

    def __init__(self, layers: int):
        self._slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))
        self.slots = 0
        self.length = 0

    def resize(self, slots: int, length: int, keep: Sequence[tuple[int, int]]) -> None:
        """Change the number of slots and their length.

        Args:
            slots: New number of slots.
            length: New number of positions of a slot.
            keep: For each slot that lives on, in the order of their new slots from 0: its old slot and how
                many
                of its positions are worth keeping.
        """
        self.slots, self.length = slots, length
        for layer in self._slot_layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                if old is None:
                    continue
                new = old.new_zeros(slots, old.shape[1], length, old.shape[-1])
                for slot, (source, valid) in enumerate(keep):
                    new[slot, :, :valid] = old[source, :, :valid]
                setattr(layer, name, new)
                del old, new  # only one tensor exists twice at a time

    def clear(self) -> None:
        """Free all memory; the next step starts from `resize`."""
        self.slots = self.length = 0
        for layer in self._slot_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another one."""
        for layer in self._slot_layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[target, :, :length] = tensor[source, :, :length]

    def rearrange(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of slots to others, all at once: a slot may be source and target."""
        tensors = [tensor for layer in self._slot_layers for tensor in (layer.keys, layer.values) if tensor is not None]
        if not tensors:
            return
        source_M, target_M = torch.tensor([sources, targets], device=tensors[0].device)
        for tensor in tensors:
            # The right side is a copy before anything is written.
            tensor[:, :, :length][target_M] = tensor[:, :, :length][source_M]


def plan_step(
    slots_B: Sequence[int], starts_B: Sequence[int], counts_B: Sequence[int], device: torch.device
) -> tuple[Step, Tensor]:
    """Lay out a forward pass over B rows, each continuing its slot.

    Args:
        slots_B: Slot of each row.
        starts_B: Position of each row's first new token.
        counts_B: New tokens of each row, at least 1.
        device: Where the model is.

    Returns:
        The step, and the position ids [B, Q] with Q the largest count. Padding has position 0, so that it
        attends to something and gives no NaN.
    """
    slot_B, start_B, count_B = torch.tensor([slots_B, starts_B, counts_B], device=device)
    column_1Q = torch.arange(max(counts_B), device=device)[None]
    real_BQ = column_1Q < count_B[:, None]
    position_BQ = (start_B[:, None] + column_1Q) * real_BQ
    batch_N, column_N = real_BQ.nonzero(as_tuple=True)
    first = slots_B[0]
    consecutive = list(slots_B) == list(range(first, first + len(slots_B)))
    step = Step(
        rows=slice(first, first + len(slots_B)) if consecutive else slot_B,
        batch=batch_N,
        column=column_N,
        slot=slot_B[batch_N],
        position=position_BQ[batch_N, column_N],
        length=max(start + count for start, count in zip(starts_B, counts_B, strict=True)),
    )
    return step, position_BQ
