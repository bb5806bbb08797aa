"""Group Relative Policy Optimization: what differs from the trainer core."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.errors import RewardError
from agentrl.objectives.advantages import gdpo_advantages, grpo_advantages
from agentrl.objectives.aggregation import Denominators, token_loss
from agentrl.objectives.losses import log_ratios, ratios
from agentrl.objectives.regularizers import kl_k3
from agentrl.objectives.selection import entropy_threshold
from agentrl.training.arguments import GRPOConfig
from agentrl.training.batching import MicroBatch
from agentrl.training.metrics import MetricStore
from agentrl.training.objective_metrics import mean_metric
from agentrl.training.policy_loss import policy_loss
from agentrl.training.scoring import Scores
from agentrl.training.trainer import RolloutTrainer
from agentrl.training.windows import BatchRewards


class GRPOTrainer(RolloutTrainer):
    """Trains a language model, or an agent with tools and environments, with GRPO.

    (Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300.) The arguments are those of TRL's `GRPOTrainer`.

    Args:
        model: A name on the hub or a folder (loaded in float32 unless `model_init_kwargs` says otherwise), a
            `PreTrainedModel` or a PEFT model.
        reward_funcs: A function, a sequence classifier (object or name), or a list of these; may be left out when an
            environment has `get_reward`. A function gets `prompts`, `completions`, `completion_ids`,
            `trainer_state`, `log_extra`, `log_metric`, `environments` (with an environment_factory) and the dataset's
            columns as keywords, and gives back a number, or None where it does not apply, for each completion.
        args: The configuration.
        train_dataset: Rows with a `prompt`, text or messages; may be left out when an environment supplies the
            prompt, with `max_steps` set.
        eval_dataset: A dataset, or several by name.
        processing_class: The tokenizer, or the processor of a vision-language model; loaded with the model's name when
            left out.
        reward_processing_classes: Tokenizers of the reward models.
        callbacks: Trainer callbacks.
        optimizers: An optimizer and a scheduler.
        quantization_config: For loading the model by name; ignored for a model object.
        peft_config: Wraps the model in adapters.
        tools: Functions that the model may call, sync or async, with type hints and a Google-style docstring;
            or `agentrl.Tool.from_schema(...)`.
        rollout_func: Plays the episodes instead of the engine; see `agentrl.training.custom_rollouts`.
        environment_factory: Makes environments; or several factories by name, picked by the dataset's
            `environment` column. See `agentrl.rollout.environments` for the contract.
        agent: A program that owns its loop and plays the episodes with requests to an OpenAI-compatible endpoint:
            `(base_url, api_key, task)` to a reward, or an `agentrl.Agent`; see `agentrl.rollout.endpoint.programs`.
        generator: Samples turns instead of what `args` selects: a generator, or a function of the model that
            makes one, for instance `functools.partial(LocalGenerator, max_cache_tokens=65536)`.

    Raises:
        ConfigurationError: Something passed cannot work; the message says what, where and what to change.
    """

    config_class = GRPOConfig
    algorithm = "GRPO"
    args: GRPOConfig

    def advantages(self, rewards: BatchRewards, kl_R: Tensor | None) -> Tensor:
        """Rewards relative to the group, of whole rows or of turns.

        Raises:
            RewardError: Turns were rewarded, which the configuration cannot make use of.
        """
        args = self.args
        if rewards.returns_RK is not None:
            self._check_turns_count()
            turns = range(rewards.returns_RK.shape[1])
            return torch.stack([self.advantages(rewards.of_turn(k), kl_R) for k in turns], dim=1)
        if args.multi_objective_aggregation == "normalize_then_sum":
            return gdpo_advantages(rewards.values_RF, rewards.weights_F, rewards.group_R)
        return grpo_advantages(rewards.total_R, rewards.group_R, scale=args.scale_rewards)

    def signals(self, rewards: BatchRewards) -> Tensor:
        """The rewards one by one where they are normalised so."""
        decoupled = self.args.multi_objective_aggregation == "normalize_then_sum"
        return rewards.values_RF if decoupled else super().signals(rewards)

    def _check_turns_count(self) -> None:
        args = self.args
        if args.multi_objective_aggregation == "normalize_then_sum":
            raise RewardError(
                "an environment or tool rewarded single turns, but multi_objective_aggregation='normalize_then_sum' "
                "normalises the rewards of whole rollouts; use 'sum_then_normalize', or give such rewards from "
                "reward functions."
            )
        if args.importance_sampling_level == "sequence":
            raise RewardError(
                "an environment or tool rewarded single turns, but importance_sampling_level='sequence' gives all "
                "tokens of a rollout one ratio and so the mean of their advantages; use 'token', or give one reward "
                "for each rollout."
            )

    def selected(self, scores: Scores) -> Tensor | None:
        """The tokens of highest entropy among those that all processes train on now.

        In evaluation a process may have no batch where the others have one, so each looks at its own tokens only.
        """
        share = self.args.top_entropy_quantile
        if share == 1:
            return None
        entropy_N = everywhere = scores.entropy_N.detach()
        if self.model.training:
            padded = self.accelerator.pad_across_processes(entropy_N, pad_index=-1)
            gathered: Tensor = self.accelerator.gather(padded)
            everywhere = gathered[gathered > -0.5]  # rounding may leave an entropy of 0 slightly below it
        return entropy_N >= entropy_threshold(everywhere, share)

    @property
    def corrects_sampler(self) -> bool:
        """Whether the loss is weighted by what the trainer and the sampler make of the same tokens."""
        return self.args.vllm_importance_sampling_correction

    def loss(self, scores: Scores, batch: MicroBatch, denominators: Denominators, metrics: MetricStore) -> Tensor:
        """The policy loss, restricted and weighted as configured, with the KL term where beta is set."""
        args = self.args
        log_ratio_N = log_ratios(
            scores.logps_N, self.old_logps(scores, batch), batch.row_N, batch.rows, args.importance_sampling_level
        )
        loss_N = policy_loss(args, scores, log_ratio_N, batch, metrics, correct_sampler=self.collector.corrects_sampler)
        if args.beta and batch.ref_logps_N is not None:
            ratio_N = ratios(log_ratio_N) if args.use_bias_correction_kl else None
            kl_N = kl_k3(scores.logps_N, batch.ref_logps_N, ratio_N)
            loss_N = loss_N + args.beta * kl_N
            mean_metric("kl", kl_N.detach(), batch.row_N, batch.rows, metrics, level="token")
        return token_loss(
            loss_N,
            batch.row_N,
            batch.rows,
            args.loss_type,
            denominators,
            max_completion_length=args.max_completion_length or 1,
        )
