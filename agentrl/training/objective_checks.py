"""Checks of the arguments that describe GRPO's objective: ranges, and what contradicts what."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from agentrl.errors import ConfigurationError
from agentrl.objectives.advantages import SCALES
from agentrl.objectives.aggregation import AGGREGATIONS
from agentrl.objectives.importance import CORRECTION_MODES
from agentrl.objectives.losses import IMPORTANCE_LEVELS

if TYPE_CHECKING:
    from agentrl.training.arguments import GRPOConfig

REWARD_AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
"""How several rewards become one advantage."""

UNCLIPPED = ("sapo", "vespo")
"""Loss types without a clipped ratio."""

WITHOUT_EPSILON = (*UNCLIPPED, "cispo")
"""Loss types without the clipped surrogate and its bounds around 1."""


def check_objective(args: GRPOConfig) -> None:
    """Check the loss type and what qualifies it.

    Raises:
        ConfigurationError: A value is out of range, or two arguments contradict each other.
    """
    require(args.loss_type in AGGREGATIONS, "loss_type", args.loss_type, f"one of {tuple(AGGREGATIONS)}")
    level = args.importance_sampling_level
    require(level in IMPORTANCE_LEVELS, "importance_sampling_level", level, f"one of {IMPORTANCE_LEVELS}")
    _check_bounds(args)
    _check_level(args)
    if args.loss_type == "dr_grpo":
        length = args.max_completion_length
        require(length is not None, "max_completion_length", length, "a number: dr_grpo divides by it")
    for prefix in ("sapo_temperature", "vespo_k", "vespo_lambda"):
        for name in (f"{prefix}_pos", f"{prefix}_neg"):
            require(getattr(args, name) > 0, name, getattr(args, name), "above 0")
    quantile, threshold = args.top_entropy_quantile, args.off_policy_mask_threshold
    require(0 <= quantile <= 1, "top_entropy_quantile", quantile, "in [0, 1]")
    require(threshold is None or threshold > 0, "off_policy_mask_threshold", threshold, "None or above 0")
    _check_correction(args)
    _check_rewards(args)
    _check_entropy(args)


def _check_bounds(args: GRPOConfig) -> None:
    """Check epsilon, epsilon_high and delta against each other and the loss type."""
    loss_type, high, delta = args.loss_type, args.epsilon_high, args.delta
    if args.epsilon != type(args).epsilon and loss_type in WITHOUT_EPSILON:
        raise ConfigurationError(f"epsilon={args.epsilon} does nothing with loss_type={loss_type!r}; leave it out.")
    if high is not None and loss_type in UNCLIPPED:
        raise ConfigurationError(f"epsilon_high={high} does nothing with loss_type={loss_type!r}, which does not clip.")
    if delta is not None and loss_type in WITHOUT_EPSILON:
        raise ConfigurationError(
            f"delta={delta} does nothing with loss_type={loss_type!r}; it bounds the clipped losses (grpo, dapo, ...)."
        )
    if delta is not None and delta <= 1 + args.upper_clip:
        raise ConfigurationError(
            f"delta={delta} must be above 1 + epsilon_high (epsilon when that is not given) = {1 + args.upper_clip}: "
            "below, it would take the place of that bound."
        )
    if loss_type == "cispo":
        require(args.upper_clip > 0, "epsilon_high", high, "above 0: with cispo it is the largest weight")
        if args.upper_clip < 1:
            warnings.warn(
                f"epsilon_high={high} with loss_type='cispo' is the largest importance weight itself, not its distance "
                "from 1: below 1 it scales down tokens that nothing has moved. ScaleRL recommends 5.0.",
                stacklevel=2,
            )


def _check_level(args: GRPOConfig) -> None:
    """Check the importance sampling level against the loss type."""
    loss_type, level = args.loss_type, args.importance_sampling_level
    if loss_type == "vespo" and level != "token":
        raise ConfigurationError(
            f"importance_sampling_level={level!r} does nothing with loss_type='vespo', whose importance weight is that "
            "of the whole row already; leave it at 'token'."
        )
    if loss_type == "luspo" and level != "sequence":
        warnings.warn(
            f"loss_type='luspo' with importance_sampling_level={level!r} is not the published objective; set "
            "importance_sampling_level='sequence'.",
            stacklevel=2,
        )
    if level == "sequence" and loss_type in ("bnpo", "cispo", "dapo", "dr_grpo"):
        warnings.warn(
            f"loss_type={loss_type!r} with importance_sampling_level='sequence' weighs each completion by its length; "
            "GSPO as published is loss_type='grpo'.",
            stacklevel=2,
        )


def _check_correction(args: GRPOConfig) -> None:
    """Check the importance sampling correction."""
    mode = args.vllm_importance_sampling_mode
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    require(mode in CORRECTION_MODES, "vllm_importance_sampling_mode", mode, f"one of {CORRECTION_MODES}")
    require(low is None or low >= 0, "vllm_importance_sampling_clip_min", low, "None, 0 or more")
    require(high is None or high > 0, "vllm_importance_sampling_clip_max", high, "None or above 0")
    if low is not None and high is not None and low >= high:
        raise ConfigurationError(
            f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}."
        )
    if args.vllm_importance_sampling_correction and mode.endswith("truncate") and low is None and high is None:
        raise ConfigurationError(
            f"vllm_importance_sampling_mode={mode!r} needs a bound: set vllm_importance_sampling_clip_max or "
            "vllm_importance_sampling_clip_min."
        )


def _check_rewards(args: GRPOConfig) -> None:
    """Check how rewards become advantages."""
    aggregation, scale, discount = args.multi_objective_aggregation, args.scale_rewards, args.turn_discount
    require(scale in SCALES, "scale_rewards", scale, f"one of {SCALES}")
    require(
        aggregation in REWARD_AGGREGATIONS, "multi_objective_aggregation", aggregation, f"one of {REWARD_AGGREGATIONS}"
    )
    if aggregation == "normalize_then_sum":
        require(scale == "group", "scale_rewards", scale, "'group', as normalize_then_sum scales by definition")
    require(0 <= discount <= 1, "turn_discount", discount, "in [0, 1]")


def _check_entropy(args: GRPOConfig) -> None:
    """Check the entropy bonus."""
    coef, low, high = args.entropy_coef, args.entropy_coef_min, args.entropy_coef_max
    require(math.isfinite(coef), "entropy_coef", coef, "a finite number")
    require(low <= high, "entropy_coef_min", low, f"at most entropy_coef_max={high}")
    require(args.entropy_coef_delta >= 0, "entropy_coef_delta", args.entropy_coef_delta, "0 or more")
    if args.use_adaptive_entropy:
        require(low <= coef <= high, "entropy_coef", coef, f"in [{low}, {high}], where use_adaptive_entropy keeps it")


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Refuse an argument by its name.

    Raises:
        ConfigurationError: `condition` is False.
    """
    if not condition:
        raise ConfigurationError(f"{name}={value!r}: expected {expected}.")
