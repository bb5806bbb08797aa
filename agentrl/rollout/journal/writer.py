"""One thread that writes: what many rollouts hand in at about the same time is committed together.

Whoever hands something in may wait until it is committed. When the file cannot be written for a reason that passes (the
disk is full, another process holds a lock, the file system became read-only), the thread says so, with the path and
what to do, and tries again until it can; whoever waits goes on waiting, and a transaction is written whole or not at
all. Any other error ends the writing: it is raised where somebody waits, now and later.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import RolloutError
from agentrl.rollout.journal.schema import check_file, open_for_writing, transaction

logger = logging.getLogger(__name__)

Job = Callable[[sqlite3.Connection], Any]
"""Reads or writes within a transaction; may be run again when that fails."""

Answer = asyncio.Future[Any] | concurrent.futures.Future[Any]

CLOSE_SECONDS = 10.0
"""How long `close` waits for what was handed in to be written."""

LONGEST_DELAY = 30.0
"""Most seconds between two attempts to write."""

GATHER_SECONDS = 0.002
"""How long jobs are gathered before they are written: little beside sampling a turn, and fewer commits."""

TOGETHER = 512
"""Most jobs of one transaction."""

PASSING = {
    sqlite3.SQLITE_FULL: "the disk is full, or a quota is used up: make room",
    sqlite3.SQLITE_IOERR: "the file system reports an error, perhaps for lack of room: make room, or mend it",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: make room, or restore the folder and its permissions",
    sqlite3.SQLITE_READONLY: "it is read-only: make file and folder writable",
    sqlite3.SQLITE_BUSY: "another process holds a lock on it: end that process, or let it finish",
    sqlite3.SQLITE_LOCKED: "another process holds a lock on it: end that process, or let it finish",
}
"""What to do about the errors that pass, by SQLite's primary result code."""


class Writer:
    """Runs jobs on a journal. The thread and the file begin with the first job, also after `close`.

    Args:
        path: The journal.

    Raises:
        ConfigurationError: There is another file in its place.
    """

    def __init__(self, path: Path) -> None:
        check_file(path)
        self.path = path
        self._lock = threading.Lock()
        self._crew: _Crew | None = None
        self._broken: BaseException | None = None

    def put(self, job: Job, answer: Answer | None = None) -> None:
        """Hand a job in. Jobs run in the order in which they were handed in.

        Args:
            job: What to do.
            answer: Gets what the job returns once it is committed, or an error.

        Raises:
            RolloutError: Nothing can be written any more.
        """
        with self._lock:
            if self._broken is not None:
                raise self._error() from self._broken
            if self._crew is None:
                self._crew = _Crew()
                thread = threading.Thread(target=self._serve, args=(self._crew,), name="agentrl-journal", daemon=True)
                self._crew.thread = thread
                thread.start()
            self._crew.jobs.put(_Item(job, answer))

    async def commit(self, job: Job) -> Any:
        """Hand a job in and wait until it is committed; returns what it returned."""
        answer = asyncio.get_running_loop().create_future()
        self.put(job, answer)
        return await answer

    def run(self, job: Job) -> Any:
        """The same for callers outside of an event loop."""
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.put(job, answer)
        return answer.result()

    def close(self) -> None:
        """Write what was handed in, and end the thread; a disk that is still full then costs what is left."""
        with self._lock:
            crew, self._crew = self._crew, None
        if crew is None or crew.thread is None:
            return
        crew.jobs.put(None)
        crew.thread.join(CLOSE_SECONDS)
        crew.leaving.set()
        crew.thread.join(CLOSE_SECONDS)

    def _serve(self, crew: _Crew) -> None:
        file = _File(self.path)
        going_on = True
        while going_on:
            items = [crew.jobs.get()]
            time.sleep(GATHER_SECONDS)
            while len(items) < TOGETHER and items[-1] is not None:
                try:
                    items.append(crew.jobs.get_nowait())
                except queue.Empty:
                    break
            going_on = items[-1] is not None
            batch = [item for item in items if item is not None]
            try:
                answers = self._write(file, [item.job for item in batch], crew.leaving)
            except BaseException as error:  # noqa: BLE001 (raised where somebody waits)
                with self._lock:
                    self._broken = error
                    while not crew.jobs.empty():
                        if (late := crew.jobs.get()) is not None:
                            batch.append(late)
                logger.error("the journal %s cannot be written: %r", self.path, error)
                _settle_all([(item.answer, None, self._error()) for item in batch])
                break
            _settle_all([(item.answer, value, None) for item, value in zip(batch, answers, strict=True)])
        file.close()

    def _write(self, file: _File, jobs: list[Job], leaving: threading.Event) -> list[Any]:
        """Run jobs in one transaction, as often as it takes."""
        delay, paused = 0.5, False
        while jobs:
            try:
                answers = file.run(jobs)
            except sqlite3.Error as error:
                file.close()
                advice = PASSING.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF)
                if advice is None or leaving.is_set():
                    raise
                delay, paused = min(LONGEST_DELAY, delay * 2), True
                logger.warning(
                    "the run waits for its journal %s, which cannot be written (%s): %s. Tried again in %.0f s; "
                    "nothing is lost meanwhile.",
                    self.path,
                    error,
                    advice,
                    delay,
                )
                leaving.wait(delay)
            else:
                if paused:
                    logger.warning("the journal %s can be written again, and the run goes on", self.path)
                return answers
        return []

    def _error(self) -> RolloutError:
        return RolloutError(f"the journal {self.path} cannot be written any more: {self._broken!r}")


class _Item(NamedTuple):
    job: Job
    answer: Answer | None


class _Crew:
    """A writing thread, its queue, and the word that it is to leave although the file cannot be written."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.leaving = threading.Event()
        self.thread: threading.Thread | None = None


class _File:
    """The connection of the writing thread, opened when it is needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def run(self, jobs: list[Job]) -> list[Any]:
        """Run jobs in one transaction."""
        if self._connection is None:
            self._connection = open_for_writing(self._path)
        with transaction(self._connection):
            return [job(self._connection) for job in jobs]

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _settle_all(answers: list[tuple[Answer | None, Any, BaseException | None]]) -> None:
    """Answer those who wait; each event loop is woken once for all of its own."""
    on_loops: defaultdict[asyncio.AbstractEventLoop, list[Any]] = defaultdict(list)
    for answer, value, error in answers:
        if isinstance(answer, asyncio.Future):
            on_loops[answer.get_loop()].append((answer, value, error))
        elif answer is not None:
            _settle(answer, value, error)
    for loop, waiting in on_loops.items():
        try:
            loop.call_soon_threadsafe(_settle_each, waiting)
        except RuntimeError:
            logger.debug("the loop that waited for the journal is closed")


def _settle_each(waiting: list[tuple[Answer, Any, BaseException | None]]) -> None:
    for item in waiting:
        _settle(*item)


def _settle(answer: Answer, value: Any, error: BaseException | None) -> None:
    if answer.done():  # whoever waited was cancelled
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
