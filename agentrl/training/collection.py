"""Collecting a window: play its tasks, reward the episodes, score them, and cut them into micro-batches.

A row stays in its place whatever happens to it, so that every process has the same number of micro-batches. What is
not to be learned from (no reward applied, the environment failed, truncated with `mask_truncated_completions`) simply
has no targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, Trainer

from agentrl.chat.renderer import Renderer
from agentrl.chat.template import tokenizer_of
from agentrl.errors import ConfigurationError
from agentrl.generation.base import Generator, Phased
from agentrl.generation.processes import is_first
from agentrl.objectives.advantages import flat_rows
from agentrl.objectives.segments import row_sums
from agentrl.rollout.endpoint.programs import Agent
from agentrl.rollout.schemas import function_name
from agentrl.rollout.tools import Tool
from agentrl.training.arguments import RolloutConfig, as_dict
from agentrl.training.arrangement import Arranger
from agentrl.training.baselines import Baselines, evaluating
from agentrl.training.batching import MicroBatch
from agentrl.training.checks import common_columns
from agentrl.training.clock import StepClock
from agentrl.training.completions import CompletionLog, pictures_of, readable
from agentrl.training.custom_rollouts import play_custom
from agentrl.training.draws import Discarded, Draw, Redraw
from agentrl.training.engines import engine_of
from agentrl.training.generators import generator_of, samples_the_policy, sampling_of
from agentrl.training.loading import declared_eos_ids
from agentrl.training.metrics import RolloutRecord, make_record
from agentrl.training.preemption import Preempted
from agentrl.training.recording import Recorder
from agentrl.training.rewards import RewardSet
from agentrl.training.sampler_check import SamplerCheck
from agentrl.training.scoring import Scores, score
from agentrl.training.sharding import WholeCopy, is_sharded
from agentrl.training.windows import (
    BatchRewards,
    TrainingRow,
    Window,
    add_turn_advantages,
    batch_rewards,
    window_metrics,
)
from agentrl.types import Task, Trajectory


class Collector:
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
        reward_funcs: As the user passed them, in a list.
        reward_processing_classes: Tokenizers of reward models.
        tools: Standalone tools.
        environment_factory: One factory, several by name, or None.
        rollout_func: Plays the episodes instead of the engine.
        agent: A program that owns its loop.
        generator: A generator, whose closing is the caller's business, or a function of the model that makes one;
            None makes one from the arguments.
        recorder: Is told what is played; the engine writes to its journal.
        interruptible: Playing and rewarding happen inside of this.
        datasets: The datasets whose rows will be played, for checks.

    Attributes:
        score_options: What the loss needs besides logprobs and entropies: options of `agentrl.training.scoring.score`.
        clock: Measures optimizer steps.
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
        reward_funcs: Sequence[Any],
        reward_processing_classes: Any,
        tools: Sequence[Callable[..., Any] | Tool],
        environment_factory: Any,
        rollout_func: Callable[..., Any] | None,
        agent: Agent | None,
        generator: Generator | Callable[..., Generator] | None,
        recorder: Recorder,
        interruptible: Callable[[], AbstractContextManager[None]],
        datasets: Sequence[Any],
    ) -> None:
        self.trainer = trainer
        self.recorder = recorder
        self.clock = StepClock()
        self._interruptible = interruptible
        self.args = args
        self.model = model
        self.tokenizer = tokenizer_of(processing_class)
        self._advantages = advantages
        self._signals = signals
        self._needs_kl = needs_kl
        self._rollout_func = rollout_func
        program = rollout_func if agent is None else agent.program
        self._program = None if program is None else function_name(program)
        policy = trainer.accelerator.unwrap_model(model)
        self._sends = generator is None and args.use_vllm and args.vllm_mode == "server"
        self._whole: WholeCopy | None = None
        if is_sharded(trainer):
            where, keeps = ("cpu", is_first()) if self._sends else (args.device, True)
            self._whole = WholeCopy(policy, where, keeps=keeps)
        self.renderer = Renderer(
            processing_class,
            template_kwargs=as_dict(args.chat_template_kwargs),
            tools=bool(tools) or environment_factory is not None or agent is not None,
            eos_ids=declared_eos_ids(policy),
            reasoning=args.reasoning,
            keep_images=args.keep_images,
            drop_repeated_images=args.drop_repeated_images,
            max_image_pixels=args.max_image_pixels,
        )
        for name in ("keep_images", "drop_repeated_images", "max_image_pixels"):
            if getattr(args, name) and not self.renderer.sees_images:
                raise ConfigurationError(f"{name} is for vision-language models, whose processor is processing_class.")
        self.generator: Generator
        if isinstance(generator, Generator) and not isinstance(generator, type):
            self.generator, self._owns_generator = generator, False
        else:
            sampled = policy if self._whole is None else self._whole.model
            self.generator = (
                generator_of(args, sampled, processing_class, trainer.compute_loss_context_manager)
                if generator is None
                else generator(sampled)
            )
            self._owns_generator = True
        self._prepare_generator()
        exact = rollout_func is None and samples_the_policy(self.generator, args, policy)
        self.corrects_sampler = corrects_sampler and not exact
        self.sampling = dataclasses.replace(sampling_of(args), suppress_tokens=self.renderer.never_sampled)
        self.engine = engine_of(
            args,
            self.generator,
            self.renderer,
            self.sampling,
            tools=tools,
            environments=environment_factory,
            journal=recorder.journal,
            agent=agent,
        )
        pool = self.engine.environments
        columns = common_columns(datasets)
        if pool is not None and columns is not None:
            pool.check_columns(columns)
        self.rewards = RewardSet(
            reward_funcs,
            weights=args.reward_weights,
            processing_classes=reward_processing_classes,
            environments={None: agent.name} if agent is not None else None if pool is None else pool.reward_owners,
            columns=None if rollout_func is not None or agent is not None else columns,
            model_init_kwargs=as_dict(args.model_init_kwargs),
            trust_remote_code=args.trust_remote_code,
        )
        self.rewards.to(args.device)
        self.engine.hands_over_environments = self.rewards.see_environments
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
        self._synced: int | None = None
        self._check = SamplerCheck(
            trainer, args, model, self.generator, self.tokenizer, self.renderer, self.sampling, self.engine
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

    def _prepare_generator(self) -> None:
        """Called once the generator is there; it may share the policy's weights: one rests while the other works."""

    def _take(self, identity: Any, tasks: list[Task]) -> Draw:
        """What a window has drawn with its own tasks."""
        self._open_window(identity)
        return self._draw(tasks)

    def _mark_stale(self, identity: Any, batches: list[MicroBatch], rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        """Say which targets older weights drew: none, since weights do not change while a window is played."""
        return batches

    def _open_window(self, identity: Any) -> None:
        """Say in the journal which window what is played from now on belongs to; see `Recorder.open_window`."""
        self.recorder.open_window(identity, self.trainer.state.global_step, self._settings)

    def _draw(self, tasks: list[Task]) -> Draw:
        """Play tasks and reward them."""
        with self.clock.part("sync"):  # may take all processes, so none leaves in the midst of it
            self._sync()
        with self._interruptible():
            return self._reward(self._play(tasks))

    def _draw_again(self, identity: Any, tasks: list[Task]) -> Draw:
        """Play the tasks that take the places of others in a window."""
        return self._draw(tasks)

    def _reward(self, trajectories: list[Trajectory]) -> Draw:
        """Reward trajectories and give their environments back."""
        log = CompletionLog()
        own_metrics: list[tuple[str, float]] = []
        try:
            with self.clock.part("rewards"):
                rewards = self.rewards.compute(
                    trajectories,
                    trainer_state=self.trainer.state,
                    log_extra=log.add_column,
                    log_metric=lambda name, value: own_metrics.append((name, value)),
                    run=self.engine.await_,
                )
        finally:
            self.engine.release(trajectories)
        self.recorder.add_rewards(trajectories, self.rewards.names, rewards)
        records = [make_record(t, r) for t, r in zip(trajectories, rewards, strict=True)]
        return Draw(trajectories, rewards, records, log.extra, own_metrics)

    def _rewards_of(self, records: list[RolloutRecord]) -> BatchRewards:
        return batch_rewards(records, self.rewards.weights, getattr(self.args, "turn_discount", 1.0))

    def score(self, model: torch.nn.Module, batch: MicroBatch) -> Scores:
        """Score a micro-batch under the distribution that the generator sampled from."""
        return score(model, batch, self.sampling, **self.score_options)

    def weights_changed(self) -> None:
        """Take notice that the weights may have changed without an optimizer step."""
        self._synced = None

    def end_rollouts(self) -> None:
        """Give back the device's memory that only rollouts need, until there are some again."""
        if self._whole is not None and not self._sends:
            self._whole.free()
            self._synced = None

    def close(self) -> None:
        """Close environments, threads and a generator made here; a later `collect` starts them again."""
        self.engine.close()
        if self._owns_generator:
            self.generator.close()
        self.recorder.close()

    # Playing ------------------------------------------------------------------------------------------------

    @property
    def _settings(self) -> tuple[Any, ...]:
        """What decides, besides weights and tasks, what is sampled and which tools answer."""
        args, pool = self.args, self.engine.environments
        schemas = [tool.schema for tool in self.engine.tools.values()]
        if pool is not None:
            schemas += [tool.schema for spec in pool.specs.values() for tool in spec.tools.values()]
        template = getattr(self.tokenizer, "chat_template", None), as_dict(args.chat_template_kwargs), args.reasoning
        generator = type(self.generator).__name__, args.bf16, args.fp16
        stops = sorted(self.renderer.stop_ids)
        return self.sampling, stops, self.engine.limits, template, generator, schemas, self._program

    def _sync(self) -> None:
        """Hand the weights over, once for each optimizer step, and see that the generator samples from them."""
        updated = self._synced != self.trainer.state.global_step
        if updated:
            self._synced = self.trainer.state.global_step
            if self._whole is not None:
                self._whole.gather(self.model)
            self.generator.sync(self._synced)
        if isinstance(self.generator, Phased):
            self.generator.wake()
        if updated:
            self._check.after_update()

    def _play(self, tasks: list[Task]) -> list[Trajectory]:
        with self.clock.part("rollouts"):
            if self._rollout_func is not None:
                run = self.engine.await_
                return play_custom(self._rollout_func, tasks, self.trainer, self.renderer, self.recorder, run)
            with evaluating(self.model):  # once; a generator that finds a module in training switches it every step
                return self.engine.run(tasks)

    # Laying out and scoring ---------------------------------------------------------------------------------

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
