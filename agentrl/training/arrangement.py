"""How the rows of a window become micro-batches: which lie together, on which process, and in which layout.

Rows are numbered over all processes, in the order in which they were played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain
from typing import Any

from accelerate.utils import gather_object
from transformers import PreTrainedModel

from agentrl.generation.vision import placeholder_id
from agentrl.training.arguments import RolloutConfig
from agentrl.training.balance import Costs, plan_window
from agentrl.training.batching import Layout, MicroBatch, collate, split
from agentrl.training.experts import router_coefficient
from agentrl.training.layouts import choose_layout
from agentrl.training.metrics import RolloutRecord
from agentrl.training.windows import TrainingRow, row_size


class Arranger:
    """Arranges the rows of windows for one model.

    Args:
        model: The policy.
        args: The configuration.
        pad_token_id: Fills what rows leave empty.
        precision: Gives the context in which the model is run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: RolloutConfig,
        *,
        pad_token_id: int,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model = model
        self._args = args
        self._pad_token_id = pad_token_id
        self._precision = precision
        self._placeholder_id = placeholder_id(model)
        # The router loss is a product of means over the tokens of a micro-batch, a shared prompt as often as it occurs.
        self._routed = router_coefficient(model, args) != 0

    def plan(
        self, records: Sequence[RolloutRecord], mine: slice, size: int, batches: int, together: int
    ) -> list[list[int]]:
        """Say which rows make this process's micro-batches.

        Args:
            records: The rows of all processes.
            mine: Those that this process played.
            size: Rows of a micro-batch.
            batches: Micro-batches of this process; those beyond the rows are empty.
            together: See `Collector.collect`.
        """
        if not together or self._keeps_order:
            parts = [list(part) for part in split(range(mine.start, mine.stop), size)]
            return parts + [[]] * (batches - len(parts))
        plan = plan_window(
            [row_size(record) for record in records],
            self._costs,
            processes=self._args.world_size,
            batches=batches,
            size=size,
            together=together,
        )
        return plan[self._args.process_index]

    def exchange(
        self, played: Sequence[TrainingRow], mine: slice, plan: Sequence[Sequence[int]], *, moved: bool
    ) -> dict[int, TrainingRow]:
        """Return the rows of the plan by their numbers; those that another process trains are handed over.

        Args:
            played: This process's rows.
            mine: Their numbers.
            plan: What this process trains.
            moved: Whether rows may be on another process than their plan; the same on all processes.
        """
        rows = dict(zip(range(mine.start, mine.stop), played, strict=True))
        if moved and self._args.world_size > 1:
            kept = set(chain.from_iterable(plan))
            leaving = {number: row.for_another_process() for number, row in rows.items() if number not in kept}
            for others in gather_object([leaving]):
                rows = others | rows
        return rows

    def lay_out(self, rows: Sequence[TrainingRow]) -> MicroBatch:
        """Make a micro-batch of rows."""
        return collate(
            [row.trajectory for row in rows],
            pad_token_id=self._pad_token_id,
            trained=[row.trained for row in rows],
            layout=self._layout,
            pad_to_multiple_of=self._pad_multiple,
            placeholder_id=self._placeholder_id,
        )

    @cached_property
    def _layout(self) -> Layout:
        """How rows lie; found by a trial the first time that there are some."""
        if self._placeholder_id is not None or self._args.torch_compile or self._args.device.type == "neuron":
            return Layout.PADDED  # the places of packed rows would make each micro-batch a new program to compile
        with self._precision():
            return choose_layout(self._model, share=not self._routed)

    @cached_property
    def _costs(self) -> Costs:
        return Costs.of(self._model, self._layout)

    @property
    def _keeps_order(self) -> bool:
        """Whether the loss depends on which rows share a micro-batch."""
        by_micro_batch = getattr(self._args, "loss_type", None) == "bnpo"
        return self._routed or by_micro_batch or getattr(self._args, "top_entropy_quantile", 1.0) != 1.0

    @property
    def _pad_multiple(self) -> int | None:
        """What lengths are rounded up to; Neuron devices compile once for each shape, so they get few of them."""
        multiple = self._args.pad_to_multiple_of
        if multiple == "auto":
            return 128 if self._args.device.type == "neuron" else None
        return multiple if isinstance(multiple, int) else None
