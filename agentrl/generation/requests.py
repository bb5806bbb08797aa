"""A turn that is being sampled, and the drawing of its next token."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from agentrl.generation.base import SamplingParams
from agentrl.generation.runner import Chunk
from agentrl.generation.sampling import draw, process_logits, settings
from agentrl.generation.slots import Session
from agentrl.generation.threaded import Answer
from agentrl.types import ImageSpan

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
        images: The images of the row.
        positions: Where the row's tokens are, (axes, T); None where that is their index.
        budget: Positions that the whole cache has.
        arrival: Serial number; also of the session's last use.
        versions: Versions of the weights that drew its tokens: where each one begins, and the version.
        fed: End of what was run for this turn, so that running it again counts as prefill.
        sampled: The ids drawn so far; they are at the end of the session's row too.
        logprobs: Their logprobs.
        asked: When it was asked for.
        prefill: Seconds from then to its first id, None as long as it has none.
        uniforms: One number a token, from the seed.
        settings: What `process_logits` is told to draw it by; requests with the same are drawn together.
        seen: Which ids occur in the row, bool [V]; kept where there is a repetition penalty.
    """

    session: Session
    ids: list[int]
    params: SamplingParams
    done: Answer
    images: tuple[ImageSpan, ...] = ()
    positions: Tensor | None = None
    budget: int = 0
    arrival: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    fed: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    asked: float = field(default_factory=time.monotonic)
    prefill: float | None = None
    uniforms: Random = field(init=False)
    settings: tuple[tuple[str, Any], ...] = field(init=False)
    seen: Tensor | None = None

    _after: int = field(init=False, default=0)  # the position of the first sampled token

    def __post_init__(self) -> None:
        self.uniforms = Random(self.params.seed)
        self.settings = tuple(settings(self.params).items())
        if self.positions is not None:
            self._after = int(self.positions.max()) + 1

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be drawn."""
        return len(self.session.row) - self.session.cached

    def whole(self, count: int) -> int:
        """Tokens to run next, `count` of them or so: an image is run at once."""
        start = self.session.cached
        for span in self.images:
            if span.start < start + count < span.stop:
                return (span.start if span.start > start else span.stop) - start
        return count

    def chunk(self, count: int) -> Chunk:
        """The next `count` tokens."""
        session = self.session
        assert session.slot is not None
        start, stop = session.cached, session.cached + count
        return Chunk(
            session.row[start:stop],
            session.slot,
            start,
            [span.image for span in self.images if start <= span.start < stop],
            None if self.positions is None else self._positions(start, stop),
        )

    def _positions(self, start: int, stop: int) -> Tensor:
        """Positions of tokens of the row; what is sampled goes on behind the furthest one."""
        assert self.positions is not None
        axes, length = self.positions.shape
        further = torch.arange(max(start, length), max(stop, length)) - length + self._after
        return torch.cat([self.positions[:, start:stop], further.expand(axes, -1)], dim=1)

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
            if request.prefill is None:
                request.prefill = time.monotonic() - request.asked
            if request.seen is not None:
                request.seen[token] = True


def _seen(requests: Sequence[Request], logits_NV: Tensor) -> Tensor:
    """Which ids occur in each request's row, bool [N, V]."""
    for request in requests:
        if request.seen is None:
            request.seen = torch.zeros(logits_NV.shape[-1], dtype=torch.bool, device=logits_NV.device)
            request.seen[[*request.ids, *request.sampled]] = True
    return torch.stack([request.seen for request in requests if request.seen is not None])
