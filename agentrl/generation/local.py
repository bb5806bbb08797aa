"""The in-process generator: continuous batching on a transformers model, keys and values kept between turns.

One thread runs the model; it starts with the first request and ends with `close`. Requests come in by a queue
and samples go back to the event loop of whoever awaits them. The weights may change only while no request is
unanswered; call `sync` afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

from transformers import PreTrainedModel

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.runner import ModelRunner
from agentrl.generation.scheduler import Request, Scheduler
from agentrl.generation.slots import SlotPool
from agentrl.generation.support import context_length, supports
from agentrl.types import Sample

logger = logging.getLogger(__name__)


class LocalGenerator:
    """Samples turns from a decoder model in this process; see `Generator` for the contract.

    Args:
        model: A decoder model of transformers, PEFT-wrapped or not, in training or evaluation mode.
        max_cache_tokens: Most tokens whose keys and values are kept, over all sessions. When they do not
            suffice, sessions between turns are evicted and then requests wait. Default: 30% of the memory
            that is free at the first request.
        max_batch_tokens: Most tokens in one forward pass of prompts, padding included.
        autocast: Makes the autocast context of a forward pass, e.g. `accelerator.autocast`.

    Raises:
        ConfigurationError: The model's state cannot be kept by position (`supports` says why), or a size is
            not positive.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_cache_tokens: int | None = None,
        max_batch_tokens: int = 4096,
        autocast: Callable[[], AbstractContextManager[object]] | None = None,
    ):
        if reason := supports(model):
            raise ConfigurationError(
                f"LocalGenerator cannot serve {type(model).__name__}: {reason}; use PlainGenerator "
                "(make_generator chooses it by itself)"
            )
        for name, value in (("max_cache_tokens", max_cache_tokens), ("max_batch_tokens", max_batch_tokens)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}, expected at least 1")
        self.stats = GenerationStats()
        self._model = model
        self._max_cache_tokens = max_cache_tokens
        self._runner = ModelRunner(model, autocast)
        self._scheduler = Scheduler(
            self._runner, SlotPool(self._runner.cache, self._budget), max_batch_tokens, self.stats
        )
        self._inbox: queue.SimpleQueue[Callable[[Scheduler], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def max_context(self) -> int | None:
        """Most tokens a row may have, from the model's config."""
        return context_length(self._model)

    async def sample(self, session: str, ids: Sequence[int], params: SamplingParams) -> Sample:
        """Sample one turn; see `Generator.sample`. Cancelling the awaiting task drops the request."""
        self._check(session, ids, params)
        turn = _Turn(session, list(ids), params)
        with self._lock:
            if self._closed.is_set():
                raise GenerationError(f"session {session!r}: the generator is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="agentrl-generator", daemon=True)
                self._thread.start()
            self._inbox.put(turn.submit)
        try:
            return await turn.answer
        except asyncio.CancelledError:
            self._inbox.put(turn.drop)
            raise

    def release(self, session: str) -> None:
        """Forget a session; unknown sessions are ignored."""
        self._inbox.put(lambda scheduler: scheduler.release(session))

    def sync(self, weights_version: int) -> None:
        """Drop what was cached under older weights; later samples carry this version."""
        self._inbox.put(lambda scheduler: scheduler.renew(weights_version))

    def close(self) -> None:
        """End the thread and free the cache; requests without an answer get a `GenerationError`."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closed.set()
        if thread is not None:
            self._inbox.put(lambda scheduler: None)
            thread.join()

    def _check(self, session: str, ids: Sequence[int], params: SamplingParams) -> None:
        if not ids:
            raise GenerationError(f"session {session!r}: the row is empty; a prompt needs at least one token")
        limit = self.max_context
        if limit is not None and len(ids) + params.max_tokens > limit:
            raise GenerationError(
                f"session {session!r}: {len(ids)} tokens and up to {params.max_tokens} new ones exceed the "
                f"model's context of {limit}; shorten the prompt or lower the completion length"
            )

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._run_commands(wait=not self._scheduler.busy)
            if self._scheduler.busy:
                try:
                    self._scheduler.step()
                except Exception as error:
                    logger.exception("the generator's scheduler failed; all its requests fail")
                    self._scheduler.fail(error)
        self._run_commands(wait=False)
        self._scheduler.fail(GenerationError("the generator was closed before the turn was finished"))

    def _run_commands(self, *, wait: bool) -> None:
        with suppress(queue.Empty):
            while True:
                self._inbox.get(block=wait)(self._scheduler)
                wait = False

    def _budget(self) -> int:
        if self._max_cache_tokens is not None:
            return self._max_cache_tokens
        tokens, reason = self._runner.default_budget()
        logger.info("max_cache_tokens is not set; the generator keeps at most %s", reason)
        return tokens


class _Turn:
    """Carries one request from the event loop to the scheduler's thread and its answer back."""

    def __init__(self, session: str, ids: list[int], params: SamplingParams):
        self._session, self._ids, self._params = session, ids, params
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Sample] = self._loop.create_future()
        self._request: Request | None = None

    def submit(self, scheduler: Scheduler) -> None:
        try:
            self._request = scheduler.submit(self._session, self._ids, self._params, self._deliver)
        except GenerationError as error:
            self._deliver(error)
        except Exception as error:  # noqa: BLE001 - sizing the cache runs the model, which may raise anything
            failure = GenerationError(f"session {self._session!r}: the cache could not be set up: {error}")
            failure.__cause__ = error
            self._deliver(failure)

    def drop(self, scheduler: Scheduler) -> None:
        if self._request is not None:
            scheduler.cancel(self._request)

    def _deliver(self, answer: Sample | GenerationError) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._resolve, answer)

    def _resolve(self, answer: Sample | GenerationError) -> None:
        if self.answer.done():
            return
        if isinstance(answer, Sample):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)
