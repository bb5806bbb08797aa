"""Continuous batching: decides at every step which rows run.

A request waits until there is a slot; its prompt is prefilled in chunks, then it decodes with the others.
The decoding rows hold the slots from 0 on, so that a decode step reads the cache without copying it; a row
that joins or leaves is moved there or away. Prompts go before decoding, so that decode batches are large. A
request whose prompt begins like one that is being prefilled waits for it and copies the common part.

A `Core`: one thread calls `step` as long as there is work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from agentrl.errors import GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.requests import Request, draw_next
from agentrl.generation.runner import ModelRunner
from agentrl.generation.slots import Session, SlotPool, common_prefix
from agentrl.generation.threaded import Answer, explain
from agentrl.generation.vision import row_keys
from agentrl.types import FinishReason, ImageSpan, Sample

_SHARED = 8
"""Fewest common tokens worth copying from another slot, or worth waiting for."""


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
    def model(self) -> PreTrainedModel:
        """The model that the runner runs."""
        return self._runner.model

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._runner.replace_model(model)

    @property
    def busy(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._waiting or self._prefilling or self._decoding)

    # Commands ------------------------------------------------------------------------------------------

    def submit(
        self, name: str, ids: list[int], params: SamplingParams, done: Answer, images: tuple[ImageSpan, ...] = ()
    ) -> Request:
        """Queue a turn of a session."""
        vision = self._runner.vision
        if images and vision.placeholder_id is None:
            raise GenerationError("the row has images, but the model sees none; pass a vision-language model")
        session = self._sessions.setdefault(name, Session(name))
        request = Request(session, ids, params, done, images, vision.positions(ids, images))
        if session.active:
            raise GenerationError("it is still sampling a turn; await that one before the next")
        request.budget = self._pool.budget
        if len(ids) >= request.budget:
            raise _too_long(len(ids), request.budget)
        self._turns += 1
        session.used = request.arrival = self._turns
        session.active = True
        keys = list(ids) if vision.placeholder_id is None else row_keys(ids, images, vision.placeholder_id)
        session.cached = common_prefix(session.row[: session.cached], keys[:-1])
        session.row = keys
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
        self._runner.vision.forget()
        self._admit_again = True

    def fail(self, error: Exception) -> None:
        """Answer every request with an error and start from an empty cache."""
        requests = [*self._decoding, *self._prefilling, *self._waiting]
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._pool.clear()
        for request in requests:
            self._answer(request, explain(request.session.name, error))

    def cancel(self, request: Request) -> None:
        """Drop a request without an answer; unknown and answered requests are ignored."""
        if request in self._waiting or request in self._prefilling or request in self._decoding:
            self._leave([request])
            self._retire(request)

    # One step ------------------------------------------------------------------------------------------

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
            shared, donor = 0, None
            if session.slot is None:
                shared, donor = self._best_donor(prompt)
                coming = [common_prefix(other.session.row, prompt) for other in self._prefilling]
                if max(coming, default=0) >= shared + _SHARED:
                    continue  # until that one is prefilled
            if not self._pool.hold(session, request.wanted, len(self._sessions)):
                break
            self._waiting.remove(request)
            self._stats.evictions += session.evicted
            session.evicted = False
            if donor is not None and donor.slot is not None:  # making room may have evicted it
                self._pool.share(donor, session, shared)
            if request.remaining == 1:
                self._join([request])
            else:
                self._prefilling.append(request)

    def _best_donor(self, prompt: list[int]) -> tuple[int, Session | None]:
        """Find the slot that holds the longest beginning of a prompt."""
        best, donor = 0, None
        for holder in self._pool.holders:
            if best == len(prompt):
                break
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
        return batch, [request.whole(min(request.remaining, width)) for request in batch]

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
            self._leave([youngest])
            self._pool.drop(youngest.session, evicted=True)
            self._waiting.appendleft(youngest)

    def _run(self, batch: list[Request], counts: list[int]) -> None:
        """Run `counts` further tokens of each row; draw a token where that reaches the end of the row."""
        try:
            logits_BV = self._runner.forward(
                [request.chunk(count) for request, count in zip(batch, counts, strict=True)]
            )
            for request, count in zip(batch, counts, strict=True):
                self._advance(request, count)
            ready = [index for index, request in enumerate(batch) if request.remaining == 0]
            self._stats.forward_passes += 1
            for index in ready:
                self._note_version(batch[index])
            draw_next([batch[index] for index in ready], logits_BV[ready])
            self._stats.decoded_tokens += len(ready)
        except Exception as error:  # noqa: BLE001 - whatever a model raises has to reach those who wait
            self._leave(batch)
            for request in batch:
                self._pool.drop(request.session)
                self._answer(request, explain(request.session.name, error))
            return
        if ended := [request for request in batch if request in self._prefilling and request.remaining == 1]:
            for request in ended:
                self._prefilling.remove(request)
            self._join(ended)
            self._admit_again = True
        self._finish(batch)

    def _note_version(self, request: Request) -> None:
        if not request.versions or request.versions[-1][1] != self.version:
            request.versions.append((len(request.sampled), self.version))

    def _advance(self, request: Request, count: int) -> None:
        session = request.session
        end = session.cached + count
        again = min(end, max(len(request.ids), request.fed)) - session.cached
        self._stats.prefilled_tokens += max(0, again)
        request.fed = max(request.fed, end)
        session.cached = end

    # Joining and leaving -------------------------------------------------------------------------------

    def _join(self, requests: Sequence[Request]) -> None:
        """Put requests into the slots behind the decoding ones; those that have one of these slots keep it."""
        first = len(self._decoding)
        slots = range(first, first + len(requests))
        there = {request.session.slot: request for request in requests if request.session.slot in slots}
        others = iter([request for request in requests if request.session.slot not in slots])
        joining = [there.get(slot) or next(others) for slot in slots]
        self._pool.move((request.session, slot) for request, slot in zip(joining, slots, strict=True))
        self._decoding += joining

    def _leave(self, requests: Collection[Request]) -> None:
        """Take requests out of their queues; the last decoding rows take the places of those before them."""
        leaving = set(requests)
        staying = sum(request not in leaving for request in self._decoding)
        places = [slot for slot, request in enumerate(self._decoding[:staying]) if request in leaving]
        last = [request for request in self._decoding[staying:] if request not in leaving]
        for slot, request in zip(places, last, strict=True):
            self._decoding[slot] = request
        self._pool.move((request.session, slot) for slot, request in zip(places, last, strict=True))
        del self._decoding[staying:]
        self._prefilling = [request for request in self._prefilling if request not in leaving]
        self._waiting = deque(request for request in self._waiting if request not in leaving)

    def _finish(self, batch: Sequence[Request]) -> None:
        """Answer the requests whose last token ends their turn."""
        endings = [(request, ending) for request in batch if (ending := _ending(request)) is not None]
        if not endings:
            return
        self._leave([request for request, _ in endings])
        for request, ending in endings:
            if isinstance(ending, GenerationError):
                self._pool.drop(request.session)
                self._answer(request, explain(request.session.name, ending))
                continue
            (_, version), *updates = request.versions
            self._answer(
                request, Sample(request.sampled, request.logprobs, ending, version, tuple(updates), request.prefill)
            )

    def _answer(self, request: Request, answer: Sample | GenerationError) -> None:
        self._retire(request)
        request.done(answer)

    def _retire(self, request: Request) -> None:
        """Let the session rest until its next turn, or go if it was released meanwhile."""
        session = request.session
        session.active = session.pinned = False
        session.wanted = session.cached
        if self._sessions.get(session.name) is not session:
            self._pool.drop(session)
        self._admit_again = True


def _ending(request: Request) -> FinishReason | GenerationError | None:
    """What ends a turn after its last token, if anything does."""
    if not request.sampled:
        return None
    if request.sampled[-1] in request.params.stop_ids:
        return FinishReason.STOP
    if len(request.sampled) == request.params.max_tokens:
        return FinishReason.LENGTH
    if len(request.session.row) > request.budget:
        # Only now: most turns end long before what they are allowed.
        return _too_long(len(request.session.row), request.budget)
    return None


def _too_long(length: int, budget: int) -> GenerationError:
    return GenerationError(
        f"a row of {length} tokens does not fit into the cache of {budget} tokens together with a further one; "
        "raise max_cache_tokens or shorten the episodes (max_completion_length)"
    )
