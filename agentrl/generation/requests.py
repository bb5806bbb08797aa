"""A turn that is being sampled, and the drawing of its next token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from agentrl.generation.base import SamplingParams
from agentrl.generation.sampling import draw, process_logits, settings
from agentrl.generation.slots import Session
from agentrl.generation.threaded import Answer

_HEADROOM = 64
"""Positions that a row gets beyond its end, so that rows do not ask for room at every token."""


@dataclass(eq=False, slots=True)
class Request:
    """One turn to sample.

    Attributes:
        session: Whose turn.
        ids: The row before the turn.
        params: How to draw.
        done: Called once, with the sample or the error.
        budget: Positions that the whole cache has.
        arrival: Serial number; also of the session's last use.
        version: Version of the weights that drew its first token.
        fed: End of what was run for this turn, so that running it again counts as prefill.
        sampled: The ids drawn so far; they are at the end of the session's row too.
        logprobs: Their logprobs.
        uniforms: One number a token, from the seed.
        settings: What `process_logits` is told to draw it by; requests with the same are drawn together.
        seen: Which ids occur in the row, bool [V]; kept where there is a repetition penalty.
    """

    session: Session
    ids: list[int]
    params: SamplingParams
    done: Answer
    budget: int = 0
    arrival: int = 0
    version: int | None = None
    fed: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    uniforms: Random = field(init=False)
    settings: tuple[tuple[str, Any], ...] = field(init=False)
    seen: Tensor | None = None

    def __post_init__(self) -> None:
        self.uniforms = Random(self.params.seed)
        self.settings = tuple(settings(self.params).items())

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be drawn."""
        return len(self.session.row) - self.session.cached

    @property
    def wanted(self) -> int:
        """Positions to reserve: the row and some headroom, never more than the turn can fill."""
        return min(len(self.session.row) + _HEADROOM, self.most)

    @property
    def most(self) -> int:
        """Positions that the turn can fill."""
        return min(len(self.ids) + self.params.max_tokens, self.budget)


def draw_next(requests: Sequence[Request], logits_RV: Tensor) -> None:
    """Draw a token for each request and put it at the end of its row; who samples alike is drawn together."""
    alike = defaultdict(list)
    for index, request in enumerate(requests):
        alike[request.settings].append(index)
    for common, indices in alike.items():
        chosen = [requests[index] for index in indices]
        logits_NV = logits_RV if len(alike) == 1 else logits_RV[indices]
        logprobs_NV = process_logits(
            logits_NV,
            seen_NV=_seen(chosen, logits_NV) if chosen[0].params.repetition_penalty != 1.0 else None,
            **dict(common),
        )
        ids_N = draw(logprobs_NV, [request.uniforms.random() for request in chosen])
        logprobs_N = logprobs_NV.gather(-1, ids_N[:, None])[:, 0]
        for request, token, logprob in zip(chosen, ids_N.tolist(), logprobs_N.tolist(), strict=True):
            request.session.row.append(token)
            request.sampled.append(token)
            request.logprobs.append(logprob)
            if request.seen is not None:
                request.seen[token] = True


def _seen(requests: Sequence[Request], logits_NV: Tensor) -> Tensor:
    """Which ids occur in each request's row, bool [N, V]."""
    for request in requests:
        if request.seen is None:
            request.seen = torch.zeros(logits_NV.shape[-1], dtype=torch.bool, device=logits_NV.device)
            request.seen[request.session.row] = True
    return torch.stack([request.seen for request in requests if request.seen is not None])
