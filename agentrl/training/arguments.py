"""The trainers' configurations: documented names and defaults on `transformers.TrainingArguments`.

Every argument does what its description says or is refused at construction with a reason; none is accepted and
ignored. Names, defaults and meaning follow the documentation of TRL's `GRPOConfig` and `RLOOConfig`, so that a
script keeps working when its import changes. What differs:

- `bf16` is on by default where the device has it, and off on the CPU, which only emulates it. Mixed precision costs
  the exactness of `sampling/sampling_logp_difference` (see the docs on exactness).
- `RLOOConfig` has `max_tool_calling_iterations` too, since `RLOOTrainer` takes tools.
- `gradient_checkpointing` is `transformers`' `activation_checkpointing` under its documented name.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from agentrl.errors import ConfigurationError
from agentrl.objectives.aggregation import AGGREGATIONS
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import require_seconds
from agentrl.training.objective_checks import check_objective
from agentrl.training.objective_checks import require as _require
from agentrl.training.vllm_checks import check_vllm

_OWN_LOSS = "the objective is computed by agentrl, not from labels"

REFUSED: dict[str, str] = {
    "label_smoothing_factor": _OWN_LOSS,
    "label_names": _OWN_LOSS,
    "include_for_metrics": "rewards are the metrics; there are no predictions to pass to compute_metrics",
    "batch_eval_metrics": "rewards are the metrics; there are no predictions to pass to compute_metrics",
    "train_sampling_strategy": "rows are drawn in groups; use shuffle_dataset to switch shuffling off",
    "length_column_name": "rows are drawn in groups, not by length",
    "auto_find_batch_size": "groups would be cut differently; set per_device_train_batch_size",
    "dataloader_drop_last": "training leaves a last window that is not full out always, evaluation plays it always",
    "average_tokens_across_devices": "the loss divides by what all processes have together, always",
    "include_num_input_tokens_seen": "the metric num_tokens counts them always",
    "ds3_gather_for_generation": "each process plays episodes at its own pace, which needs the weights in one piece",
    "parallelism_config": "rows are scored by their positions, which other parallelism than of data cuts apart",
    # Of the asynchronous trainers only
    "queue_maxsize": "what may wait is bounded by max_staleness; nothing is ever dropped from a queue",
    "heartbeat_stale_after_s": "rollouts are played in this process: an error ends the run at once, a blocked event "
    "loop is logged, and what may hang has deadlines of its own (rollout_timeout, tool_timeout, environment_timeout)",
    "token_budget": "micro-batches hold per_device_train_batch_size rows on average, balanced by their cost",
    "fork_threshold_tokens": "rows are token-exact, no turn is tokenized twice; see reasoning='fork'",
}
"""Arguments that only work at their default in this version, and why. (A test walks all fields.)"""

CISPO_WEIGHT = 5.0
"""What epsilon_high is with loss_type="cispo" unless given, as ScaleRL recommends."""

REASONING = ("keep", "fork")


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class RolloutConfig(TrainingArguments):
    """What GRPO and RLOO share; use `GRPOConfig` or `RLOOConfig`."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012 - transformers reads it as a class attribute
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    learning_rate: float = _arg(1e-6, "Initial learning rate.")
    logging_steps: float = _arg(10, "Log every so many optimizer steps; below 1, a share of all steps.")
    gradient_checkpointing: bool | None = _arg(True, "Recompute activations in the backward pass to save memory.")
    bf16: bool | None = _arg(  # type: ignore[assignment]
        None, "Mixed bfloat16; default: on where the device has it, unless fp16 is set."
    )
    remove_unused_columns: bool | None = _arg(  # type: ignore[assignment]
        False,
        "Keep only `prompt` (and `environment`): reward functions and reset() then see no other column.",
    )

    # Model and reference model
    model_init_kwargs: dict[str, Any] | str | None = _arg(
        None, "Keyword arguments for from_pretrained when `model` is a name; dtype defaults to float32."
    )
    trust_remote_code: bool = _arg(False, "Allow model, reward model and tokenizer code from the hub to run.")
    router_aux_loss_coef: float | None = _arg(
        None, "Weight of a mixture-of-experts model's balancing loss; default: that of its config. 0.0: none."
    )
    freeze_vision_tower: bool = _arg(
        False, "Leave the weights that encode images as they are; for vision-language models."
    )
    disable_dropout: bool = _arg(False, "Set all dropout probabilities of the policy and the reference to 0.")

    # Data
    num_generations: int | None = _arg(8, "Completions sampled for each prompt: the group size.")
    num_generations_eval: int | None = _arg(None, "The same in evaluation; None takes num_generations.")
    max_completion_length: int | None = _arg(
        512, "Most tokens after the prompt, over the whole episode, tool results included; None: no limit."
    )
    max_tool_calling_iterations: int | None = _arg(None, "Most tool rounds in an episode; 0: no call is run.")
    ds3_gather_for_generation: bool = _arg(True, "DeepSpeed ZeRO-3 only: gather the weights for generation.")
    shuffle_dataset: bool | None = _arg(True, "Shuffle the training dataset each epoch.")
    dynamic_sampling_max_rounds: int = _arg(
        0, "How often groups whose rewards are all equal are drawn again with other prompts (DAPO); 0: never."
    )
    pad_to_multiple_of: int | str | None = _arg("auto", "Pad rows to a multiple; `auto` pads on Neuron only.")

    # Generation
    generation_batch_size: int | None = _arg(
        None, "Completions generated at once over all processes; excludes steps_per_generation."
    )
    steps_per_generation: int | None = _arg(
        None, "Micro-batches made of one generation; default: gradient_accumulation_steps."
    )
    temperature: float = _arg(1.0, "Sampling temperature.")
    top_p: float = _arg(1.0, "Keep the likeliest tokens whose probabilities reach this sum, in (0, 1].")
    top_k: int = _arg(0, "Keep the k likeliest tokens; 0 keeps all.")
    min_p: float | None = _arg(None, "Keep tokens at least this fraction as likely as the likeliest.")
    generation_kwargs: dict[str, Any] | str | None = _arg(
        None, "Further GenerationConfig arguments; they win over the ones above."
    )
    chat_template_kwargs: dict[str, Any] | str | None = _arg(None, "Further arguments of the chat template.")
    reasoning: str = _arg(
        "keep",
        "What becomes, after a tool round, of earlier turns that the chat template would rewrite (it drops their "
        "reasoning): `keep` them in the row, or `fork` into a new row that starts with the rewritten context.",
    )
    keep_images: int | None = _arg(
        None,
        "Most images that the model sees at once, the last ones; when a tool round brings more, the episode goes on in "
        "a new row without the earlier ones. None: all.",
    )
    drop_repeated_images: bool = _arg(
        False,
        "Whether an image in a tool's result that is the same, pixel by pixel, as the image before it is told in words "
        "(`[same image as before]`).",
    )
    max_image_pixels: int | None = _arg(
        None, "Most pixels of an image; a larger one is made smaller before the processor gets it."
    )
    repetition_penalty: float = _arg(1.0, "Penalty on tokens that occur in the row already; 1.0: none.")
    cache_implementation: str | None = _arg(None, "A cache of transformers' generate; selects that generator.")
    use_transformers_continuous_batching: bool = _arg(False, "Generate with transformers' continuous batching.")
    transformers_continuous_batching_config: dict[str, Any] | str | None = _arg(
        None, "Arguments of its ContinuousBatchingConfig."
    )
    use_transformers_paged: bool = _arg(False, "Deprecated: use_transformers_continuous_batching.")

    # vLLM
    use_vllm: bool = _arg(False, "Generate with vLLM.")
    vllm_mode: str = _arg("colocate", "`colocate`: in the trainer's process; or `server`: `vllm serve` elsewhere.")
    vllm_model_impl: str = _arg("vllm", "colocate: vLLM's own implementation of the model, or `transformers`.")
    vllm_enable_sleep_mode: bool = _arg(False, "colocate: give vLLM's memory to the optimizer step.")
    vllm_structured_outputs_regex: str | None = _arg(None, "Regular expression that each turn must match.")
    vllm_server_base_url: str | None = _arg(
        None, "server: base URL instead of host and port; several servers are separated by commas."
    )
    vllm_server_host: str = _arg("0.0.0.0", "server: its host.")
    vllm_server_port: int = _arg(8000, "server: its port.")
    vllm_server_timeout: float = _arg(
        240.0, "server: seconds to wait for it to be up, at the start and later, and for each step of sending weights."
    )
    vllm_request_timeout: float = _arg(1800.0, "server: seconds that a turn may take before it is asked for again.")
    vllm_group_port: int = _arg(51216, "server: port of this process for sending weights; servers add their number.")
    vllm_gpu_memory_utilization: float = _arg(0.3, "colocate: share of GPU memory for vLLM.")
    vllm_max_model_length: int | None = _arg(None, "colocate: context length; default: that of the model.")
    vllm_tensor_parallel_size: int = _arg(1, "colocate: processes that share one vLLM; divides their number.")

    # Objective
    beta: float = _arg(0.0, "KL coefficient; 0.0 loads no reference model.")
    num_iterations: int = _arg(1, "Times each generated batch is trained on.")
    epsilon: float = _arg(0.2, "Lower clip range of the probability ratio.")
    epsilon_high: float | None = _arg(
        None, "Upper clip range; default: epsilon. With cispo the largest importance weight; default: 5.0."
    )
    reward_weights: list[float] | None = _arg(None, "A weight for each reward function; default: 1.0 each.")
    mask_truncated_completions: bool = _arg(False, "Leave truncated completions out of the loss.")
    sync_ref_model: bool = _arg(False, "Mix the policy into the reference model now and then; needs beta.")
    ref_model_mixup_alpha: float = _arg(0.6, "With sync_ref_model: share of the policy in that mix.")
    ref_model_sync_steps: int = _arg(512, "With sync_ref_model: optimizer steps between mixes.")

    # Logging
    log_completions: bool = _arg(False, "Show prompts and completions every logging_steps.")
    log_multimodal: bool = _arg(True, "Include images in what log_completions logs.")
    num_completions_to_print: int | None = _arg(None, "How many of them; None: all.")
    log_unique_prompts: bool = _arg(False, "Show one completion for each prompt only.")

    # What goes wrong
    rollout_timeout: float | None = _arg(None, "Most seconds from reset() to the last turn; None: no limit.")
    tool_timeout: float | None = _arg(600.0, "Most seconds of a tool call where @tool says nothing; None: no limit.")
    tool_max_failures: int | None = _arg(
        100, "Failed calls of a tool in a row, over all rollouts, that stop the run; None: any number."
    )
    environment_timeout: float | None = _arg(
        600.0, "Most seconds of making an environment, of reset() and of get_reward(), each; None: no limit."
    )
    environment_retries: int = _arg(2, "Further attempts at a rollout whose environment failed.")
    environment_retry_delay: float = _arg(
        1.0, "Seconds before the first of them, doubled for each further one up to 60; a random part is left out."
    )
    max_failure_rate: float = _arg(0.5, "Share of the last rollouts that may be lost to failed environments.")
    failure_window: int = _arg(100, "How many the last rollouts are.")

    # What was played
    journal: bool = _arg(True, "Keep every turn in output_dir/_rollouts.db, before the next one is sampled.")
    journal_keep_steps: int | None = _arg(
        None, "Delete from the journal what was played more optimizer steps ago than this; None: nothing."
    )
    preemption_grace: float | None = _arg(
        25.0, "Most seconds from SIGTERM to the end of the process, which saves first; None: SIGTERM kills it."
    )

    def __post_init__(self) -> None:
        if self.use_transformers_paged:
            warnings.warn(
                "use_transformers_paged is deprecated; use use_transformers_continuous_batching",
                FutureWarning,
                stacklevel=3,
            )
            self.use_transformers_continuous_batching = True
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and _device_has_bf16()
        if getattr(self, "activation_checkpointing", False) is None:  # transformers before 5.24 has the old name only
            # Set before the base class looks, which would warn about its documented name on every construction.
            self.activation_checkpointing = self.gradient_checkpointing
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        super().__post_init__()
        self._refuse_unsupported()
        if self.fp16 and self.device.type == "cpu":
            raise ConfigurationError(
                "fp16=True: accelerate has no float16 autocast on the CPU; use bf16=True or neither."
            )
        self._check_ranges()
        self._derive_batch_sizes()

    @property
    def upper_clip(self) -> float:
        """The effective `epsilon_high`."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def eval_generations(self) -> int:
        """Completions for each prompt in evaluation."""
        return self.num_generations_eval or self.num_generations or 1

    @property
    def prompts_per_generation(self) -> int:
        """Distinct prompts in one generation batch, over all processes."""
        assert self.generation_batch_size is not None
        assert self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    def _refuse_unsupported(self) -> None:
        for spec in dataclasses.fields(self):
            if (reason := REFUSED.get(spec.name)) is None:
                continue
            value = getattr(self, spec.name)
            if value not in (_default(spec), None, [], "no"):
                raise ConfigurationError(f"{spec.name}={value!r} is refused: {reason}.")
        usual = AcceleratorConfig()
        for name in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"):
            if getattr(self.accelerator_config, name) != getattr(usual, name):
                raise ConfigurationError(
                    f"accelerator_config: {name} is refused: it is about loaders of rows; agentrl cuts windows itself."
                )

    def _check_ranges(self) -> None:
        self.num_generations = 1 if self.num_generations is None else self.num_generations
        _require(
            self.num_generations >= 2,
            "num_generations",
            self.num_generations,
            "at least 2: a group has a baseline",
        )
        _require(
            self.temperature > 0 and math.isfinite(self.temperature),
            "temperature",
            self.temperature,
            "above 0",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _require(self.min_p is None or 0 <= self.min_p <= 1, "min_p", self.min_p, "None or in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        _require(self.num_iterations >= 1, "num_iterations", self.num_iterations, "at least 1")
        _require(self.epsilon >= 0, "epsilon", self.epsilon, "0 or more")
        high = self.epsilon_high
        _require(high is None or high >= 0, "epsilon_high", high, "None, 0 or more")
        _require(self.beta >= 0, "beta", self.beta, "0 or more")
        length = self.max_completion_length
        _require(length is None or length >= 1, "max_completion_length", length, "None or at least 1")
        iterations = self.max_tool_calling_iterations
        _require(iterations is None or iterations >= 0, "max_tool_calling_iterations", iterations, "None, 0 or more")
        _require(self.reasoning in REASONING, "reasoning", self.reasoning, f"one of {REASONING}")
        for name in ("keep_images", "max_image_pixels"):
            number = getattr(self, name)
            _require(number is None or number >= 1, name, number, "None or at least 1")
        rounds = self.dynamic_sampling_max_rounds
        _require(rounds >= 0, "dynamic_sampling_max_rounds", rounds, "0 (never) or more")
        alpha, every = self.ref_model_mixup_alpha, self.ref_model_sync_steps
        _require(0 <= alpha <= 1, "ref_model_mixup_alpha", alpha, "a share, in [0, 1]")
        _require(every >= 1, "ref_model_sync_steps", every, "at least 1")
        if self.sync_ref_model:
            _require(self.beta > 0, "beta", self.beta, "above 0: sync_ref_model mixes the reference that beta is for")
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of.isdigit():
            self.pad_to_multiple_of = int(self.pad_to_multiple_of)  # as a command line gives it
        multiple = self.pad_to_multiple_of
        valid = multiple in (None, "auto") or (isinstance(multiple, int) and multiple >= 1)
        _require(valid, "pad_to_multiple_of", multiple, "None, 'auto' or a positive number")
        kept = self.journal_keep_steps
        _require(kept is None or kept >= 0, "journal_keep_steps", kept, "None, 0 or more")
        _require(kept is None or self.journal, "journal_keep_steps", kept, "None: there is no journal (journal=False)")
        for name in ("rollout_timeout", "tool_timeout", "environment_timeout", "preemption_grace"):
            require_seconds(name, getattr(self, name))
        limit = self.tool_max_failures
        _require(limit is None or limit >= 2, "tool_max_failures", limit, "None or at least 2")
        check_vllm(self)
        FailurePolicy(
            self.environment_retries, self.environment_retry_delay, self.max_failure_rate, self.failure_window
        )

    def _derive_batch_sizes(self) -> None:
        """Fill in generation_batch_size and steps_per_generation, and check that groups fit."""
        step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ConfigurationError(
                f"generation_batch_size={self.generation_batch_size} and steps_per_generation="
                f"{self.steps_per_generation} say the same thing; give one of them."
            )
        if self.generation_batch_size is None:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = step * self.steps_per_generation
        elif self.generation_batch_size % step:
            raise ConfigurationError(
                f"generation_batch_size={self.generation_batch_size} must be a multiple of {step} "
                f"(per_device_train_batch_size={self.per_device_train_batch_size} x {self.world_size} processes)."
            )
        else:
            self.steps_per_generation = self.generation_batch_size // step
        generations = self.num_generations
        assert generations is not None
        if self.generation_batch_size % generations:
            fitting = [n for n in range(2, self.generation_batch_size + 1) if self.generation_batch_size % n == 0]
            raise ConfigurationError(
                f"num_generations={generations} does not divide the generation batch of "
                f"{self.generation_batch_size} completions (per_device_train_batch_size="
                f"{self.per_device_train_batch_size} x {self.world_size} processes x steps_per_generation="
                f"{self.steps_per_generation}). num_generations could be {', '.join(map(str, fitting)) or 'none'}."
            )
        if self.eval_strategy != "no":
            batch = self.per_device_eval_batch_size * self.world_size
            if batch % self.eval_generations:
                raise ConfigurationError(
                    f"the evaluation batch of {batch} completions (per_device_eval_batch_size="
                    f"{self.per_device_eval_batch_size} x {self.world_size} processes) is not a multiple of "
                    f"num_generations_eval={self.eval_generations}."
                )


@dataclass
class GRPOConfig(RolloutConfig):
    """Configuration of `GRPOTrainer`; see `RolloutConfig` for what it shares with RLOO."""

    cast_lm_head_to_fp32: bool = _arg(
        False, "Keep and run the language-model head in float32; for models whose embeddings are not tied."
    )
    delta: float | None = _arg(
        None, "Bound of the ratio where it is not clipped (INTELLECT-2), above 1 + epsilon_high."
    )
    sapo_temperature_neg: float = _arg(1.05, "SAPO: temperature of tokens with advantage <= 0.")
    sapo_temperature_pos: float = _arg(1.0, "SAPO: temperature of tokens with advantage > 0.")
    vespo_k_pos: float = _arg(2.0, "VESPO: power for positive advantages.")
    vespo_lambda_pos: float = _arg(3.0, "VESPO: decay for positive advantages.")
    vespo_k_neg: float = _arg(3.0, "VESPO: power for negative advantages.")
    vespo_lambda_neg: float = _arg(2.0, "VESPO: decay for negative advantages.")
    importance_sampling_level: str = _arg("token", "`token`, or `sequence` (GSPO).")
    multi_objective_aggregation: str = _arg(
        "sum_then_normalize", "How several rewards are combined; or `normalize_then_sum` (GDPO)."
    )
    turn_discount: float = _arg(
        1.0, "Where turns have rewards: factor for each turn between a reward and the turn credited with it."
    )
    scale_rewards: str = _arg("group", "Divide advantages by the std of the `group`, the `batch`, or `none`.")
    loss_type: str = _arg("dapo", f"One of {', '.join(AGGREGATIONS)}.")
    top_entropy_quantile: float = _arg(
        1.0, "Share of the tokens, those of highest entropy, that the policy loss keeps."
    )
    entropy_coef: float = _arg(0.0, "Weight of the entropy bonus, the first one when it is adapted.")
    use_adaptive_entropy: bool = _arg(
        False, "Adapt that weight after each optimizer step (Skywork-OR1), and apply it at or below the target only."
    )
    entropy_coef_min: float = _arg(0.0, "With use_adaptive_entropy: lower bound of the weight.")
    entropy_coef_max: float = _arg(1.0, "With use_adaptive_entropy: upper bound of the weight.")
    entropy_coef_delta: float = _arg(0.005, "With use_adaptive_entropy: how far it moves in a step.")
    entropy_target: float = _arg(0.2, "With use_adaptive_entropy: the entropy aimed at, in nats a token.")
    vllm_importance_sampling_correction: bool = _arg(
        True, "Weigh the loss by how the trainer's logprobs differ from the sampler's, whatever sampled."
    )
    vllm_importance_sampling_mode: str = _arg(
        "sequence_mask", "`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`."
    )
    vllm_importance_sampling_clip_max: float | None = _arg(3.0, "Largest weight; None: no bound.")
    vllm_importance_sampling_clip_min: float | None = _arg(None, "Smallest weight; None: no bound.")
    off_policy_mask_threshold: float | None = _arg(
        None, "Leave out rows of negative advantage that have drifted by more nats a token."
    )
    use_bias_correction_kl: bool = _arg(True, "Weight the KL term by the importance ratio (DeepSeek-V3.2).")
    log_completions_hub_repo: str | None = _arg(None, "Hub repository for completions.")
    vllm_importance_sampling_cap: float | None = _arg(None, "Deprecated: vllm_importance_sampling_clip_max.")

    def __post_init__(self) -> None:
        switches = {"True": "group", "False": "none"}  # TRL's older values; a command line gives them as text
        self.scale_rewards = switches.get(str(self.scale_rewards), self.scale_rewards)
        if self.vllm_importance_sampling_cap is not None:
            warnings.warn(
                "vllm_importance_sampling_cap is deprecated; use vllm_importance_sampling_clip_max",
                FutureWarning,
                stacklevel=3,
            )
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        super().__post_init__()
        check_objective(self)
        if self.log_completions_hub_repo is not None and not self.log_completions:
            raise ConfigurationError(
                f"log_completions_hub_repo={self.log_completions_hub_repo!r} uploads what log_completions collects; "
                "set log_completions=True."
            )

    @property
    def upper_clip(self) -> float:
        """The effective `epsilon_high`."""
        return CISPO_WEIGHT if self.loss_type == "cispo" and self.epsilon_high is None else super().upper_clip


@dataclass
class RLOOConfig(RolloutConfig):
    """Configuration of `RLOOTrainer`; see `RolloutConfig` for what it shares with GRPO."""

    num_generations: int | None = _arg(2, "Completions sampled for each prompt: the group size.")
    beta: float = _arg(0.05, "KL coefficient, applied in the reward; 0.0 loads no reference model.")
    normalize_advantages: bool = _arg(False, "Give the advantages of a generation batch mean 0 and std 1.")
    # A list, so that a command line can give two numbers; a tuple is as good.
    reward_clip_range: list[float] | None = _arg(None, "Clip the total reward to (min, max).")

    def __post_init__(self) -> None:
        super().__post_init__()
        clip = self.reward_clip_range
        valid = clip is None or (len(clip) == 2 and clip[0] < clip[1])
        _require(valid, "reward_clip_range", clip, "None or (min, max) with min < max")
        self.reward_clip_range = None if clip is None else list(clip)


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default


def _device_has_bf16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return bool(getattr(torch, "xpu", None) and torch.xpu.is_available())


def as_dict(value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """Narrow an argument that a command line gives as JSON, which `TrainingArguments` has parsed by now."""
    if value is None or isinstance(value, dict):
        return value
    raise ConfigurationError(f"expected a JSON object, not {value!r}.")
