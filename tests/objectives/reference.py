"""GRPO's objective as its papers write it: loops over rows and tokens, plain numbers, nothing shared with the code.

What a formula puts under a stop-gradient is computed from `frozen`, the logprobs at the point of differentiation, so
that `gradient` differentiates by finite differences what autograd differentiates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Row:
    """One row: a number for each trained token, and its advantage. A NaN sampler logprob is an unknown one."""

    logps: Sequence[float]
    old: Sequence[float]
    sampler: Sequence[float]
    ref: Sequence[float]
    entropy: Sequence[float]
    advantage: float


@dataclass(frozen=True)
class Settings:
    """The objective; `mode` None is no correction of the sampler."""

    loss_type: str = "dapo"
    level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    tau: tuple[float, float] = (1.0, 1.05)
    vespo_pos: tuple[float, float] = (2.0, 3.0)
    vespo_neg: tuple[float, float] = (3.0, 2.0)
    mode: str | None = None
    c_min: float | None = None
    c_max: float | None = 3.0
    off_policy: float | None = None
    top_entropy: float = 1.0
    beta: float = 0.0
    bias_correction: bool = True
    length: int = 10


def loss(batches: Sequence[Sequence[Row]], settings: Settings, frozen: Sequence[Sequence[Row]] | None = None) -> float:
    """The loss of an optimizer step of these micro-batches."""
    lengths = [len(row.logps) for batch in batches for row in batch if row.logps]
    micro_batches = sum(any(row.logps for row in batch) for batch in batches)
    total = 0.0
    for batch, held in zip(batches, frozen or batches, strict=True):
        entropies = [h for row in batch for h in row.entropy]
        tau = np.quantile(entropies, 1 - settings.top_entropy) if entropies else 0.0
        tokens = sum(len(row.logps) for row in batch)
        for row, fixed in zip(batch, held, strict=True):
            losses = _row(row, fixed, tau, settings)
            if not losses:
                continue
            if settings.loss_type in ("grpo", "sapo"):
                total += sum(losses) / len(losses) / len(lengths)
            elif settings.loss_type in ("dapo", "cispo", "vespo"):
                total += sum(losses) / sum(lengths)
            elif settings.loss_type == "bnpo":
                total += sum(losses) / tokens / micro_batches
            elif settings.loss_type == "dr_grpo":
                total += sum(losses) / (settings.length * len(lengths))
            elif settings.loss_type == "luspo":
                total += sum(losses) / len(lengths)
    return total


def gradient(batches: Sequence[Sequence[Row]], settings: Settings, step: float = 1e-6) -> list[list[list[float]]]:
    """Derivative of the loss by the logprob of each token, by central differences."""
    result = []
    for b, batch in enumerate(batches):
        result.append([])
        for r, row in enumerate(batch):
            result[-1].append([])
            for t in range(len(row.logps)):
                ends = []
                for sign in (1, -1):
                    moved = [*row.logps[:t], row.logps[t] + sign * step, *row.logps[t + 1 :]]
                    changed = [*batch[:r], replace(row, logps=moved), *batch[r + 1 :]]
                    ends.append(loss([*batches[:b], changed, *batches[b + 1 :]], settings, batches))
                result[-1][-1].append((ends[0] - ends[1]) / (2 * step))
    return result


def _row(row: Row, fixed: Row, tau: float, s: Settings) -> list[float]:
    """The loss of each token of a row."""
    count = len(row.logps)
    differences = [row.logps[t] - row.old[t] for t in range(count)]
    held = [fixed.logps[t] - row.old[t] for t in range(count)]
    rhos = [_rho(row.old[t] - row.sampler[t]) for t in range(count)]
    if s.mode and s.mode.startswith("sequence"):
        whole = _bounded(math.prod(rhos), s)
        rhos = [whole] * count
    elif s.mode:
        rhos = [_bounded(rho, s) for rho in rhos]
        whole = math.prod(rhos)
    else:
        rhos, whole = [1.0] * count, 1.0
    kept = True
    if s.off_policy is not None:
        sampled = [row.old[t] if math.isnan(row.sampler[t]) else row.sampler[t] for t in range(count)]
        drift = sum(sampled[t] - fixed.logps[t] for t in range(count)) / max(count, 1)
        kept = not (row.advantage < 0 and drift > s.off_policy)
    losses = []
    for t in range(count):
        if s.level == "sequence":
            r, r_held = math.exp(sum(differences) / count), math.exp(sum(held) / count)
        else:
            r, r_held = math.exp(differences[t]), math.exp(held[t])
        a = row.advantage
        if s.loss_type == "cispo":
            value = -min(r_held, s.epsilon_high) * a * row.logps[t] * rhos[t]
        elif s.loss_type == "sapo":
            temperature = s.tau[0] if a > 0 else s.tau[1]
            value = -a * 4 / temperature / (1 + math.exp(-temperature * (r - 1))) * rhos[t]
        elif s.loss_type == "vespo":
            k, decay = s.vespo_pos if a >= 0 else s.vespo_neg
            w = math.exp(sum(held)) * whole
            value = -(w**k) * math.exp(decay * (1 - w)) * a * row.logps[t]
        else:
            bounded = r if s.delta is None else min(r, s.delta)
            clipped = min(max(r, 1 - s.epsilon), 1 + s.epsilon_high)
            value = -min(bounded * a, clipped * a) * rhos[t]
        if not kept or row.entropy[t] < tau - 1e-12:
            value = 0.0
        if s.beta:
            gap = row.ref[t] - row.logps[t]
            value += s.beta * (math.exp(gap) - gap - 1) * (r if s.bias_correction else 1)
        losses.append(value)
    return losses


def _rho(difference: float) -> float:
    return 1.0 if math.isnan(difference) else math.exp(difference)


def _bounded(rho: float, s: Settings) -> float:
    low, high = s.c_min or 0.0, math.inf if s.c_max is None else s.c_max
    if s.mode and s.mode.endswith("truncate"):
        return min(max(rho, low), high)
    return rho if low <= rho <= high else 0.0
