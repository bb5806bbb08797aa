"""The runs that are compared: every objective and option whose definition is the same here and in TRL.

Rows of one step lie in one micro-batch unless a case is about cutting them; most train twice on what was played
(`num_iterations` 2), so that ratios, clipping and old logprobs matter.
"""

from __future__ import annotations

from typing import Any

from tests.parity.harness import Case, Rollouts, by_ids, by_length, sometimes

NOISY = Rollouts(noise=0.3)
SEQUENCE: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
VESPO: dict[str, Any] = {"loss_type": "vespo", "learning_rate": 0.05}
GAMMA: dict[str, Any] = {f"vespo_{name}": 0.5 for name in ("k_pos", "k_neg", "lambda_pos", "lambda_neg")}
KL: dict[str, Any] = {"loss_type": "grpo", "beta": 0.2}
SYNC: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
TOP: dict[str, Any] = {"top_entropy_quantile": 0.4}
ROUTER: dict[str, Any] = {"loss_type": "grpo", "router_aux_loss_coef": 0.5}
CUT: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
CLIPPING = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
OVER_ALL_ROWS = frozenset({"entropy", "kl", *CLIPPING})
"""TRL averages these over micro-batches, however many tokens each has, minima and maxima too."""
ADAPTIVE: dict[str, Any] = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.3,
    "entropy_coef_delta": 0.1,
    "entropy_coef_max": 1.0,
    "max_steps": 4,
}
HIGH_TARGET = {"entropy_target": 5.8}  # the entropy of equal odds is log(356) = 5.87

LOSSES = [
    Case("grpo", {"loss_type": "grpo"}),
    Case("dapo"),
    Case("bnpo", CUT | {"loss_type": "bnpo"}, apart=OVER_ALL_ROWS),
    Case("dr_grpo", {"loss_type": "dr_grpo"}),
    Case("cispo", {"loss_type": "cispo", "epsilon_high": 1.1}),
    Case("sapo", {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0}),
    Case("luspo", {"loss_type": "luspo", "importance_sampling_level": "sequence", "learning_rate": 0.05}),
    Case("luspo, token level", {"loss_type": "luspo", "learning_rate": 0.05}),
    Case("vespo", VESPO),
    Case("vespo, k and lambda", VESPO | GAMMA, unlike=VESPO),
]
RATIOS = [
    Case("sequence level", SEQUENCE),
    Case("sequence level, wide", SEQUENCE | {"epsilon": 0.8, "epsilon_high": 3.0}, unlike=SEQUENCE),
    Case("sequence level, sapo", {"loss_type": "sapo", "importance_sampling_level": "sequence"}),
    Case("epsilon", {"epsilon": 0.05}),
    Case("epsilon_high", {"epsilon_high": 0.4}),
    Case("delta", {"delta": 1.21}),
]
REGULARIZERS = [
    Case("beta, bias correction", KL),
    Case("beta, plain k3", KL | {"use_bias_correction_kl": False}, unlike=KL),
    Case("beta, dapo", {"beta": 0.2}),
    Case("beta, sequence level", SEQUENCE | {"beta": 0.2}),
    Case("sync_ref_model", KL | SYNC, unlike=KL),
    Case("entropy_coef", {"entropy_coef": 0.5}),
    Case("entropy_coef, grpo", {"loss_type": "grpo", "entropy_coef": 0.5}),
    Case("adaptive entropy, below the target", ADAPTIVE | HIGH_TARGET),
    Case("adaptive entropy, about the target", ADAPTIVE | {"entropy_target": 5.7094}, unlike=ADAPTIVE | HIGH_TARGET),
    Case("router_aux_loss_coef", ROUTER, family="qwen3_moe"),
    Case("router_aux_loss_coef, cut", CUT | ROUTER, family="qwen3_moe", apart=OVER_ALL_ROWS),
]
SELECTIONS = [
    Case("off_policy_mask_threshold", {"off_policy_mask_threshold": 0.01}, rollouts=NOISY),
    Case("top_entropy_quantile", TOP),
    Case("top_entropy_quantile, entropy_coef", TOP | {"entropy_coef": 0.5}, unlike=TOP),
    Case("env_mask", {"loss_type": "grpo", "beta": 0.2}, rollouts=Rollouts(masked=True)),
    Case("env_mask, sequence level", SEQUENCE, rollouts=Rollouts(masked=True)),
    Case("mask_truncated_completions", {"mask_truncated_completions": True}, rollouts=Rollouts(truncated=True)),
]
REWARDS = [
    Case("scale_rewards batch", {"scale_rewards": "batch"}),
    Case("scale_rewards none", {"scale_rewards": "none"}),
    Case("two rewards", {}, rewards=(by_ids, by_length)),
    Case("reward_weights", {"reward_weights": [0.3, 2.0]}, rewards=(by_ids, by_length)),
    Case(
        "normalize_then_sum",
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
        rewards=(by_ids, by_length),
    ),
    Case("None rewards", {}, rewards=(by_ids, sometimes)),
    Case(
        "None rewards, normalize_then_sum",
        {"multi_objective_aggregation": "normalize_then_sum"},
        rewards=(by_ids, sometimes),
    ),
]
STEPS = [
    Case("num_iterations 1", {"num_iterations": 1}),
    Case("num_iterations 3", {"num_iterations": 3}),
    Case("gradient accumulation", CUT | {"num_iterations": 1}, rollouts=Rollouts(ragged=False)),
    Case("gradient accumulation, num_iterations", CUT | {"beta": 0.2}, rollouts=Rollouts(ragged=False)),
    Case(
        "steps_per_generation",
        {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4},
        rollouts=Rollouts(ragged=False),
    ),
    Case(
        "steps_per_generation, grpo, ragged",
        {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4, "loss_type": "grpo"},
    ),
    Case("temperature", {"temperature": 0.7, "entropy_coef": 0.2}),
    Case("max_grad_norm", {"max_grad_norm": 0.5}),
]


def _corrected(mode: str, **options: Any) -> Case:
    bounds = {"vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_clip_min": 0.7}
    settings = {"vllm_importance_sampling_mode": mode, **bounds, **options}
    about = (name for name in options if name not in ("loss_type", "learning_rate"))
    name = ", ".join([mode, *([options["loss_type"]] if "loss_type" in options else []), *about])
    return Case(name, settings, rollouts=NOISY, corrects=True, unlike=options)


CORRECTIONS = [
    _corrected("token_truncate"),
    _corrected("token_mask"),
    _corrected("sequence_truncate"),
    _corrected("sequence_mask"),
    _corrected("sequence_mask", num_iterations=1),
    _corrected("token_truncate", **VESPO),
    _corrected("sequence_mask", **VESPO),
    _corrected("sequence_truncate", **KL),
]


def _rloo(name: str, options: dict[str, Any], **fields: Any) -> Case:
    # A whole row is one action: its ratio leaves the trust region at smaller steps.
    return Case(f"rloo {name}".strip(), {"learning_rate": 0.1} | options, "rloo", apart=frozenset({"kl"}), **fields)


RLOO = [
    _rloo("", {}),
    _rloo("beta", {"beta": 0.5}),
    _rloo("normalize_advantages", {"normalize_advantages": True}),
    _rloo("reward_clip_range", {"reward_clip_range": (0.2, 0.6)}),
    _rloo("epsilon, epsilon_high", {"epsilon": 0.05, "epsilon_high": 50.0, "learning_rate": 0.03}),
    _rloo("reward_weights", {"reward_weights": [0.5, 2.0]}, rewards=(by_ids, by_length)),
    _rloo("None rewards", {}, rewards=(by_ids, sometimes)),
    _rloo("num_iterations 1", {"num_iterations": 1}),
    _rloo("gradient accumulation", CUT, rollouts=Rollouts(ragged=False)),
    _rloo("sync_ref_model", {"beta": 0.5, **SYNC}, unlike={"beta": 0.5}),
    _rloo("router_aux_loss_coef", {"router_aux_loss_coef": 0.5}, family="qwen3_moe"),
]

CASES = [*LOSSES, *RATIOS, *REGULARIZERS, *SELECTIONS, *REWARDS, *STEPS, *CORRECTIONS, *RLOO]
