"""The old policy: which logprobs the importance ratio of a target is against.

A fresh target was drawn by the weights that the trainer begins the window with, so the trainer's own scores are those
of its old policy: the current ones for as long as nothing was learned from the window, else those from its beginning.
A stale target was drawn by older weights, which are gone; its old logprob is the one that the sampler recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.training.batching import MicroBatch
from agentrl.training.scoring import Scores


def old_logps(scores: Scores, batch: MicroBatch, *, on_policy: bool) -> Tensor | None:
    """Logprobs that the importance ratio is against, (N,), no gradient; None where it is 1 for all targets.

    Args:
        scores: Scores of the batch's targets under the policy.
        batch: The micro-batch.
        on_policy: Whether nothing was learned between the beginning of the window and this pass.
    """
    if on_policy:
        return None if batch.stale_N is None else _with_recorded(scores.logps_N.detach(), batch)
    assert batch.old_logps_N is not None
    return _with_recorded(batch.old_logps_N, batch)


def logps_when_sampled(scores: Scores, batch: MicroBatch) -> Tensor:
    """What the trainer computes for the weights that sampled, (N,), no gradient; of stale targets what was recorded."""
    return _with_recorded(scores.logps_N.detach() if batch.old_logps_N is None else batch.old_logps_N, batch)


def _with_recorded(logps_N: Tensor, batch: MicroBatch) -> Tensor:
    return logps_N if batch.stale_N is None else torch.where(batch.stale_N, batch.sampler_logps_N, logps_N)
