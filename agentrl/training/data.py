"""Which rows are generated when: the order of prompts, groups and micro-batches.

A *window* is one generation batch. It holds `prompts_per_generation` prompts, each `num_generations` times in a row,
cut into equal slices, one a process; a process cuts its slice into `steps_per_generation` micro-batches, in order.
All `steps_per_generation * num_iterations` training steps of a window are consecutive, and a window is never mixed
with another one. With prompts p0..p3, two generations, two prompts a window and two steps a window, the order is
p0 p0 p1 p1 | p0 p0 p1 p1 | p2 p2 p3 p3 | p2 p2 p3 p3.

The order is a function of (seed, epoch, position) alone, so a resumed run continues with the rows that an
uninterrupted one would have drawn. A last window that would not be full is left out of its epoch.

A checkpoint that falls between two steps of one window holds that window, see `training.checkpoints`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset

from agentrl.chat.messages import clean_columns
from agentrl.errors import ConfigurationError
from agentrl.training.arguments import RolloutConfig
from agentrl.types import Task, derive_seed

Row = dict[str, Any]


class Rows(Protocol):
    """A dataset with a length and rows by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


class EmptyRows:
    """Rows without columns, for environments that supply the prompt themselves."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return {}


@dataclass(frozen=True, slots=True)
class Shape:
    """How a window is cut.

    Attributes:
        prompts: Distinct prompts in a window, over all processes.
        generations: Completions of each.
        steps: Micro-batches of a process's slice.
        iterations: Times a window is trained on.
        rank: This process.
        world_size: Number of processes.
    """

    prompts: int
    generations: int
    steps: int
    iterations: int = 1
    rank: int = 0
    world_size: int = 1

    @property
    def steps_per_window(self) -> int:
        """Training steps that use one window."""
        return self.steps * self.iterations

    @property
    def local_rows(self) -> range:
        """The rows of a window that this process generates."""
        share = self.prompts * self.generations // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)


def training_shape(args: RolloutConfig) -> Shape:
    """How the windows of training are cut."""
    assert args.num_generations is not None
    assert args.steps_per_generation is not None
    return Shape(
        prompts=args.prompts_per_generation,
        generations=args.num_generations,
        steps=args.steps_per_generation,
        iterations=args.num_iterations,
        rank=args.process_index,
        world_size=args.world_size,
    )


def evaluation_shape(args: RolloutConfig) -> Shape:
    """How the windows of evaluation are cut: one micro-batch a process, trained on never.

    Raises:
        ConfigurationError: An evaluation batch does not hold whole groups.
    """
    batch = args.per_device_eval_batch_size * args.world_size
    if batch % args.eval_generations:
        raise ConfigurationError(
            f"the evaluation batch of {batch} completions (per_device_eval_batch_size x processes) is not a "
            f"multiple of num_generations_eval={args.eval_generations}."
        )
    return Shape(
        prompts=batch // args.eval_generations,
        generations=args.eval_generations,
        steps=1,
        rank=args.process_index,
        world_size=args.world_size,
    )


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One training step: which window it belongs to and which micro-batch of it it takes.

    Attributes:
        window: Identity of the window, (epoch, index).
        slot: Index of the micro-batch within this process's slice.
        rows: The window's prompts, by position; only those this process needs.
        last: Whether no later step uses the window.
    """

    window: tuple[int, int]
    slot: int
    rows: dict[int, Row] = field(default_factory=dict)
    last: bool = False


class Schedule(Dataset[ScheduledStep]):
    """The training steps of a dataset with a length; step `k` belongs to epoch `k // len(schedule)`.

    Args:
        rows: The dataset.
        shape: How windows are cut.
        seed: Seed of the order.
        shuffle: Whether each epoch has an order of its own.
        keep_last: Keep a last window that is not full, as evaluation does.

    Raises:
        ConfigurationError: The dataset does not fill a single window.
    """

    def __init__(self, rows: Rows, shape: Shape, *, seed: int, shuffle: bool, keep_last: bool = False) -> None:
        self._rows = rows
        self._shape = shape
        self._seed = seed
        self._shuffle = shuffle
        self._shuffled: tuple[int, list[int]] = (-1, [])
        self._windows = -(-len(rows) // shape.prompts) if keep_last else len(rows) // shape.prompts
        if self._windows == 0:
            raise _too_few(len(rows), shape)

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return len(self._rows)

    def __len__(self) -> int:
        return self._windows * self._shape.steps_per_window

    def __getitem__(self, index: int) -> ScheduledStep:
        epoch, step = divmod(index, len(self))
        window, within = divmod(step, self._shape.steps_per_window)
        order = self._order(epoch)
        first = window * self._shape.prompts
        positions = [p for p in _positions(self._shape) if first + p < len(order)]
        rows = {p: dict(self._rows[order[first + p]]) for p in positions}
        return _step(self._shape, (epoch, window), within, rows)

    def after(self, window: tuple[int, int]) -> Iterator[ScheduledStep]:
        """The first steps of the windows that come after one, without an end."""
        epoch, index = window
        for number in count(epoch * self._windows + index + 1):
            yield self[number * self._shape.steps_per_window]

    def optimizer_step(self, window: tuple[int, int], accumulation: int) -> int:
        """Which optimizer step is the first one to use a window; the last one of an epoch may be short.

        Args:
            window: The window.
            accumulation: Training steps of an optimizer step.
        """
        epoch, index = window
        return epoch * -(-len(self) // accumulation) + index * self._shape.steps_per_window // accumulation

    def redraw(self, window: tuple[int, int], positions: Sequence[int], number: int) -> ScheduledStep:
        """Give other prompts for some positions of a window; a function of the seed and the arguments alone.

        Rows outside the window come first, in an order of its own, so that no prompt comes twice in a window's
        rounds while the dataset has others.

        Args:
            window: The window.
            positions: Which of its prompts to replace.
            number: Number of the round, from 1.
        """
        prompts = self._shape.prompts
        first = window[1] * prompts
        own = set(self._order(window[0])[first : first + prompts])
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "redraw", *window))
        order = torch.randperm(len(self._rows), generator=generator).tolist()
        fresh = [row for row in order if row not in own] or order
        wanted = set(positions) & set(_positions(self._shape))
        rows = {p: dict(self._rows[fresh[((number - 1) * prompts + p) % len(fresh)]]) for p in sorted(wanted)}
        return ScheduledStep(window, 0, rows)

    def _order(self, epoch: int) -> list[int] | range:
        if not self._shuffle:
            return range(len(self._rows))
        if self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
            self._shuffled = epoch, torch.randperm(len(self._rows), generator=generator).tolist()
        return self._shuffled[1]


class Stream(IterableDataset[ScheduledStep]):
    """The training steps of a dataset without a length, in the order in which it gives its rows, without an end.

    When the dataset ends, the next pass begins, so that step `k` is the same one in a resumed run and no optimizer
    step is cut short. `max_steps` says when to stop.

    Raises:
        ConfigurationError: On iteration, a pass does not fill a single window.
    """

    def __init__(self, rows: Iterable[Row], shape: Shape) -> None:
        self._rows = rows
        self._shape = shape
        self._begin()

    def _begin(self) -> None:
        self._unread = self._windows()
        self._read_ahead: deque[ScheduledStep] = deque()
        self._passes: list[int] = []  # windows of each pass that has ended

    def __iter__(self) -> Iterator[ScheduledStep]:
        self._begin()
        while True:
            first = self._read_ahead.popleft() if self._read_ahead else next(self._unread)
            for within in range(self._shape.steps_per_window):
                yield _step(self._shape, first.window, within, first.rows)

    def after(self, window: tuple[int, int]) -> Iterator[ScheduledStep]:
        """The first steps of the windows that come after the one that is being given out, without an end.

        They are read ahead, once.
        """
        for ahead in count():
            if ahead == len(self._read_ahead):
                self._read_ahead.append(next(self._unread))
            yield self._read_ahead[ahead]

    def optimizer_step(self, window: tuple[int, int], accumulation: int) -> int:
        """See `Schedule.optimizer_step`; passes do not interrupt an optimizer step here."""
        epoch, index = window
        return (sum(self._passes[:epoch]) + index) * self._shape.steps_per_window // accumulation

    def _windows(self) -> Iterator[ScheduledStep]:
        for epoch in count():
            if hasattr(self._rows, "set_epoch"):
                self._rows.set_epoch(epoch)
            stream = iter(self._rows)
            window = 0
            while len(prompts := list(islice(stream, self._shape.prompts))) == self._shape.prompts:
                yield _step(self._shape, (epoch, window), 0, {p: dict(prompts[p]) for p in _positions(self._shape)})
                window += 1
            if window == 0:
                raise _too_few(len(prompts), self._shape)
            self._passes.append(window)


def make_tasks(step: ScheduledStep, shape: Shape, seed: int, *, redraw: int = 0) -> list[Task]:
    """Return the tasks of a process's slice of a window, in row order.

    Args:
        step: Holds the prompts; rows whose prompt is missing give no task.
        shape: How windows are cut.
        seed: Seed of the run.
        redraw: Which time the prompts of the window are drawn again; 0: its own ones.
    """
    tasks = []
    again = (redraw,) if redraw else ()
    for row in shape.local_rows:
        position, member = divmod(row, shape.generations)
        if position not in step.rows:
            continue  # the last window of an evaluation may be short
        columns = clean_columns(step.rows[position])
        tasks.append(
            Task(
                group=".".join(map(str, (*step.window, position, *again))),
                member=member,
                seed=derive_seed(seed, "group", *step.window, position, *again),
                prompt=columns.pop("prompt", None),
                environment=columns.pop("environment", None),
                columns=columns,
            )
        )
    return tasks


def _step(shape: Shape, window: tuple[int, int], within: int, rows: dict[int, Row]) -> ScheduledStep:
    return ScheduledStep(window, within % shape.steps, rows, last=within == shape.steps_per_window - 1)


def _too_few(rows: int, shape: Shape) -> ConfigurationError:
    return ConfigurationError(
        f"train_dataset has {rows} rows, but one generation batch takes {shape.prompts} prompts "
        f"(generation_batch_size / num_generations). Add rows, raise num_generations, or lower "
        f"generation_batch_size, steps_per_generation or per_device_train_batch_size."
    )


def _positions(shape: Shape) -> list[int]:
    return sorted({row // shape.generations for row in shape.local_rows})
