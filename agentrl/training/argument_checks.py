"""Checks of the arguments that GRPO and RLOO share: what is refused, ranges, contradictions, sizes of batches.

All of them raise `ConfigurationError`, which names the argument, its value and what was expected.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from transformers.trainer_pt_utils import AcceleratorConfig

from agentrl.errors import ConfigurationError
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import require_seconds
from agentrl.training.objective_checks import require
from agentrl.training.vllm_checks import check_vllm

if TYPE_CHECKING:
    from agentrl.training.arguments import RolloutConfig

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

REASONING = ("keep", "fork")


def refuse_unsupported(args: RolloutConfig) -> None:
    """Refuse arguments that are not at their default and that nothing would read."""
    for spec in dataclasses.fields(args):
        if (reason := REFUSED.get(spec.name)) is None:
            continue
        value = getattr(args, spec.name)
        if value not in (_default(spec), None, [], "no"):
            raise ConfigurationError(f"{spec.name}={value!r} is refused: {reason}.")
    usual = AcceleratorConfig()
    for name in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"):
        if getattr(args.accelerator_config, name) != getattr(usual, name):
            raise ConfigurationError(
                f"accelerator_config: {name} is refused: it is about loaders of rows; agentrl cuts windows itargs."
            )


def check_ranges(args: RolloutConfig) -> None:
    """Check each argument that both algorithms have, and that they do not contradict each other."""
    args.num_generations = 1 if args.num_generations is None else args.num_generations
    require(
        args.num_generations >= 2,
        "num_generations",
        args.num_generations,
        "at least 2: a group has a baseline",
    )
    require(
        args.temperature > 0 and math.isfinite(args.temperature),
        "temperature",
        args.temperature,
        "above 0",
    )
    require(0 < args.top_p <= 1, "top_p", args.top_p, "in (0, 1]")
    require(args.top_k >= 0, "top_k", args.top_k, "0 (all tokens) or more")
    require(args.min_p is None or 0 <= args.min_p <= 1, "min_p", args.min_p, "None or in [0, 1]")
    require(args.repetition_penalty > 0, "repetition_penalty", args.repetition_penalty, "above 0")
    require(args.num_iterations >= 1, "num_iterations", args.num_iterations, "at least 1")
    require(args.epsilon >= 0, "epsilon", args.epsilon, "0 or more")
    high = args.epsilon_high
    require(high is None or high >= 0, "epsilon_high", high, "None, 0 or more")
    require(args.beta >= 0, "beta", args.beta, "0 or more")
    length = args.max_completion_length
    require(length is None or length >= 1, "max_completion_length", length, "None or at least 1")
    iterations = args.max_tool_calling_iterations
    require(iterations is None or iterations >= 0, "max_tool_calling_iterations", iterations, "None, 0 or more")
    require(args.reasoning in REASONING, "reasoning", args.reasoning, f"one of {REASONING}")
    for name in ("keep_images", "max_image_pixels"):
        number = getattr(args, name)
        require(number is None or number >= 1, name, number, "None or at least 1")
    rounds = args.dynamic_sampling_max_rounds
    require(rounds >= 0, "dynamic_sampling_max_rounds", rounds, "0 (never) or more")
    alpha, every = args.ref_model_mixup_alpha, args.ref_model_sync_steps
    require(0 <= alpha <= 1, "ref_model_mixup_alpha", alpha, "a share, in [0, 1]")
    require(every >= 1, "ref_model_sync_steps", every, "at least 1")
    if args.sync_ref_model:
        require(args.beta > 0, "beta", args.beta, "above 0: sync_ref_model mixes the reference that beta is for")
    if isinstance(args.pad_to_multiple_of, str) and args.pad_to_multiple_of.isdigit():
        args.pad_to_multiple_of = int(args.pad_to_multiple_of)  # as a command line gives it
    multiple = args.pad_to_multiple_of
    valid = multiple in (None, "auto") or (isinstance(multiple, int) and multiple >= 1)
    require(valid, "pad_to_multiple_of", multiple, "None, 'auto' or a positive number")
    kept = args.journal_keep_steps
    require(kept is None or kept >= 0, "journal_keep_steps", kept, "None, 0 or more")
    require(kept is None or args.journal, "journal_keep_steps", kept, "None: there is no journal (journal=False)")
    for name in ("rollout_timeout", "tool_timeout", "environment_timeout", "preemption_grace"):
        require_seconds(name, getattr(args, name))
    limit = args.tool_max_failures
    require(limit is None or limit >= 2, "tool_max_failures", limit, "None or at least 2")
    check_vllm(args)
    FailurePolicy(args.environment_retries, args.environment_retry_delay, args.max_failure_rate, args.failure_window)


def derive_batch_sizes(args: RolloutConfig) -> None:
    """Fill in generation_batch_size and steps_per_generation, and check that groups fit."""
    step = args.per_device_train_batch_size * args.world_size
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigurationError(
            f"generation_batch_size={args.generation_batch_size} and steps_per_generation="
            f"{args.steps_per_generation} say the same thing; give one of them."
        )
    if args.generation_batch_size is None:
        args.steps_per_generation = args.steps_per_generation or args.gradient_accumulation_steps
        args.generation_batch_size = step * args.steps_per_generation
    elif args.generation_batch_size % step:
        raise ConfigurationError(
            f"generation_batch_size={args.generation_batch_size} must be a multiple of {step} "
            f"(per_device_train_batch_size={args.per_device_train_batch_size} x {args.world_size} processes)."
        )
    else:
        args.steps_per_generation = args.generation_batch_size // step
    generations = args.num_generations
    assert generations is not None
    if args.generation_batch_size % generations:
        fitting = [n for n in range(2, args.generation_batch_size + 1) if args.generation_batch_size % n == 0]
        raise ConfigurationError(
            f"num_generations={generations} does not divide the generation batch of "
            f"{args.generation_batch_size} completions (per_device_train_batch_size="
            f"{args.per_device_train_batch_size} x {args.world_size} processes x steps_per_generation="
            f"{args.steps_per_generation}). num_generations could be {', '.join(map(str, fitting)) or 'none'}."
        )
    if args.eval_strategy != "no":
        batch = args.per_device_eval_batch_size * args.world_size
        if batch % args.eval_generations:
            raise ConfigurationError(
                f"the evaluation batch of {batch} completions (per_device_eval_batch_size="
                f"{args.per_device_eval_batch_size} x {args.world_size} processes) is not a multiple of "
                f"num_generations_eval={args.eval_generations}."
            )


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default
