"""Collecting a window: play its tasks, reward the episodes, score them, and cut them into micro-batches.

A row stays in its place whatever happens to it, so that every process has the same number of micro-batches. What is
not to be learned from (no reward applied, the environment failed, truncated with `mask_truncated_completions`) simply
has no targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, Trainer

from agentrl.generation.base import Phased
from agentrl.objectives.advantages import flat_rows
from agentrl.objectives.segments import row_sums
from agentrl.training.arguments import RolloutConfig
from agentrl.training.arrangement import Arranger
from agentrl.training.baselines import Baselines
from agentrl.training.batching import MicroBatch
from agentrl.training.completions import CompletionLog, pictures_of, readable
from agentrl.training.draws import Discarded, Draw, Redraw
from agentrl.training.metrics import RolloutRecord
from agentrl.training.playing import Player
from agentrl.training.preemption import Preempted
from agentrl.training.scoring import Scores, score
from agentrl.training.windows import (
    BatchRewards,
    TrainingRow,
    Window,
    add_turn_advantages,
    batch_rewards,
    window_metrics,
)
from agentrl.types import Task, Trajectory


class Collector(Player):
    """Everything between tasks and micro-batches.

    Args:
        trainer: Gives the state and the mixed-precision context.
        args: The configuration.
        model: The policy.
        processing_class: Its tokenizer, or its processor if it sees images.
        advantages: Turns the rewards of a generation batch into advantages, see `RolloutTrainer.advantages`.
        signals: What the members of a group are compared by, see `RolloutTrainer.signals`.
        needs_kl: Whether `advantages` needs the KL of each row from the reference.
        corrects_sampler: Whether the loss is to be corrected for what the sampler's logprobs differ by, where they do.
        **playing: What episodes are played with; see `Player`.

    Attributes:
        score_options: What the loss needs besides logprobs and entropies: options of `agentrl.training.scoring.score`.
    """

    def __init__(
        self,
        trainer: Trainer,
        args: RolloutConfig,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        advantages: Callable[[BatchRewards, Tensor | None], Tensor],
        signals: Callable[[BatchRewards], Tensor],
        needs_kl: bool,
        corrects_sampler: bool,
        **playing: Any,
    ) -> None:
        super().__init__(trainer, args, model, processing_class, **playing)
        self._advantages = advantages
        self._signals = signals
        self._needs_kl = needs_kl
        self.corrects_sampler = corrects_sampler and not self.exact
        self.baselines = Baselines(
            trainer,
            args,
            model,
            self.sampling,
            needs_kl=needs_kl,
            corrects_sampler=self.corrects_sampler,
            together=self._whole is not None,
        )
        self.score_options: dict[str, bool] = {}
        self.arranger = Arranger(
            model, args, pad_token_id=self.tokenizer.pad_token_id, precision=trainer.compute_loss_context_manager
        )

    def collect(
        self,
        tasks: list[Task],
        *,
        rows_per_batch: int,
        batches: int,
        together: int = 0,
        identity: Any = None,
        redraw: Redraw | None = None,
    ) -> Window:
        """Play tasks and make them into micro-batches.

        Every process calls this for the same window, each with its own tasks.

        Args:
            tasks: This process's tasks, in row order.
            rows_per_batch: Rows of a micro-batch, on average where rows are moved.
            batches: Micro-batches wanted; those beyond the rows are empty.
            together: Successive micro-batches that are sure to belong to one optimizer step. Rows may be moved among
                them and among processes; 0 leaves all rows where they were played.
            identity: Which window this is.
            redraw: Gives other tasks for groups whose members all earned the same, see `agentrl.training.draws`; None
                keeps such groups.
        """
        with self._leaving_together():
            draw = self._take(identity, tasks)
        everywhere, mine = self._gather(draw.records)
        rewards = self._rewards_of(everywhere)
        discarded = Discarded()
        while redraw is not None and discarded.rounds < self.args.dynamic_sampling_max_rounds:
            flat_R = flat_rows(self._signals(rewards), rewards.group_R)
            if not flat_R.any():
                break
            discarded.add([everywhere[row] for row in flat_R.nonzero()[:, 0]], rewards.total_R[flat_R].tolist())
            # Rows of all processes are in window order, so the number of a group is its position.
            groups = rewards.group_R[flat_R].unique().tolist()
            flat = flat_R[mine].nonzero()[:, 0].tolist()
            again = redraw(groups, discarded.rounds)
            with self._leaving_together():
                draw.replace(flat, self._draw_again(identity, again))
            everywhere, mine = self._gather(draw.records)
            rewards = self._rewards_of(everywhere)
        if isinstance(self.generator, Phased):
            self.generator.rest()
        plan = self.arranger.plan(everywhere, mine, rows_per_batch, batches, together)
        played = [
            TrainingRow(trajectory, self._is_trained(trajectory, record))
            for trajectory, record in zip(draw.trajectories, draw.records, strict=True)
        ]
        rows = self.arranger.exchange(played, mine, plan, moved=bool(together))
        micro_batches = [self.baselines.score(self.arranger.lay_out([rows[r] for r in part])) for part in plan]
        kl_R = self._gather_kl(micro_batches, plan, len(everywhere))
        advantages = self._advantages(rewards, kl_R)
        self.recorder.add_advantages(draw.trajectories, advantages[mine])
        order = list(chain.from_iterable(plan))
        ordered = [rows[r] for r in order]
        if advantages.dim() == 2:
            micro_batches = add_turn_advantages(micro_batches, advantages[order], ordered)
            advantages = advantages[:, 0]
        micro_batches = self._mark_stale(identity, micro_batches, ordered)
        micro_batches = [
            dataclasses.replace(batch, advantages_R=advantages[torch.tensor(part, dtype=torch.int64)])
            for batch, part in zip(micro_batches, plan, strict=True)
        ]
        metrics = window_metrics(everywhere, rewards, self._signals(rewards), kl_R, tools=self.engine.offers_tools)
        if redraw is not None and everywhere:
            metrics |= discarded.metrics(rewards.total_R.tolist())
        return Window(
            identity=identity,
            rows=len(everywhere),
            batches=micro_batches,
            metrics=metrics | self.rewards.metrics([record.rewards for record in everywhere]),
            own_metrics=draw.own_metrics,
            tokens_seen=sum(record.tokens for record in everywhere) + discarded.tokens,
            log=self._log(draw, advantages[mine].tolist()),
        )

    def score(self, model: torch.nn.Module, batch: MicroBatch) -> Scores:
        """Score a micro-batch under the distribution that the generator sampled from."""
        return score(model, batch, self.sampling, **self.score_options)

    def _take(self, identity: Any, tasks: list[Task]) -> Draw:
        """What a window has drawn with its own tasks."""
        self._open_window(identity)
        return self._draw(tasks)

    def _draw_again(self, identity: Any, tasks: list[Task]) -> Draw:
        """Play the tasks that take the places of others in a window."""
        return self._draw(tasks)

    def _mark_stale(self, identity: Any, batches: list[MicroBatch], rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        """Say which targets older weights drew: none, since weights do not change while a window is played."""
        return batches

    def _rewards_of(self, records: list[RolloutRecord]) -> BatchRewards:
        return batch_rewards(records, self.rewards.weights, getattr(self.args, "turn_discount", 1.0))

    def _is_trained(self, trajectory: Trajectory, record: RolloutRecord) -> bool:
        if not trajectory.outcome.is_signal or not record.scored:
            return False
        return not (self.args.mask_truncated_completions and trajectory.truncated)

    # Over all processes -------------------------------------------------------------------------------------

    @contextmanager
    def _leaving_together(self) -> Iterator[None]:
        """What is played inside ends with `_gather`; a process that has to leave says so there, and all leave."""
        try:
            yield
        except Preempted:
            if self.args.world_size > 1:
                gather_object([None])
            raise

    def _gather(self, records: list[RolloutRecord]) -> tuple[list[RolloutRecord], slice]:
        """Return the records of all processes, in process order, and where this process's are.

        Raises:
            Preempted: Another process has to leave.
        """
        if self.args.world_size == 1:
            return records, slice(0, len(records))
        parts: list[list[RolloutRecord]] = gather_object([records])
        if None in parts:
            raise Preempted
        start = sum(len(part) for part in parts[: self.args.process_index])
        return [record for part in parts for record in part], slice(start, start + len(records))

    def _gather_kl(self, batches: list[MicroBatch], plan: Sequence[Sequence[int]], rows: int) -> Tensor | None:
        """Return the sum over each row of log pi_old - log pi_ref, over all processes."""
        if not self._needs_kl:
            return None
        local: list[tuple[int, float]] = []
        for batch, part in zip(batches, plan, strict=True):
            assert batch.old_logps_N is not None
            assert batch.ref_logps_N is not None
            sums = row_sums(batch.old_logps_N - batch.ref_logps_N, batch.row_N, batch.rows).tolist()
            local += zip(part, sums, strict=True)
        everywhere = dict(gather_object(local) if self.args.world_size > 1 else local)
        return torch.tensor([everywhere[number] for number in range(rows)])

    def _log(self, draw: Draw, advantages: list[float]) -> CompletionLog:
        """The readable rows of all processes, if they are wanted, in process order."""
        log = CompletionLog(extra=draw.columns)
        if self.args.log_completions:
            log.prompts = [readable(t.prompt) for t in draw.trajectories]
            log.completions = [readable(t.completion) for t in draw.trajectories]
            log.rewards = {name: [row[i] for row in draw.rewards] for i, name in enumerate(self.rewards.names)}
            log.advantages = advantages
            if self.args.log_multimodal and self.renderer.sees_images:
                log.extra["images"] = [pictures_of(t) for t in draw.trajectories]
            if self.args.world_size > 1:
                parts = gather_object([log])
                log.clear()
                for part in parts:
                    log.extend(part)
        return log
