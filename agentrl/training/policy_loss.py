"""GRPO's policy loss: from the scores of a micro-batch to one loss a token, with the metrics on the way.

Loss types differ in how the importance ratio is kept in bounds; each may be weighted by what the trainer and the
sampler make of the same tokens, and restricted to some of them.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from agentrl.objectives.importance import SEQUENCE_MODES, log_weights_of_rows, sampling_weights, weights_of_tokens
from agentrl.objectives.losses import cispo_loss, clipped_surrogate, sapo_loss, vespo_loss
from agentrl.objectives.segments import row_sums
from agentrl.objectives.selection import on_policy_tokens
from agentrl.training.arguments import GRPOConfig
from agentrl.training.batching import MicroBatch
from agentrl.training.metrics import MetricStore
from agentrl.training.objective_metrics import clip_metrics, mean_metric, weight_metrics
from agentrl.training.old_policy import logps_when_sampled
from agentrl.training.scoring import Scores

IMPLAUSIBLE_DIFFERENCE = 0.5
"""Mean difference, in nats a token, between sampler and trainer that no rounding explains."""

_IMPLAUSIBLE = (
    "the logprobs that came with the sampled tokens are far from those of the policy (see the metric "
    "sampling/sampling_logp_difference/mean), so the importance sampling correction weighs these tokens by next to "
    "nothing or leaves them out; report the logprobs of the distribution that the tokens were drawn from, or none, or "
    "set vllm_importance_sampling_correction=False."
)


def policy_loss(
    args: GRPOConfig,
    scores: Scores,
    log_ratio_N: Tensor,
    batch: MicroBatch,
    metrics: MetricStore,
    *,
    correct_sampler: bool,
) -> Tensor:
    """Return the policy loss of each token, 0 where the token is left out.

    Args:
        args: The loss type and what belongs to it.
        scores: Scores of the batch's targets under the policy.
        log_ratio_N: Their log-ratios, of the configured level.
        batch: The micro-batch.
        metrics: Where clip ratios and the like go.
        correct_sampler: Whether to weigh tokens by what trainer and sampler make of them.
    """
    advantages_N = batch.target_advantages
    weights = _sampling_weights(args, scores, batch, metrics) if correct_sampler else None
    kept_N = _kept(args, scores, advantages_N, batch, metrics)
    # What is left out keeps its ratio in the metrics but not in the graph, where 0 times an overflow would be NaN.
    log_ratio_N = torch.where(kept_N, log_ratio_N, log_ratio_N.detach())
    if args.loss_type == "vespo":
        loss_N = _vespo(args, scores.logps_N, log_ratio_N, weights, advantages_N, batch, metrics)
    else:
        loss_N = _of_ratio(args, scores.logps_N, log_ratio_N, advantages_N, batch, metrics)
        if weights is not None:
            loss_N = loss_N * weights_of_tokens(weights, batch.row_N, args.vllm_importance_sampling_mode)
    return torch.where(kept_N, loss_N, 0.0)


def _of_ratio(
    args: GRPOConfig,
    logps_N: Tensor,
    log_ratio_N: Tensor,
    advantages_N: Tensor,
    batch: MicroBatch,
    metrics: MetricStore,
) -> Tensor:
    """The loss types that bound the ratio of a token, or of a row by its mean."""
    level = args.importance_sampling_level
    if args.loss_type == "sapo":
        return sapo_loss(log_ratio_N, advantages_N, args.sapo_temperature_pos, args.sapo_temperature_neg)
    if args.loss_type == "cispo":
        cispo = cispo_loss(logps_N, log_ratio_N, advantages_N, args.upper_clip)
        mean_metric("cispo_clip_ratio", cispo.clipped_high, batch.row_N, batch.rows, metrics, level=level)
        return cispo.loss
    surrogate = clipped_surrogate(log_ratio_N, advantages_N, args.epsilon, args.upper_clip, args.delta)
    clip_metrics(surrogate, batch.row_N, batch.rows, metrics, level=level)
    return surrogate.loss


def _vespo(
    args: GRPOConfig,
    logps_N: Tensor,
    log_ratio_N: Tensor,
    weights: Tensor | None,
    advantages_N: Tensor,
    batch: MicroBatch,
    metrics: MetricStore,
) -> Tensor:
    """VESPO, whose importance weight of a row is against the sampler: the correction goes into it, not beside it."""
    log_weight_R = row_sums(log_ratio_N, batch.row_N, batch.rows)
    if weights is not None:
        log_weight_R = log_weight_R + log_weights_of_rows(
            weights, batch.row_N, batch.rows, args.vllm_importance_sampling_mode
        )
    vespo = vespo_loss(
        logps_N,
        log_weight_R,
        advantages_N,
        batch.row_N,
        k_pos=args.vespo_k_pos,
        lambda_pos=args.vespo_lambda_pos,
        k_neg=args.vespo_k_neg,
        lambda_neg=args.vespo_lambda_neg,
    )
    mean_metric("vespo/phi_seq_mean", vespo.weight, batch.row_N, batch.rows, metrics, level="sequence")
    return vespo.loss


def _sampling_weights(args: GRPOConfig, scores: Scores, batch: MicroBatch, metrics: MetricStore) -> Tensor:
    """The importance weights between sampler and trainer, of tokens or of rows."""
    mode = args.vllm_importance_sampling_mode
    difference_N = logps_when_sampled(scores, batch) - batch.sampler_logps_N
    if difference_N.abs().nanmean() > IMPLAUSIBLE_DIFFERENCE:  # False without tokens
        warnings.warn(_IMPLAUSIBLE, stacklevel=2)
    weights = sampling_weights(
        difference_N,
        batch.row_N,
        batch.rows,
        mode,
        args.vllm_importance_sampling_clip_min,
        args.vllm_importance_sampling_clip_max,
    )
    level = "sequence" if mode in SEQUENCE_MODES else "token"
    weight_N = weights_of_tokens(weights, batch.row_N, mode)
    weight_metrics(weight_N, batch.row_N, batch.rows, metrics, level=level)
    return weights


def _kept(
    args: GRPOConfig,
    scores: Scores,
    advantages_N: Tensor,
    batch: MicroBatch,
    metrics: MetricStore,
) -> Tensor:
    """Which tokens the policy loss is about, bool (N,)."""
    kept_N = torch.ones_like(batch.row_N, dtype=torch.bool)
    if args.off_policy_mask_threshold is not None:
        known_N = ~batch.sampler_logps_N.isnan()
        sampler_N = torch.where(known_N, batch.sampler_logps_N, logps_when_sampled(scores, batch))
        kept_N &= on_policy_tokens(
            scores.logps_N, sampler_N, advantages_N, batch.row_N, batch.rows, args.off_policy_mask_threshold
        )
        mean_metric("off_policy_mask_ratio", ~kept_N, batch.row_N, batch.rows, metrics, level="sequence")
    return kept_N if scores.selected_N is None else kept_N & scores.selected_N
