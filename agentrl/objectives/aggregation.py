"""How the losses of tokens or rows become the one scalar of an optimizer step.

A loss type divides the sum of its losses by something that is counted over a whole optimizer step, over all its
micro-batches on all processes. Any split of the rows of a step therefore gives the same gradient ("bnpo" excepted,
whose definition is local). Rows without a trained token count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from agentrl.objectives.segments import row_means


@dataclass(frozen=True, slots=True)
class Denominators:
    """What an optimizer step holds, counted over all its micro-batches on all processes.

    The losses of a step's micro-batches add up, and distributed training averages over processes; the factor
    `world_size` undoes that average, so that the result is the sum over the step divided by these counts.

    Attributes:
        rows: Rows with at least one trained token.
        tokens: Trained tokens.
        micro_batches: Micro-batches with at least one trained token.
        world_size: Processes whose gradients are averaged.
    """

    rows: int
    tokens: int
    micro_batches: int = 1
    world_size: int = 1


def row_loss(loss_P: Tensor, denominators: Denominators) -> Tensor:
    """Mean over the rows of the step, for losses that have one entry a row.

    Args:
        loss_P: Loss of each row with a trained token, (P,).
        denominators: Counts of the step.

    Returns:
        This micro-batch's part of the step's loss, a scalar.
    """
    return _share(loss_P.sum(), denominators.rows, denominators)


def token_loss(
    loss_N: Tensor,
    row_N: Tensor,
    rows: int,
    loss_type: str,
    denominators: Denominators,
    *,
    max_completion_length: int,
) -> Tensor:
    """Aggregate the losses of tokens as the loss type says.

    Args:
        loss_N: Loss of each trained token, (N,).
        row_N: Row of each token, int64 (N,).
        rows: R, the rows of this micro-batch.
        loss_type: A key of `AGGREGATIONS`.
        denominators: Counts of the step.
        max_completion_length: The constant that "dr_grpo" divides by.

    Returns:
        This micro-batch's part of the step's loss, a scalar. Without trained tokens it is 0 and still has a
        graph, so that the backward pass runs on every process.

    Raises:
        ValueError: `loss_type` is unknown.
    """
    if loss_type not in AGGREGATIONS:
        raise ValueError(f"unknown loss_type {loss_type!r}; it is one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[loss_type](loss_N, row_N, rows, denominators, max_completion_length)


def _mean_of_row_means(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, _: int) -> Tensor:
    """1/R sum_i 1/|o_i| sum_t l (GRPO, https://arxiv.org/abs/2402.03300, equation 3)."""
    return _share(row_means(loss_N, row_N, rows).sum(), counts.rows, counts)


def _mean_over_tokens(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, _: int) -> Tensor:
    """1/(sum_i |o_i|) sum_i sum_t l (DAPO, https://arxiv.org/abs/2503.14476)."""
    return _share(loss_N.sum(), counts.tokens, counts)


def _mean_over_own_tokens(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, _: int) -> Tensor:
    """Mean over the tokens of the micro-batch, then over the micro-batches: depends on how rows are split."""
    return _share(loss_N.sum() / max(loss_N.numel(), 1), counts.micro_batches, counts)


def _mean_of_row_sums(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, _: int) -> Tensor:
    """1/R sum_i sum_t l: GSPO's mean over rows, each row times its length (LUSPO, https://arxiv.org/abs/2602.05261)."""
    return _share(loss_N.sum(), counts.rows, counts)


def _sum_over_constant(loss_N: Tensor, row_N: Tensor, rows: int, counts: Denominators, length: int) -> Tensor:
    """1/(R L) sum_i sum_t l with a constant L (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    return _share(loss_N.sum(), counts.rows * length, counts)


def _share(total: Tensor, denominator: int, counts: Denominators) -> Tensor:
    """Divide by a count of the step; a step without trained tokens has loss 0."""
    return total * (counts.world_size / max(denominator, 1))


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, int, Denominators, int], Tensor]] = {
    "grpo": _mean_of_row_means,
    "dapo": _mean_over_tokens,
    "bnpo": _mean_over_own_tokens,
    "dr_grpo": _sum_over_constant,
    "cispo": _mean_over_tokens,
    "sapo": _mean_of_row_means,
    "luspo": _mean_of_row_sums,
    "vespo": _mean_over_tokens,
}
"""The aggregation of each loss type."""
