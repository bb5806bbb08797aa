"""What the asynchronous trainers do beyond the others: they look ahead in the schedule, and save what waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from agentrl.training.async_arguments import AsyncOptions
from agentrl.training.async_collection import AsyncCollector, Upcoming
from agentrl.training.batching import MicroBatch
from agentrl.training.checkpoints import InFlight
from agentrl.training.data import ScheduledStep, make_tasks, training_shape
from agentrl.training.finished import load_finished, save_finished
from agentrl.training.trainer import RolloutTrainer


class AsyncTraining(RolloutTrainer):
    """To be put before `GRPOTrainer` or `RLOOTrainer`, whose rollouts are then played while the optimizer works."""

    collector_class = AsyncCollector
    collector: AsyncCollector
    args: AsyncOptions
    _offset = 0
    _paced: int | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `LifeCycle.train`. What is being played at the end is ended."""
        self._offset, self._paced = 0, None
        self.collector.restart_clocks()
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[ScheduledStep], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch], Tensor | None]:
        """Make the micro-batches of one optimizer step, and note how long that took whom."""
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.collector.measure(self.reports.metrics[True])
        return samples

    def _micro_batch(self, step: ScheduledStep) -> MicroBatch:
        begins = self._window is None or self._window.identity != step.window
        if begins:  # steps count from 0, unless a resumed run began its epoch anew
            self._offset = self.state.global_step - self._optimizer_step(step)
        if self._paced != self.state.global_step:
            self._paced = self.state.global_step
            self.collector.keep_pace(self._upcoming(step, begins=begins))
        return super()._micro_batch(step)

    def _upcoming(self, step: ScheduledStep, *, begins: bool) -> Iterator[Upcoming]:
        """The window that a step begins, and all after it up to the end of training."""
        shape = training_shape(self.args)
        if begins:
            yield Upcoming(self.state.global_step, step.window, make_tasks(step, shape, seed=self.args.seed))
        for ahead in self._schedule.after(step.window):
            if (number := self._offset + self._optimizer_step(ahead)) >= self.state.max_steps:
                return
            yield Upcoming(number, ahead.window, make_tasks(ahead, shape, seed=self.args.seed))

    def _optimizer_step(self, step: ScheduledStep) -> int:
        return self._schedule.optimizer_step(step.window, self.args.gradient_accumulation_steps)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write what this process has played ahead as well."""
        finished = list(self.collector.settle(self.reports.metrics[True]))
        self.collector.note_weights()
        super()._save_rng_state(output_dir)
        save_finished(output_dir, finished, training_shape(self.args))

    def _load_in_flight(self, checkpoint: str) -> InFlight:
        if not self.args.ignore_data_skip:
            self.collector.recover(load_finished(checkpoint, training_shape(self.args)))
        return super()._load_in_flight(checkpoint)
