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

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from agentrl.errors import ConfigurationError
from agentrl.objectives.aggregation import AGGREGATIONS
from agentrl.training.argument_checks import check_ranges, derive_batch_sizes, refuse_unsupported, require
from agentrl.training.objective_checks import check_objective

CISPO_WEIGHT = 5.0
"""What epsilon_high is with loss_type="cispo" unless given, as ScaleRL recommends."""


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
        refuse_unsupported(self)
        if self.fp16 and self.device.type == "cpu":
            raise ConfigurationError(
                "fp16=True: accelerate has no float16 autocast on the CPU; use bf16=True or neither."
            )
        check_ranges(self)
        derive_batch_sizes(self)

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
        require(valid, "reward_clip_range", clip, "None or (min, max) with min < max")
        self.reward_clip_range = None if clip is None else list(clip)


def _device_has_bf16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return bool(getattr(torch, "xpu", None) and torch.xpu.is_available())


def as_dict(value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """Narrow an argument that a command line gives as JSON, which `TrainingArguments` has parsed by now."""
    if value is None or isinstance(value, dict):
        return value
    raise ConfigurationError(f"expected a JSON object, not {value!r}.")
