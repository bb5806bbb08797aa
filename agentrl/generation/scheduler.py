"""Continuous batching: decides at every step which rows run, and draws their next tokens.

A request waits until there is a slot; its prompt is prefilled in chunks, then it decodes with the others. The decoding
rows hold the slots from 0 on, so that a decode step reads the cache without copying it; a row that joins or leaves is
moved there or away. Prompts go before decoding, so that decode batches are large. A request whose prompt begins like
one that is being prefilled waits for it and copies the common part.

Nothing here knows threads or event loops; `local.py` calls `step` from one thread as long as there is work.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch

from agentrl.errors import GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.runner import ModelRunner
from agentrl.generation.sampling import draw, process_logits
from agentrl.generation.slots import Session, SlotPool
from agentrl.types import FinishReason, Sample

_SHARED = 8
"""Fewest common tokens worth copying from another slot, or worth waiting for."""
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
        arrival: Serial number; also of the session's last use.
        version: Version of the weights that drew its first token.
        fed: End of what was run for this turn, so that running it again counts as prefill.
        sampled: The ids drawn so far; they are at the end of the session's row too.
        logprobs: Their logprobs.
        uniforms: One number a token, from the seed.
        seen_V: Which ids occur in the row, kept where there is a repetition penalty.
    """

    session: Session
    ids: list[int]
    params: SamplingParams
    done: Callable[[Sample | GenerationError], None]
    arrival: int = 0
    version: int | None = None
    fed: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    uniforms: Random = field(init=False)
    seen_V: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.uniforms = Random(self.params.seed)

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
        return len(self.ids) + self.params.max_tokens


class Scheduler:
    """The rows of one model, from request to sample."""

    def __init__(self, runner: ModelRunner, pool: SlotPool, max_batch_tokens: int, stats: GenerationStats):
        self.version = 0
        self._runner = runner
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._stats = stats
        self._sessions: dict[str, Session] = {}
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []  # its i-th row is slot i
        self._turns = 0
        self._admit_again = False

    @property
    def busy(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._waiting or self._prefilling or self._decoding)

    # Commands ------------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        ids: list[int],
        params: SamplingParams,
        done: Callable[[Sample | GenerationError], None],
    ) -> Request:
        """Queue a turn of a session."""
        session = self._sessions.setdefault(name, Session(name))
        request = Request(session, ids, params, done)
        if session.active:
            raise GenerationError(
                f"session {name!r} is already sampling a turn; wait for it before asking again"
            )
        if request.most > self._pool.budget:
            raise GenerationError(
                f"session {name!r}: {len(ids)} tokens and up to {params.max_tokens} new ones cannot fit into the "
                f"cache of {self._pool.budget} tokens; raise max_cache_tokens or lower the completion length"
            )
        self._turns += 1
        session.used = request.arrival = self._turns
        session.active = True
        session.cached = common_prefix(session.row[: session.cached], ids[:-1])
        session.row = list(ids)
        self._waiting.append(request)
        self._admit_again = True
        return request

    def release(self, name: str) -> None:
        """Forget a session."""
        session = self._sessions.pop(name, None)
        if session is not None and not session.active:
            self._pool.drop(session)
            self._admit_again = True

    def renew(self, version: int) -> None:
        """Drop all keys and values because the weights have changed; unfinished rows are prefilled again."""
        self.version = version
        active = sorted([*self._prefilling, *self._decoding], key=lambda request: request.arrival)
        self._waiting.extendleft(reversed(active))
        self._prefilling.clear()
        self._decoding.clear()
        self._pool.clear()
        self._admit_again = True

    def fail(self, error: Exception) -> None:
        """Answer every request with an error and start from an empty cache."""
        requests = [*self._decoding, *self._prefilling, *self._waiting]
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._pool.clear()
        for request in requests:
            self._answer(request, _generation_error(request, error))

    def cancel(self, request: Request) -> None:
        """Drop a request without an answer; unknown and answered requests are ignored."""
        if request in self._waiting or request in self._prefilling or request in self._decoding:
            self._leave(request)
            self._retire(request)

    # One step ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run the model once and answer what is finished by it."""
        if self._admit_again:
            self._admit()
        if self._prefilling:
            self._run(*self._prefill_batch())
        elif self._decoding:
            self._reserve()
            if self._decoding:
                self._run(list(self._decoding), [1] * len(self._decoding))
        elif self._waiting:
            raise RuntimeError(f"{len(self._waiting)} requests wait but none can start")

    def _admit(self) -> None:
        """Give slots to waiting requests, first come first served; copy what others hold already."""
        self._admit_again = False
        for request in list(self._waiting):
            session, prompt = request.session, request.session.row[:-1]
            shared, donor = self._best_donor(prompt) if session.slot is None else (0, None)
            coming = max((common_prefix(other.session.row, prompt) for other in self._prefilling), default=0)
            if session.slot is None and coming >= shared + _SHARED:
                continue  # until that one is prefilled
            if not self._pool.hold(session, request.wanted, len(self._sessions)):
                break
            self._waiting.remove(request)
            self._stats.evictions += session.evicted
            session.evicted = False
            if donor is not None and donor.slot is not None:  # making room may have evicted it
                self._pool.share(donor, session, shared)
            if request.version is None:
                request.version = self.version
            if request.remaining == 1:
                self._join(request)
            else:
                self._prefilling.append(request)

    def _best_donor(self, prompt: list[int]) -> tuple[int, Session | None]:
        """Find the slot that holds the longest beginning of a prompt."""
        best, donor = 0, None
        for holder in self._pool.holders:
            shared = common_prefix(holder.row[: holder.cached], prompt)
            if shared > max(best, _SHARED - 1):
                best, donor = shared, holder
        return best, donor

    def _prefill_batch(self) -> tuple[list[Request], list[int]]:
        """Choose rows for one prefill pass, and how many tokens of each.

        The first come sets the width; others go with it where they need no or little padding.
        """
        first = self._prefilling[0]
        width = min(first.remaining, self._max_batch_tokens)
        fitting = [other for other in self._prefilling[1:] if other.remaining >= 0.75 * width]
        batch = [first, *fitting[: self._max_batch_tokens // width - 1]]
        return batch, [min(request.remaining, width) for request in batch]

    def _reserve(self) -> None:
        """See that the cache is long enough for the next token of each decoding row.

        When only active rows are left, the youngest goes back to waiting: the oldest always goes on.
        """
        while self._decoding:
            longest = max(self._decoding, key=lambda request: len(request.session.row))
            if len(longest.session.row) <= self._pool.cache.length:
                return
            for request in self._decoding:
                request.session.wanted = request.wanted
            if self._pool.hold(longest.session, longest.wanted):
                return
            youngest = max(self._decoding, key=lambda request: request.arrival)
            self._leave(youngest)
            self._pool.drop(youngest.session, evicted=True)
            self._waiting.appendleft(youngest)

    def _run(self, batch: list[Request], counts: list[int]) -> None:
        """Run `counts` further tokens of each row; draw a token where that reaches the end of the row."""
        sessions = [request.session for request in batch]
        try:
            logits_BV = self._runner.forward(
                [
                    session.row[session.cached : session.cached + count]
                    for session, count in zip(sessions, counts, strict=True)
                ],
                [session.slot for session in sessions if session.slot is not None],
                [session.cached for session in sessions],
            )
            for request, count in zip(batch, counts, strict=True):
                self._advance(request, count)
            ready = [index for index, request in enumerate(batch) if request.remaining == 0]
            self._stats.forward_passes += 1
            self._draw([batch[index] for index in ready], logits_BV[ready])
        except Exception as error:  # noqa: BLE001 - whatever a model raises has to reach those who wait
            for request in batch:
                self._leave(request)
                self._pool.drop(request.session)
                self._answer(request, _generation_error(request, error))
            return
        for request in reversed(batch):  # from the last slot on, so that a row is moved once at most
            if request in self._prefilling and request.remaining == 1:
                self._prefilling.remove(request)
                self._join(request)
                self._admit_again = True
            self._finish(request)

    def _advance(self, request: Request, count: int) -> None:
        session = request.session
        end = session.cached + count
        again = min(end, max(len(request.ids), request.fed)) - session.cached
        self._stats.prefilled_tokens += max(0, again)
        request.fed = max(request.fed, end)
        session.cached = end

    def _draw(self, requests: list[Request], logits_RV: torch.Tensor) -> None:
        """Draw a token for each request; those that sample alike are drawn together."""
        alike = defaultdict(list)
        for index, request in enumerate(requests):
            params = request.params
            settings = params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty
            alike[settings].append(index)
        for (temperature, top_k, top_p, min_p, repetition_penalty), indices in alike.items():
            chosen = [requests[index] for index in indices]
            seen_NV = None
            if repetition_penalty != 1.0:
                seen_NV = torch.stack([_seen(request, logits_RV) for request in chosen])
            logprobs_NV = process_logits(
                logits_RV if len(indices) == len(requests) else logits_RV[indices],
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                seen_NV=seen_NV,
            )
            ids_N = draw(logprobs_NV, [request.uniforms.random() for request in chosen])
            logprobs_N = logprobs_NV.gather(-1, ids_N[:, None])[:, 0]
            for request, token, logprob in zip(chosen, ids_N.tolist(), logprobs_N.tolist(), strict=True):
                request.session.row.append(token)
                request.sampled.append(token)
                request.logprobs.append(logprob)
                if request.seen_V is not None:
                    request.seen_V[token] = True
        self._stats.decoded_tokens += len(requests)

    # Joining and leaving -------------------------------------------------------------------------------------

    def _join(self, request: Request) -> None:
        self._pool.move(request.session, len(self._decoding))
        self._decoding.append(request)

    def _leave(self, request: Request) -> None:
        """Take a request out of its queue; the last decoding row takes its place."""
        if request in self._decoding:
            last = self._decoding[-1]
            index = self._decoding.index(request)
            self._pool.move(request.session, len(self._decoding) - 1)
            self._decoding[index] = last
            self._decoding.pop()
        elif request in self._prefilling:
            self._prefilling.remove(request)
        else:
            self._waiting.remove(request)

    def _finish(self, request: Request) -> None:
        """Answer a request whose last token ends its turn."""
        if not request.sampled:
            return
        if request.sampled[-1] in request.params.stop_ids:
            finish = FinishReason.STOP
        elif len(request.sampled) == request.params.max_tokens:
            finish = FinishReason.LENGTH
        else:
            return
        self._leave(request)
        version = self.version if request.version is None else request.version
        self._answer(request, Sample(request.sampled, request.logprobs, finish, version))

    def _answer(self, request: Request, answer: Sample | GenerationError) -> None:
        self._retire(request)
        request.done(answer)

    def _retire(self, request: Request) -> None:
        """Let the session rest until its next turn, or go if it was released meanwhile."""
        session = request.session
        session.active = False
        session.wanted = session.cached
        if self._sessions.get(session.name) is not session:
            self._pool.drop(session)
        self._admit_again = True


def common_prefix(one: list[int], other: list[int]) -> int:
    """Count the tokens that two rows begin with in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:  # slices compare in C, and a binary search needs few of them
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _seen(request: Request, logits_RV: torch.Tensor) -> torch.Tensor:
    if request.seen_V is None:
        seen_V = torch.zeros(logits_RV.shape[-1], dtype=torch.bool, device=logits_RV.device)
        seen_V[request.session.row] = True
        request.seen_V = seen_V
    return request.seen_V


def _generation_error(request: Request, error: Exception) -> GenerationError:
    if isinstance(error, GenerationError):
        return error
    wrapped = GenerationError(
        f"session {request.session.name!r}: sampling failed after {len(request.sampled)} tokens of a row of "
        f"{len(request.ids)}: {type(error).__name__}: {error}"
    )
    wrapped.__cause__ = error
    return wrapped
