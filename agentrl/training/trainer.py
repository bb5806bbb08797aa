"""The trainer core: collect rollouts, score them, learn from them, log. GRPO and RLOO are subclasses.

It subclasses `transformers.Trainer` and uses one of its hooks for all that is special about learning from one's own
rollouts: `get_batch_samples` is given the steps of one whole optimizer step before the first backward pass. There the
windows (generation batches) that these steps belong to are played, rewarded and cut into micro-batches, and what the
loss divides by is counted over all of them and all processes. Everything after that is ordinary training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from agentrl.errors import ConfigurationError
from agentrl.generation.base import Generator
from agentrl.objectives.aggregation import Denominators
from agentrl.rollout.endpoint.programs import Agent, Program
from agentrl.rollout.garbage import rare_collections
from agentrl.rollout.tools import Tool
from agentrl.training.arguments import RolloutConfig
from agentrl.training.batching import MicroBatch, counts_of
from agentrl.training.checks import (
    Environments,
    check_configuration,
    check_rows,
    check_sources,
    given_datasets,
)
from agentrl.training.collection import Collector
from agentrl.training.data import Schedule, ScheduledStep, Stream, evaluation_shape, make_tasks, training_shape
from agentrl.training.draws import redraw_from
from agentrl.training.lifecycle import LifeCycle
from agentrl.training.loaders import ScheduleLoader, evaluation_loader, training_loader
from agentrl.training.loading import load_model, load_processing_class
from agentrl.training.metrics import MetricStore, clean_logs
from agentrl.training.objective_metrics import sampler_metrics
from agentrl.training.old_policy import old_logps
from agentrl.training.preemption import Preemption
from agentrl.training.recording import Recorder
from agentrl.training.regularization import Regularization
from agentrl.training.reporting import Reports
from agentrl.training.rewards import reward_sources
from agentrl.training.scoring import Scores
from agentrl.training.sharding import check_distribution, prepare_evaluation
from agentrl.training.windows import BatchRewards
from agentrl.types import derive_seed

RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]


class RolloutTrainer(LifeCycle):
    """What GRPO and RLOO share. Subclasses say how rewards become advantages and what the loss is."""

    config_class: ClassVar[type[RolloutConfig]]
    collector_class: ClassVar[type[Collector]] = Collector
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase | ProcessorMixin

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: RolloutConfig | None = None,
        train_dataset: datasets.Dataset | datasets.IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any] | Tool] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: Environments | None = None,
        *,
        agent: Agent | Program | None = None,
        generator: Generator | Callable[[PreTrainedModel], Generator] | None = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
            args = self.config_class(f"{name.rstrip('/').split('/')[-1]}-{self.algorithm}")
        check_configuration(args, self.config_class, type(self).__name__)
        rewards = reward_sources(reward_funcs)
        check_sources(
            reward_funcs=rewards,
            tools=tools or [],
            environments=environment_factory,
            rollout_func=rollout_func,
            agent=agent,
            train_dataset=train_dataset,
            args=args,
        )
        calls_tools = bool(tools) or environment_factory is not None
        played = given_datasets(train_dataset, eval_dataset)
        for dataset in played:
            check_rows(dataset, environment_factory, tools=calls_tools)
        model = load_model(model, args, quantization_config=quantization_config, peft_config=peft_config)
        processing_class = load_processing_class(processing_class, model, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=_identity,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        # The loss is divided by exact counts of the optimizer step, so the Trainer must not divide it again.
        self.loss_is_scaled_for_ga = True
        check_distribution(self)
        self.num_generations = args.num_generations
        self.num_generations_eval = args.eval_generations
        self.recorder = Recorder(args, self.algorithm, model)
        self.preemption = Preemption(args.preemption_grace)
        self.add_callback(self.preemption)
        self.collector = self.collector_class(
            self,
            args,
            model,
            processing_class,
            advantages=self.advantages,
            signals=self.signals,
            needs_kl=self.penalises_kl_in_reward,
            corrects_sampler=self.corrects_sampler,
            reward_funcs=rewards,
            reward_processing_classes=reward_processing_classes,
            tools=tools or [],
            environment_factory=environment_factory,
            rollout_func=rollout_func,
            agent=Agent(agent) if agent is not None and not isinstance(agent, Agent) else agent,
            generator=generator,
            recorder=self.recorder,
            interruptible=self.preemption.interruptible,
            datasets=played,
        )
        self.regularization = Regularization(args, model, self.collector.baselines.reference)
        self.collector.score_options = self.regularization.score_options
        for callback in self.regularization.callbacks:
            self.add_callback(callback)
        self.reports = Reports(self, args)
        self._parameters = self.model.num_parameters()

    # What subclasses define ---------------------------------------------------------------------------------

    def advantages(self, rewards: BatchRewards, kl_R: Tensor | None) -> Tensor:
        """Turn the rewards of a generation batch into advantages.

        Args:
            rewards: Of all its rows.
            kl_R: Sum over the row of log pi_old - log pi_ref; None when it is not needed.

        Returns:
            One for each row, (R,), or one for each turn of each row, (R, K).
        """
        raise NotImplementedError

    def signals(self, rewards: BatchRewards) -> Tensor:
        """What the members of a group are compared by, (R, C): a group without a spread in it teaches nothing."""
        return rewards.total_R[:, None] if rewards.returns_RK is None else rewards.returns_RK

    def loss(self, scores: Scores, batch: MicroBatch, denominators: Denominators, metrics: MetricStore) -> Tensor:
        """Return a micro-batch's part of the loss of its optimizer step."""
        raise NotImplementedError

    @property
    def penalises_kl_in_reward(self) -> bool:
        """Whether `advantages` needs the KL of each row."""
        return False

    def selected(self, scores: Scores) -> Tensor | None:
        """Which targets of a micro-batch the loss is restricted to by their scores, bool (N,); None: all."""
        return None

    @property
    def corrects_sampler(self) -> bool:
        """Whether `loss` weighs what the trainer and the sampler make of the same tokens."""
        return False

    # Data ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> ScheduleLoader:
        """Return the loader of training steps; rows come in the order that `training.data` documents."""
        loader = training_loader(self.train_dataset, self.args)
        self._schedule = cast("Schedule | Stream", loader.dataset)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> ScheduleLoader:
        """Return the loader of evaluation windows; every row is played `num_generations_eval` times."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]  # type: ignore[index]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigurationError("evaluation needs an eval_dataset.")
        return evaluation_loader(dataset, self.args)

    def get_test_dataloader(self, test_dataset: Any) -> ScheduleLoader:
        """Return the loader of `predict`, which plays a dataset as evaluation does."""
        return self.get_eval_dataloader(test_dataset)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of rows behind a loader."""
        return getattr(dataloader.dataset, "num_rows", 0)

    # Training -----------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[ScheduledStep], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch], Tensor | None]:
        """Make the micro-batches of one optimizer step, playing new windows as they come up."""
        self.collector.clock.begin()
        batches = []
        for _ in range(num_batches):
            if (step := next(epoch_iterator, None)) is None:
                break
            self._load_rng_state(self._resumed_from)
            batches.append(self._micro_batch(step))
        counts = counts_of(batches, self.args.world_size)
        tokens = torch.tensor(counts.tokens, device=device)
        return [dataclasses.replace(batch, denominators=counts) for batch in batches], tokens

    def training_step(  # type: ignore[override]
        self, model: torch.nn.Module, inputs: MicroBatch, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one micro-batch, and time the optimizer step with the last one."""
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[arg-type]
        if self.accelerator.sync_gradients:
            self.regularization.end_step(self.reports.metrics[True])
            self.reports.metrics[True].add_all(self.collector.clock.metrics())
        return loss

    def compute_loss(  # type: ignore[override]
        self,
        model: torch.nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Score a micro-batch under the policy and return its part of the loss."""
        if return_outputs:
            raise ConfigurationError("the loss of rollouts has no model outputs to return; leave return_outputs=False.")
        metrics = self.reports.metrics[model.training]
        scores = self.collector.score(model, inputs)
        scores = scores._replace(selected_N=self.selected(scores))
        if inputs.tokens:
            sampler_metrics(scores, inputs, metrics)
            metrics.add("entropy", scores.entropy_N.mean().item(), inputs.tokens)
        counts = inputs.denominators
        assert counts is not None
        loss = self.loss(scores, inputs, counts, metrics)
        return self.regularization.add(loss, scores, inputs, counts, metrics, train=model.training)

    def prediction_step(  # type: ignore[override]
        self, model: torch.nn.Module, inputs: ScheduledStep, *_: Any, **__: Any
    ) -> tuple[Tensor, None, None]:
        """Play an evaluation window and return its loss."""
        shape = evaluation_shape(self.args)
        # Of their own, so that evaluation does not repeat the episodes that were trained on.
        tasks = make_tasks(inputs, shape, seed=derive_seed(self.args.seed, "evaluation"))
        window = self.collector.collect(tasks, rows_per_batch=self.args.per_device_eval_batch_size, batches=1)
        self.reports.add(window, train=False)
        batch = dataclasses.replace(window.batches[0], denominators=counts_of(window.batches, self.args.world_size))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch.to(self.args.device))
        return loss.detach(), None, None

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the metrics of the rollouts come with the loss.

        The metrics of windows are weighted by their rows, their losses alike. Outside of `train` environments are
        closed at the end.
        """
        self.reports.begin_evaluation()
        self.collector.weights_changed()  # by hand since the last rollouts, or by loading the best checkpoint
        prefix = kwargs.get("metric_key_prefix", "eval")
        prepare_evaluation(self)
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.collector.end_rollouts()
            if not self.is_in_train:
                self.close()
        metrics = self.reports.take(train=False)
        assert output.metrics is not None
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output._replace(num_samples=self.num_examples(dataloader) * self.args.eval_generations)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, together with the metrics since the last training log."""
        if "loss" in logs:
            logs = {**logs, **self.reports.take(train=True)}
        cleaned = clean_logs(logs)
        super().log(cleaned, start_time)
        self.recorder.add_log(self.state.global_step, cleaned)
        if "epoch" in cleaned:  # `evaluate` gives back what it logged, and promises the epoch in it
            logs["epoch"] = cleaned["epoch"]

    def close(self) -> None:
        """Close environments, threads and the generator; whatever needs them later starts them again."""
        self.collector.close()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `LifeCycle.train`. Environments are closed at the end, also after an error."""
        self.reports.begin_training()
        self.collector.weights_changed()
        self.regularization.reset()
        try:
            with rare_collections():
                return super().train(*args, **kwargs)
        finally:
            self.is_in_train = False
            self.close()
            self.reports.end_training()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.regularization.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.regularization.load(checkpoint)

    # Helpers ------------------------------------------------------------------------------------------------

    def _micro_batch(self, step: ScheduledStep) -> MicroBatch:
        if self._window is None or self._window.identity != step.window:
            shape = training_shape(self.args)
            tasks = make_tasks(step, shape, seed=self.args.seed)
            self._window = self.collector.collect(
                tasks,
                rows_per_batch=self.args.per_device_train_batch_size,
                batches=shape.steps,
                together=math.gcd(self.args.gradient_accumulation_steps, shape.steps),
                identity=step.window,
                redraw=redraw_from(self._schedule, step.window, shape, self.args),
            )
            self.collector.end_rollouts()
            self.reports.add(self._window, train=True)
        batch = self._window.batches[step.slot]
        if step.last:
            self._window = None
        return batch

    def old_logps(self, scores: Scores, batch: MicroBatch) -> Tensor | None:
        """Logprobs that the importance ratio is against, None where the policy itself sampled: there it is 1."""
        return old_logps(scores, batch, on_policy=self.collector.baselines.on_policy)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs.to(self.args.device)

    def floating_point_ops(self, inputs: Any) -> int:
        """Estimate the operations of a micro-batch: 6 a parameter and token (Kaplan et al. 2020, arXiv 2001.08361)."""
        return 6 * self._parameters * inputs.input_ids.numel()


def _identity(batch: Any) -> Any:
    return batch
