"""Playing a window's tasks under the policy, and rewarding the episodes: from tasks to draws.

Owns what rollouts need: the generator, the renderer, the engine with its environments and tools, the rewards. Hands the
weights over before anything is played, once for each optimizer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, Trainer

from agentrl.chat.renderer import Renderer
from agentrl.chat.template import tokenizer_of
from agentrl.errors import ConfigurationError
from agentrl.generation.base import Generator, Phased
from agentrl.generation.processes import is_first
from agentrl.rollout.endpoint.programs import Agent
from agentrl.rollout.schemas import function_name
from agentrl.rollout.tools import Tool
from agentrl.training.arguments import RolloutConfig, as_dict
from agentrl.training.baselines import evaluating
from agentrl.training.checks import common_columns
from agentrl.training.clock import StepClock
from agentrl.training.completions import CompletionLog
from agentrl.training.custom_rollouts import play_custom
from agentrl.training.draws import Draw
from agentrl.training.engines import engine_of
from agentrl.training.generators import generator_of, samples_the_policy, sampling_of
from agentrl.training.loading import declared_eos_ids
from agentrl.training.metrics import make_record
from agentrl.training.recording import Recorder
from agentrl.training.rewards import RewardSet
from agentrl.training.sampler_check import SamplerCheck
from agentrl.training.sharding import WholeCopy, is_sharded
from agentrl.types import Task, Trajectory


class Player:
    """Everything between tasks and rewarded trajectories, in one process.

    Args:
        trainer: Gives the state and the mixed-precision context.
        args: The configuration.
        model: The policy.
        processing_class: Its tokenizer, or its processor if it sees images.
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
        exact: Whether the logprobs that come with samples are the policy's own but for the rounding of float32.
        clock: Measures optimizer steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        args: RolloutConfig,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
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
        self.exact = rollout_func is None and samples_the_policy(self.generator, args, policy)
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
        self._synced: int | None = None
        self._check = SamplerCheck(
            trainer, args, model, self.generator, self.tokenizer, self.renderer, self.sampling, self.engine
        )

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

    def _prepare_generator(self) -> None:
        """Called once the generator is there; it may share the policy's weights: one rests while the other works."""

    def _open_window(self, identity: Any) -> None:
        """Say in the journal which window what is played from now on belongs to; see `Recorder.open_window`."""
        self.recorder.open_window(identity, self.trainer.state.global_step, self._settings)

    def _draw(self, tasks: list[Task]) -> Draw:
        """Play tasks and reward them."""
        with self.clock.part("sync"):  # may take all processes, so none leaves in the midst of it
            self._sync()
        with self._interruptible():
            return self._reward(self._play(tasks))

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
