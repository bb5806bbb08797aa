"""From trajectories to the tensors of one forward pass, and to the flat targets that are trained in it.

A row is a trajectory's prompt and completion. Its targets are the sampled tokens; each is predicted from the
position before it in its own row, so no target crosses from one row to the next. Rows lie side by side with
padding on the right, or packed end to end in one long row. Everything after this module sees targets only: a
row that is excluded from training keeps its place and has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from agentrl.objectives.losses import Denominators
from agentrl.types import Trajectory

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R rows and their N targets. Targets are ordered by row, then by position.

    Attributes:
        input_ids: int64 (R, T), or (1, T) when packed.
        attention_mask: 1 on the tokens of rows, 0 on padding, (R, T); None when packed.
        position_ids: Positions that start again at each row, (1, T); None when padded, where the model
            counts.
        starts: Index of each row's first token in the flattened `input_ids`.
        lengths: Tokens of each row.
        target_index_N: Index in the flattened `input_ids` of the position that predicts the target, int64
            (N,).
        target_ids_N: The targets, int64 (N,).
        row_N: Row of each target, int64 (N,).
        sampler_logps_N: Logprob of each target as the generator reported it, float32 (N,).
        advantages_R: Advantage of each row, float32 (R,).
        turn_advantages_N: Advantage of each target, float32 (N,), when turns of a row have advantages of their own;
            None when all targets have their row's. `advantages_R` is then that of the first turn.
        old_logps_N: Logprobs under the policy that sampled, when that is no longer the policy itself.
        ref_logps_N: Logprobs under the reference policy, when there is one.
        denominators: Counts of the optimizer step that the batch belongs to, once they are known.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    target_index_N: Tensor
    target_ids_N: Tensor
    row_N: Tensor
    sampler_logps_N: Tensor
    advantages_R: Tensor
    old_logps_N: Tensor | None = None
    ref_logps_N: Tensor | None = None
    turn_advantages_N: Tensor | None = None
    denominators: Denominators | None = None

    @property
    def target_advantages(self) -> Tensor:
        """Advantage of each target, (N,)."""
        return self.advantages_R[self.row_N] if self.turn_advantages_N is None else self.turn_advantages_N

    @property
    def rows(self) -> int:
        """R, the rows without targets included."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """N, the number of targets."""
        return self.row_N.numel()

    @property
    def trained_rows(self) -> int:
        """Number of rows that have a target."""
        return self.row_N.unique().numel()

    def model_inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward."""
        inputs = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        return {name: value for name, value in inputs.items() if value is not None}

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same batch on a device."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def collate(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    advantages: Sequence[float] | None = None,
    trained: Sequence[bool] | None = None,
    packed: bool = False,
    pad_to_multiple_of: int | None = None,
) -> MicroBatch:
    """Lay out trajectories for one forward pass.

    Args:
        trajectories: The rows.
        pad_token_id: Fills the padding; it may equal an id that rows contain, since the attention mask comes
            from the lengths.
        advantages: Advantage of each row; None means 0.
        trained: Whether each row is trained; the others have no targets. None means all.
        packed: Put the rows end to end in one row without an attention mask. The model has to tell rows apart
            by `position_ids`, as transformers does for its sdpa, eager and flash attention.
        pad_to_multiple_of: Round the padded length up to a multiple of this.

    Raises:
        ValueError: A row is misaligned, its first token is a target, or there is not one advantage or flag
            per row.
    """
    count = len(trajectories)
    for name, values in (("advantages", advantages), ("trained", trained)):
        if values is not None and len(values) != count:
            raise ValueError(f"{count} trajectories but {len(values)} {name}")
    rows = [trajectory.prompt_ids + trajectory.completion_ids for trajectory in trajectories]
    lengths = tuple(len(row) for row in rows)
    width = max(lengths, default=0)
    if pad_to_multiple_of:
        width = -(-width // pad_to_multiple_of) * pad_to_multiple_of
    starts = tuple(sum(lengths[:r]) if packed else r * width for r in range(count))

    index, ids, owner, logps = [], [], [], []
    for r, trajectory in enumerate(trajectories):
        if trained is not None and not trained[r]:
            continue
        for position, logp in _targets(r, trajectory):
            index.append(starts[r] + position - 1)
            ids.append(rows[r][position])
            owner.append(r)
            logps.append(logp)

    attention_mask = position_ids = None
    if packed:
        input_ids = torch.tensor([[token for row in rows for token in row]], dtype=torch.int64)
        position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    else:
        padded = [row + [pad_token_id] * (width - len(row)) for row in rows]
        input_ids = torch.tensor(padded, dtype=torch.int64).reshape(count, width)
        attention_mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        starts=starts,
        lengths=lengths,
        target_index_N=torch.tensor(index, dtype=torch.int64),
        target_ids_N=torch.tensor(ids, dtype=torch.int64),
        row_N=torch.tensor(owner, dtype=torch.int64),
        sampler_logps_N=torch.tensor(logps, dtype=torch.float32),
        advantages_R=torch.tensor([0.0] * count if advantages is None else advantages, dtype=torch.float32),
    )


def split(rows: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Cut a window of rows into micro-batches of `size` rows, in order; the last one may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _targets(r: int, trajectory: Trajectory) -> list[tuple[int, float]]:
    """Position in the row and sampler logprob of each sampled token."""
    mask, logps = trajectory.loss_mask, trajectory.logprobs
    if not len(trajectory.completion_ids) == len(mask) == len(logps):
        raise ValueError(
            f"row {r} has {len(trajectory.completion_ids)} completion ids, {len(mask)} mask entries and "
            f"{len(logps)} logprobs; expected one of each per token"
        )
    offset = len(trajectory.prompt_ids)
    targets = [(offset + c, logps[c]) for c, sampled in enumerate(mask) if sampled]
    if targets and targets[0][0] == 0:
        raise ValueError(f"row {r} has an empty prompt: no position predicts its first sampled token")
    return targets
