"""One thread that runs a model, behind the `Generator` protocol.

Requests come in by a queue and samples go back to the event loop of whoever awaits them. The thread starts
with the first request, sleeps while there is nothing to do, and ends with `close`. What it runs is a
`Core`, which knows neither threads nor event loops.

A model that is shared with the trainer may change only while no request is unanswered; `sync` comes after that. The
model of a `Mirror` is changed by `sync` alone, in this thread, between two steps of the core."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from agentrl.errors import GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams, require_room
from agentrl.generation.mirror import Follower, Mirror
from agentrl.types import ImageSpan, Sample

logger = logging.getLogger(__name__)

Answer = Callable[[Sample | GenerationError], None]
"""What a core calls once for each request that was not cancelled."""


class Core(Protocol):
    """Turns requests into samples, one step at a time; all calls come from one thread."""

    @property
    def busy(self) -> bool:
        """Whether any request is unanswered."""

    def submit(
        self, name: str, ids: list[int], params: SamplingParams, done: Answer, images: tuple[ImageSpan, ...] = ()
    ) -> Any:
        """Take a turn of a session; returns what `cancel` takes, or raises."""

    def cancel(self, request: Any) -> None:
        """Drop a request without an answer; answered ones are ignored."""

    def release(self, name: str) -> None:
        """Forget a session."""

    def renew(self, version: int) -> None:
        """Forget what was computed with older weights; unanswered requests go on with the new ones."""

    def step(self) -> None:
        """Work for a while."""

    def fail(self, error: Exception) -> None:
        """Answer every request with an error and free what is held."""


class ThreadedGenerator:
    """Implements `Generator` by running a core in a thread.

    Args:
        core: What samples.
        stats: The counters that the core keeps.
        max_context: Most tokens a row may have, None if unknown.
    """

    def __init__(self, core: Core, stats: GenerationStats, max_context: int | None):
        self.stats = stats
        self._core = core
        self._mirror: Follower | None = None
        self._max_context = max_context
        self._inbox: queue.SimpleQueue[Callable[[Core], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._serving = False

    @property
    def max_context(self) -> int | None:
        """Most tokens a row may have, from the model's config."""
        return self._max_context

    @property
    def owns_weights(self) -> bool:
        """Whether the model is the copy of a `Mirror`."""
        return self._mirror is not None

    def follow(self, mirror: Follower) -> None:
        """Say that the model is the copy of a mirror, which `sync` updates from now on."""
        self._mirror = mirror

    def own_weights(self) -> None:
        """From now on sample from a copy of the model, which `sync` renews; to be called before the first `sample`.

        Raises:
            ConfigurationError: What runs the model cannot change its weights on the way.
        """
        if not self.owns_weights:
            core: Any = self._core  # those that run no model of the trainer's own their weights already
            mirror = Mirror(core.model)
            core.model = mirror.model
            self.follow(mirror)

    async def sample(
        self, session: str, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Sample:
        """Sample one turn; see `Generator.sample`. Cancelling the awaiting task drops the request."""
        require_room(session, ids, params, self.max_context)
        turn = _Turn(session, list(ids), params, tuple(images))
        with self._lock:
            self._start()
            self._inbox.put(turn.submit)
        try:
            return await turn.answer
        except asyncio.CancelledError:
            self._inbox.put(turn.drop)
            raise

    def release(self, session: str) -> None:
        """Forget a session; unknown sessions are ignored."""
        self._inbox.put(lambda core: core.release(session))

    def sync(self, weights_version: int) -> None:
        """Drop what was cached under older weights; what is sampled from here on carries this version.

        With a mirror it returns once the weights are taken over, at the end of the step that is being run.
        """
        mirror = self._mirror
        if mirror is None:
            self._inbox.put(lambda core: core.renew(weights_version))
            return

        def renew(core: Core) -> None:
            mirror.update()
            core.renew(weights_version)

        self._perform(renew)

    def close(self) -> None:
        """End the thread and free the cache; requests without an answer get a `GenerationError`.

        A later `sample` starts again.
        """
        with self._lock:  # held until the thread has ended, so that the next one finds a core at rest
            if self._thread is not None:
                self._serving = False
                self._inbox.put(lambda core: None)  # wakes it
                self._thread.join()
                self._thread = None

    def _start(self) -> None:
        """Start the thread if it does not run; the lock is held."""
        if self._thread is None:
            self._serving = True
            self._thread = threading.Thread(target=self._serve, name="agentrl-generator", daemon=True)
            self._thread.start()

    def _perform(self, action: Callable[[Core], None], *, start: bool = False) -> None:
        """Run something between two steps, in the core's thread where there is one, and wait for its end.

        Args:
            action: What to run; what it raises is raised here.
            start: Start the thread if it does not run.
        """
        done: Future[None] = Future()

        def run(core: Core) -> None:
            try:
                action(core)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            if start:
                self._start()
            if self._thread is None:
                run(self._core)
            else:
                self._inbox.put(run)
        done.result()

    def _serve(self) -> None:
        while self._serving:
            try:
                self._run_commands(wait=not self._core.busy)
                if self._core.busy:
                    self._core.step()
            except Exception as error:
                # The thread must live, and nobody may wait for ever.
                logger.exception("the generator failed; so do all its requests")
                self._core.fail(error)
        self._run_commands(wait=False)
        self._core.fail(GenerationError("the generator was closed before the turn was finished"))

    def _run_commands(self, *, wait: bool) -> None:
        with suppress(queue.Empty):
            while True:
                self._inbox.get(block=wait)(self._core)
                wait = False


class _Turn:
    """Carries one request from the event loop to the thread, and its answer back."""

    def __init__(self, session: str, ids: list[int], params: SamplingParams, images: tuple[ImageSpan, ...]):
        self._session, self._ids, self._params, self._images = session, ids, params, images
        self._loop = asyncio.get_running_loop()
        self._request: Any = None
        self.answer: asyncio.Future[Sample] = self._loop.create_future()

    def submit(self, core: Core) -> None:
        try:
            self._request = core.submit(self._session, self._ids, self._params, self._deliver, self._images)
        except Exception as error:  # noqa: BLE001 - sizing a cache runs the model, which may raise anything
            self._deliver(explain(self._session, error))

    def drop(self, core: Core) -> None:
        if self._request is not None:
            core.cancel(self._request)

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


def explain(session: str, error: Exception) -> GenerationError:
    """Say which session an error concerns and keep the error as the cause."""
    message = str(error) if isinstance(error, GenerationError) else f"{type(error).__name__}: {error}"
    explained = GenerationError(f"session {session!r}: {message}")
    explained.__cause__ = error
    return explained
