"""Reductions of flat vectors: over the rows that tokens belong to, and over a selection.

A micro-batch is R rows and N trained tokens in one vector; `row_N` names the row of each token. Values
outside the vector do not exist here, so a NaN in a padded or a tool position cannot reach a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_counts(row_N: Tensor, rows: int) -> Tensor:
    """Count the tokens of each row.

    Args:
        row_N: Row of each token, int64 (N,).
        rows: R, the number of rows, those without a token included.

    Returns:
        int64 (R,).
    """
    # `torch.bincount` is not deterministic on GPUs and waits for them; integer sums are and do not.
    return torch.zeros(rows, dtype=torch.int64, device=row_N.device).index_add_(0, row_N, torch.ones_like(row_N))


def row_sums(values_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Sum the values of each row; a row without a token has sum 0.

    Args:
        values_N: One value a token, (N,).
        row_N: Row of each token, int64 (N,).
        rows: R.

    Returns:
        (R,), differentiable in `values_N`.
    """
    return values_N.new_zeros(rows).index_add(0, row_N, values_N)


def row_means(values_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Mean of the values of each row; a row without a token has mean 0.

    Args:
        values_N: One value a token, (N,).
        row_N: Row of each token, int64 (N,).
        rows: R.

    Returns:
        (R,), differentiable in `values_N`.
    """
    return row_sums(values_N, row_N, rows) / row_counts(row_N, rows).clamp(min=1)


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the selected values, 0 when nothing is selected.

    Selects before it reduces: multiplying by a mask would turn a NaN or an infinity outside of it into a NaN
    sum.

    Args:
        values: Any shape.
        mask: The same shape; what is non-zero is selected.

    Returns:
        A scalar, differentiable in `values`.
    """
    selected = values[mask.bool()]
    return selected.sum() / max(selected.numel(), 1)
