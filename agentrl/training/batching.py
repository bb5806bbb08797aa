"""From trajectories to the tensors of one forward pass, and to the flat targets that are trained in it.

A row of a micro-batch is a trajectory: what has one advantage, one place in the denominators, one sum of logprobs. The
model reads it as one sequence, prompt and completion, or as several where the episode forked. The row's targets are
the sampled tokens of all its sequences; each is predicted from the position before it in its own sequence, so no target
crosses from one sequence to the next. Sequences lie in one of three layouts; everything after this module sees targets
only: a row that is excluded from training keeps its place and has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from itertools import chain
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from agentrl.chat.images import image_types, join_inputs, model_ids
from agentrl.objectives.aggregation import Denominators
from agentrl.training.packing import Segment, pack
from agentrl.types import Row, Trajectory

Item = TypeVar("Item")


class Layout(Enum):
    """How the sequences of a micro-batch lie in its tensors.

    Attributes:
        PADDED: Side by side, padded on the right.
        PACKED: End to end; the model tells them apart by their positions, which start again at each sequence.
        SHARED: End to end, and what several sequences begin with, a prompt above all, stands once, before what they go
            on with; attention is told the segments.
    """

    PADDED = auto()
    PACKED = auto()
    SHARED = auto()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R rows in S sequences and their N targets. Targets are ordered by row, then by sequence and position.

    Attributes:
        input_ids: int64 (S, T), or (1, T) when packed.
        attention_mask: 1 on the tokens of sequences, 0 on padding, (S, T); None when packed.
        position_ids: Positions that start again at each sequence, (1, T); None when padded, where the model
            counts.
        sequences_at: Where the tokens of each sequence stand in the flattened `input_ids`, in ascending order, by
            stretches.
        segments: What attention keeps apart, in order, for a model that is told; else None.
        target_index_N: Index in the flattened `input_ids` of the position that predicts the target, int64
            (N,).
        target_ids_N: The targets, int64 (N,).
        row_N: Row of each target, int64 (N,).
        sequence_N: Sequence of each target, int64 (N,).
        sampler_logps_N: Logprob of each target as the generator reported it, float32 (N,).
        advantages_R: Advantage of each row, float32 (R,).
        turn_advantages_N: Advantage of each target, float32 (N,), when turns of a row have advantages of their own;
            None when all targets have their row's. `advantages_R` is then that of the first turn.
        old_logps_N: Logprobs under the policy that the trainer began the window with, when that is no longer the
            policy itself. It is the one that sampled, except of stale targets.
        ref_logps_N: Logprobs under the reference policy, when there is one.
        stale_N: Which targets older weights drew than those that the trainer began the window with, bool (N,); None
            when none.
        denominators: Counts of the optimizer step that the batch belongs to, once they are known.
        image_types: Which tokens of `input_ids` stand for images, 1 for those; None where no sequence has one.
        images: Inputs of the vision tower for the images of all sequences, in order, by name.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    sequences_at: tuple[tuple[range, ...], ...]
    segments: tuple[Segment, ...] | None
    target_index_N: Tensor
    target_ids_N: Tensor
    row_N: Tensor
    sequence_N: Tensor
    sampler_logps_N: Tensor
    advantages_R: Tensor
    old_logps_N: Tensor | None = None
    ref_logps_N: Tensor | None = None
    turn_advantages_N: Tensor | None = None
    stale_N: Tensor | None = None
    denominators: Denominators | None = None
    image_types: Tensor | None = None
    images: dict[str, Tensor] = field(default_factory=dict)

    @property
    def target_advantages(self) -> Tensor:
        """Advantage of each target, (N,)."""
        return self.advantages_R[self.row_N] if self.turn_advantages_N is None else self.turn_advantages_N

    @property
    def rows(self) -> int:
        """R, the rows without targets included."""
        return self.advantages_R.numel()

    @property
    def tokens(self) -> int:
        """N, the number of targets."""
        return self.row_N.numel()

    @property
    def trained_rows(self) -> int:
        """Number of rows that have a target."""
        return self.row_N.unique().numel()

    def model_inputs(self) -> dict[str, Any]:
        """The keyword arguments of the model's forward, but for images."""
        inputs = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
            "segments": self.segments,
        }
        if self.segments is not None:
            # With four dimensions it passes for a mask that is ready; nobody looks at it, and none is built.
            inputs["attention_mask"] = self.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool)
        return {name: value for name, value in inputs.items() if value is not None}

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same batch on a device."""
        moved: dict[str, Any] = {
            spec.name: value.to(device)
            for spec in fields(self)
            if isinstance(value := getattr(self, spec.name), Tensor)
        }
        images = {name: value.to(device) for name, value in self.images.items()}
        return replace(self, **moved, images=images)


def collate(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    advantages: Sequence[float] | None = None,
    trained: Sequence[bool] | None = None,
    layout: Layout = Layout.PADDED,
    pad_to_multiple_of: int | None = None,
    placeholder_id: int | None = None,
) -> MicroBatch:
    """Lay out trajectories for one forward pass.

    Args:
        trajectories: The rows.
        pad_token_id: Fills the padding; it may equal an id that rows contain, since what is attended to comes
            from the lengths.
        advantages: Advantage of each row; None means 0.
        trained: Whether each row is trained; the others have no targets. None means all.
        layout: How the sequences lie. The model has to support it: see `agentrl.training.layouts`.
        pad_to_multiple_of: Round the padded length, or that of the packed tokens together, up to a multiple of
            this.
        placeholder_id: The id that stands for a feature of an image, for a model that has images; rows with images lie
            padded.

    Raises:
        ValueError: A row is misaligned, its first token is a target, or there is not one advantage or flag
            per row.
    """
    count = len(trajectories)
    for name, values in (("advantages", advantages), ("trained", trained)):
        if values is not None and len(values) != count:
            raise ValueError(f"{count} trajectories but {len(values)} {name}")
    owners = [r for r, trajectory in enumerate(trajectories) for _ in trajectory.rows]
    sequences = [row for trajectory in trajectories for row in trajectory.rows]
    spans = [span for sequence in sequences for span in sequence.images]
    if layout is Layout.PADDED or not count:
        inputs = _pad(sequences, pad_token_id, pad_to_multiple_of, placeholder_id)
    elif spans:
        raise ValueError(f"rows with images cannot lie {layout.name}; expected PADDED")
    else:
        inputs = _pack(sequences, pad_token_id, pad_to_multiple_of, share=layout is Layout.SHARED)
    if spans:
        inputs |= {"images": join_inputs([span.image for span in spans])}

    index, ids, row_of, sequence_of, logps = [], [], [], [], []
    for s, (r, sequence, place) in enumerate(zip(owners, sequences, inputs["sequences_at"], strict=True)):
        positions = _targets(r, sequence) if trained is None or trained[r] else []
        before = [*chain(*place)]
        offset = len(sequence.prompt_ids)
        for c in positions:
            index.append(before[offset + c - 1])
            ids.append(sequence.completion_ids[c])
            row_of.append(r)
            sequence_of.append(s)
            logps.append(sequence.logprobs[c])
    return MicroBatch(
        **inputs,
        target_index_N=torch.tensor(index, dtype=torch.int64),
        target_ids_N=torch.tensor(ids, dtype=torch.int64),
        row_N=torch.tensor(row_of, dtype=torch.int64),
        sequence_N=torch.tensor(sequence_of, dtype=torch.int64),
        sampler_logps_N=torch.tensor(logps, dtype=torch.float32),
        advantages_R=torch.tensor([0.0] * count if advantages is None else advantages, dtype=torch.float32),
    )


def counts_of(batches: Sequence[MicroBatch], world_size: int) -> Denominators:
    """Count what an optimizer step divides by, over its micro-batches in all processes, which call this together."""
    local = [(batch.trained_rows, batch.tokens, int(batch.tokens > 0)) for batch in batches]
    everywhere = gather_object(local) if world_size > 1 else local
    rows, tokens, micro_batches = (sum(column) for column in zip(*everywhere, strict=True)) if everywhere else (0,) * 3
    return Denominators(rows, tokens, micro_batches, world_size)


def split(rows: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Cut a window of rows into micro-batches of `size` rows, in order; the last one may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _pad(
    sequences: Sequence[Row], pad_token_id: int, multiple: int | None, placeholder_id: int | None
) -> dict[str, Any]:
    """Sequences side by side."""
    rows = [
        model_ids(sequence.prompt_ids + sequence.completion_ids, sequence.images, placeholder_id)
        for sequence in sequences
    ]
    # No model runs on no tokens at all; what nobody has a row for is padding that nobody looks at.
    rows = rows or [[pad_token_id]]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    width = _round_up(max([1, *map(len, rows)]), multiple)
    padded = [row + [pad_token_id] * (width - len(row)) for row in rows]
    types = None
    if placeholder_id is not None and any(sequence.images for sequence in sequences):
        own = [image_types(row, s.images, placeholder_id) for row, s in zip(rows, sequences, strict=True)]
        types = torch.tensor([row + [0] * (width - len(row)) for row in own], dtype=torch.int64)
    return {
        "input_ids": torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width),
        "image_types": types,
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
        "position_ids": None,
        "sequences_at": tuple(
            (range(s * width, s * width + len(row)),) for s, row in enumerate(rows[: len(sequences)])
        ),
        "segments": None,
    }


def _pack(sequences: Sequence[Row], pad_token_id: int, multiple: int | None, *, share: bool) -> dict[str, Any]:
    """Sequences end to end."""
    rows = [sequence.prompt_ids + sequence.completion_ids for sequence in sequences]
    ids, segments, places = pack(rows, share=share)
    if padding := _round_up(max(len(ids), 1), multiple) - len(ids):  # no model runs on no tokens at all
        segments.append(Segment(len(ids), len(ids) + padding))  # nothing sees it, and it sees nothing
        ids += [pad_token_id] * padding
    positions = chain.from_iterable(range(segment.before, segment.length) for segment in segments)
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int64),
        "attention_mask": None,
        "position_ids": torch.tensor([list(positions)], dtype=torch.int64),
        "sequences_at": tuple(places),
        "segments": tuple(segments) if share else None,
    }


def _round_up(length: int, multiple: int | None) -> int:
    return -(-length // multiple) * multiple if multiple else length


def _targets(r: int, sequence: Row) -> list[int]:
    """Where in the completion the sampled tokens stand."""
    mask, logps = sequence.loss_mask, sequence.logprobs
    if not len(sequence.completion_ids) == len(mask) == len(logps):
        raise ValueError(
            f"row {r} has {len(sequence.completion_ids)} completion ids, {len(mask)} mask entries and "
            f"{len(logps)} logprobs; expected one of each per token"
        )
    targets = [c for c, sampled in enumerate(mask) if sampled]
    if targets and targets[0] == 0 and not sequence.prompt_ids:
        raise ValueError(f"row {r} has an empty prompt: no position predicts its first sampled token")
    return targets
