"""Daemon threads for sync user code, which can be left behind when it hangs.

Threads are started on demand and reused, so nothing runs before the first sync call. They are daemons, unlike those
of `concurrent.futures.ThreadPoolExecutor`: a tool that hangs cannot be stopped, but it must not keep the process from
ending. A call whose waiter is cancelled is abandoned: its thread serves no further call and no longer counts.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agentrl.rollout.hung import Abandoned, end, own_children, place

logger = logging.getLogger(__name__)

MAX_THREADS = 512
"""Most sync calls that run at once; further ones wait for a thread."""

Outcome = tuple[Any, BaseException | None]
"""What a call returned, or what it raised."""

CLOSE_SECONDS = 5.0
"""How long `Threads.close` waits for calls that are still running."""


class Threads:
    """Daemon threads for sync calls, usable from any number of event loops at once."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._crew = _Crew()
        self._mailbox: _Mailbox | None = None
        self.abandoned = 0
        """Calls that were left behind while they ran."""

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a sync function in a thread that sees the caller's context variables.

        A cancelled call that has not begun never begins; one that has begun is abandoned.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._mailbox is None or self._mailbox.loop is not loop:
                self._mailbox = _Mailbox(loop)
            pending = _Call(functools.partial(function, *args, **kwargs), self._mailbox, loop.create_future())
            crew = self._crew
            crew.waiting.append(pending)
            self._man(crew)
        try:
            value, error = await pending.answer
        except asyncio.CancelledError:
            self._abandon(pending, crew)
            raise
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the threads; those still inside a call after `CLOSE_SECONDS` are left behind.

        A later call starts new threads.
        """
        with self._lock:
            crew, self._crew = self._crew, _Crew()
            self._mailbox = None
        crew.waiting += [None] * len(crew.threads)
        crew.match()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in crew.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if busy := sum(thread.is_alive() for thread in crew.threads):
            logger.warning("%d call(s) of tools or environments still run in threads at closing", busy)

    def _man(self, crew: _Crew) -> None:
        """See to it that a call that waits gets a thread, as far as the limit allows."""
        crew.match()
        if crew.waiting and len(crew.threads) < self._max_threads:
            thread = threading.Thread(target=self._work, args=(crew,), name="agentrl-call", daemon=True)
            crew.threads.append(thread)
            thread.start()

    def _work(self, crew: _Crew) -> None:
        seat = _Seat()
        crew.rest(seat)
        with suppress(Abandoned):
            while (pending := seat.take()) is not None:
                outcome = pending.execute() if pending.begin(own_children()) else None
                if outcome is not None and pending.end():
                    return  # it was left behind, and another thread has its place
                crew.rest(seat)  # before anybody hears of the outcome: what comes of it finds this thread free
                if outcome is not None:
                    pending.mailbox.put(pending, outcome)
                del pending, outcome  # an idle thread must not keep the last call's arguments alive

    def _abandon(self, pending: _Call, crew: _Crew) -> None:
        """Leave a call behind; if it runs already, so is its thread, whose place another one may take."""
        with self._lock, pending.lock:
            pending.left = True
            if (thread := pending.thread) is None:  # not begun, or ended just now
                return
            crew.threads.remove(thread)
            self.abandoned += 1
            self._man(crew)  # a call may wait for the place
            where = place(thread)
            end(thread, pending.spared)
        logger.warning("gave up waiting for %s, which was at %s", pending.name, where)


class _Seat:
    """Where one thread waits for its next call.

    Each thread waits by itself. Where all wait at one queue, they are woken one after the other, each by the one
    before, which has to get hold of the interpreter first: of a hundred calls at once most would begin only when the
    event loop has nothing left to do.
    """

    __slots__ = ("_call", "_given")

    def __init__(self) -> None:
        self._call: _Call | None = None
        self._given = threading.Lock()
        self._given.acquire()

    def give(self, call: _Call | None) -> None:
        """Hand over a call, or None to end the thread; only to one that rests, and only once."""
        self._call = call
        self._given.release()

    def take(self) -> _Call | None:
        """Wait for what is given."""
        self._given.acquire()
        call, self._call = self._call, None
        return call


class _Crew:
    """The threads between two closings: a thread left behind never takes a later crew's calls.

    Threads that come and go share no lock: a hundred that end at once would queue for it. Whoever adds to one of the
    two deques looks into the other one afterwards, so that no call waits beside a thread that rests.

    Attributes:
        threads: All threads; changed under the lock of `Threads`.
        waiting: Calls that have no thread yet; None ends the thread that gets it.
        resting: Threads without a call.
    """

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.waiting: deque[_Call | None] = deque()
        self.resting: deque[_Seat] = deque()

    def rest(self, seat: _Seat) -> None:
        """Called by a thread that has no call."""
        self.resting.append(seat)
        self.match()

    def match(self) -> None:
        """Give calls that wait to threads that rest, the last one first: its stack is the warmest."""
        while self.waiting:
            try:
                seat = self.resting.pop()
            except IndexError:
                return
            try:
                call = self.waiting.popleft()
            except IndexError:  # another thread was quicker
                self.resting.append(seat)
            else:
                seat.give(call)


class _Mailbox:
    """Answers on their way to one loop, which is woken when it may be asleep, not for each of them.

    Waking goes through a socket, and writing and reading that give the interpreter away to whoever waits for it. So
    the loop looks here once in each of its rounds for as long as it finds something.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answers: deque[tuple[_Call, Outcome]] = deque()
        self._awake = False

    def put(self, call: _Call, outcome: Outcome) -> None:
        """Send the outcome of a call, from any thread."""
        self._answers.append((call, outcome))
        if self._awake:
            return
        self._awake = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            logger.debug("the loop that waited for %r is closed", call.function)

    def _deliver(self) -> None:
        if not self._answers:
            self._awake = False  # from now on whatever comes wakes the loop again
        if self._answers:  # looked at again: what came just before that line has woken nobody
            self._awake = True
            while self._answers:
                call, outcome = self._answers.popleft()
                if not call.answer.done():
                    call.answer.set_result(outcome)
            self.loop.call_soon(self._deliver)


class _Call:
    """One call on its way to a thread and back to the loop that waits for it."""

    __slots__ = ("answer", "context", "function", "left", "lock", "mailbox", "spared", "thread")

    def __init__(self, function: functools.partial[Any], mailbox: _Mailbox, answer: asyncio.Future[Any]) -> None:
        self.function = function
        self.mailbox = mailbox
        self.answer = answer
        self.context = contextvars.copy_context()
        self.lock = threading.Lock()  # of the three below
        self.left = False  # nobody waits any more
        self.thread: threading.Thread | None = None  # that which runs it
        self.spared: frozenset[int] = frozenset()  # processes that its thread started for earlier calls

    @property
    def name(self) -> str:
        """What is called, for messages."""
        return str(getattr(self.function.func, "__qualname__", self.function.func))

    def begin(self, spared: frozenset[int]) -> bool:
        """Belong to the current thread from now on; False if nobody waits any more."""
        with self.lock:
            if not self.left:
                self.thread, self.spared = threading.current_thread(), spared
            return not self.left

    def execute(self) -> Outcome:
        """Return what came of it; an exception is a value here, since futures refuse some."""
        try:
            return self.context.run(self.function), None
        except BaseException as error:  # noqa: BLE001 (raised again where the call is awaited)
            return None, error

    def end(self) -> bool:
        """Belong to no thread any more; True if it was left behind meanwhile."""
        with self.lock:
            self.thread = None
            return self.left
