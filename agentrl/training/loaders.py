"""Data loaders of the steps of training and of the windows of evaluation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import datasets
from torch.utils.data import DataLoader

from agentrl.training.arguments import RolloutConfig
from agentrl.training.data import (
    EmptyRows,
    Schedule,
    ScheduledStep,
    Stream,
    evaluation_shape,
    training_shape,
)

_ALWAYS_VISIBLE = ("prompt", "image", "images", "environment")


class ScheduleLoader(DataLoader[ScheduledStep]):
    """A loader of single steps that tells its schedule the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Called by `transformers.Trainer` before each epoch; a stream counts its passes itself."""
        if isinstance(self.batch_sampler, _EpochBatches):
            self.batch_sampler.set_epoch(epoch)


class _EpochBatches:
    """Yields the indices of one epoch, one at a time."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        start = self._epoch * self._length
        return ([index] for index in range(start, start + self._length))


def make_loader(schedule: Schedule | Stream, *, workers: int = 0, **worker_options: Any) -> ScheduleLoader:
    """Make the loader of a schedule; each item is one `ScheduledStep`.

    Args:
        schedule: What to load.
        workers: Worker processes that read rows ahead.
        **worker_options: Further options of `DataLoader` that concern workers.
    """
    if isinstance(schedule, Stream):
        if workers:
            warnings.warn(
                f"dataloader_num_workers={workers}: a dataset without a length is read in the main process, since "
                "several workers would interleave its rows and break groups up",
                stacklevel=2,
            )
        return ScheduleLoader(schedule, batch_size=None)
    return ScheduleLoader(
        schedule,
        batch_sampler=_EpochBatches(len(schedule)),
        collate_fn=_only_item,
        num_workers=workers,
        **(worker_options if workers else {}),
    )


def _only_item(batch: list[ScheduledStep]) -> ScheduledStep:
    return batch[0]


def training_loader(dataset: datasets.Dataset | datasets.IterableDataset | None, args: RolloutConfig) -> ScheduleLoader:
    """Make the loader of training steps; rows come in the order that `training.data` documents.

    Args:
        dataset: The training rows; None where environments supply the prompts, for `max_steps` steps.
        args: The configuration.
    """
    shape = training_shape(args)
    rows: Any = _visible_columns(dataset, args)
    if isinstance(rows, datasets.IterableDataset):
        schedule: Schedule | Stream = Stream(rows, shape)
    else:
        if rows is None:
            windows = math.ceil(args.max_steps * args.gradient_accumulation_steps / shape.steps_per_window)
            rows = EmptyRows(windows * shape.prompts)
        seed = args.seed if args.data_seed is None else args.data_seed
        schedule = Schedule(rows, shape, seed=seed, shuffle=bool(args.shuffle_dataset))
    return make_loader(
        schedule,
        workers=args.dataloader_num_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        persistent_workers=args.dataloader_persistent_workers,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
    )


def evaluation_loader(dataset: datasets.Dataset | datasets.IterableDataset, args: RolloutConfig) -> ScheduleLoader:
    """Make the loader of evaluation windows; every row is played `num_generations_eval` times, in order."""
    rows: Any = _visible_columns(dataset, args)
    if isinstance(rows, datasets.IterableDataset):
        rows = list(rows)
    return make_loader(Schedule(rows, evaluation_shape(args), seed=args.seed, shuffle=False, keep_last=True))


def _visible_columns(dataset: Any, args: RolloutConfig) -> Any:
    """Drop what neither the prompt, its images nor the choice of an environment needs, where the user asks for it."""
    if dataset is None or not args.remove_unused_columns or dataset.column_names is None:
        return dataset
    return dataset.select_columns([c for c in dataset.column_names if c in _ALWAYS_VISIBLE])
