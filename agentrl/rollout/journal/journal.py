"""The journal as the engine and the trainers use it: rollouts are entered, their turns kept, and found again.

What belongs together is a *window*: rollouts that were played for one purpose. A window that is opened again in the
same run, with the same policy, is the same window: what it holds of finished rollouts need not be played again, and
those that were cut off may go on. The policy is a digest of weights and settings, so nothing of other weights is ever
taken for theirs. Where the weights change while a window is played it is a digest of settings only; whoever plays so
notes which weights had which version, and says whether what is found may be used. A run that begins anew has windows of
its own.

All work happens in the thread of `agentrl.rollout.journal.writer`, in the order in which it is asked for.
"""

from __future__ import annotations

import copy
import json
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.rollout.journal.entry import Entry, Window
from agentrl.rollout.journal.reading import read_rollout, read_summaries
from agentrl.rollout.journal.records import RolloutRecord, State
from agentrl.rollout.journal.schema import journal_path
from agentrl.rollout.journal.statements import insert, task_text, update
from agentrl.rollout.journal.values import dumps, lost_type
from agentrl.rollout.journal.whole import write_whole
from agentrl.rollout.journal.writer import Writer
from agentrl.types import Task, Trajectory

logger = logging.getLogger(__name__)


class Journal:
    """The journal of this process.

    Args:
        folder: The run's folder.
        rank: Number of the process.
        keep_steps: Rollouts of windows that are more optimizer steps back than this are deleted; None keeps all.

    Raises:
        ConfigurationError: There is another file in its place.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, keep_steps: int | None = None) -> None:
        self._writer = Writer(journal_path(folder, rank))
        self._keep_steps = keep_steps
        self._run = _Run()
        self._window: Window | None = None
        self._named: set[str] = set()  # extra fields that were warned of

    @property
    def path(self) -> Path:
        """The file."""
        return self._writer.path

    def begin_run(self, info: Mapping[str, Any], *, resume: bool = False) -> None:
        """Say which run the windows to come belong to.

        Args:
            info: About a new run.
            resume: Go on with the last run of the file that has windows which can be found again, if there is one.
        """
        run = self._run = _Run()
        self._window = None
        text = dumps(dict(info))

        def begin(connection: sqlite3.Connection) -> None:
            findable = "SELECT max(run) FROM windows WHERE policy != ''"
            last = connection.execute(findable).fetchone()[0] if resume else None
            run.id = last or insert(connection, "runs", started=time.time(), info=text)

        self._writer.put(begin)

    def add_weights(self, version: int, digest: str) -> None:
        """Note which weights have a version from now on."""
        run = self._run

        def write(connection: sqlite3.Connection) -> None:
            if run.id is not None:
                connection.execute("INSERT OR REPLACE INTO weights VALUES (?, ?, ?)", [run.id, version, digest])

        self._writer.put(write)

    def weights(self) -> dict[int, str]:
        """The digests of the run's weights so far, by version; waits for them."""
        run = self._run

        def read(connection: sqlite3.Connection) -> dict[int, str]:
            return dict(map(tuple, connection.execute("SELECT version, digest FROM weights WHERE run = ?", [run.id])))

        return self._writer.run(read)

    def open_window(
        self,
        *,
        kind: str,
        step: int,
        identity: Any = None,
        policy: str = "",
        weights_version: int = 0,
        anew: bool = False,
        oldest_version: int = 0,
    ) -> Window:
        """Say which window the rollouts to come belong to.

        Args:
            kind: What they are for, "train" or "eval" for instance.
            step: Optimizer steps so far.
            identity: Which window it is among those of its kind: what JSON can hold.
            policy: Digest of the weights and of the settings that decide what is played; "": rollouts of this window
                are never found again.
            weights_version: Version of the weights.
            anew: Begin the window anew, whatever there is of it.
            oldest_version: What older weights have drawn of it is played again.

        Returns:
            The window; whatever waits for one of its rollouts finds it filled in.
        """
        run, window = self._run, Window()
        self._window = window
        values = {"kind": kind, "step": step, "identity": json.dumps(identity), "policy": policy}
        values |= {"weights_version": weights_version, "started": time.time()}
        oldest = None if self._keep_steps is None or kind != "train" else step - self._keep_steps

        def open_(connection: sqlite3.Connection) -> None:
            if run.id is None:  # nobody said so
                run.id = insert(connection, "runs", started=time.time(), info="{}")
            if oldest is not None:
                _prune(connection, run.id, oldest)
            found = connection.execute(
                "SELECT max(id) FROM windows WHERE run = ? AND kind = ? AND identity = ? AND policy = ?",
                [run.id, kind, values["identity"], policy],
            ).fetchone()[0]
            if found is None or anew or not policy:
                window.id, window.found = insert(connection, "windows", run=run.id, **values), {}
            else:
                _supersede_older(connection, found, oldest_version)
                window.id, window.found = found, _usable(connection, found)

        self._writer.put(open_)
        return window

    def with_this_window(self) -> Journal:
        """The same journal with the window that is open now, whichever is opened later: for whoever plays ahead."""
        self._opened()
        return copy.copy(self)

    def enter(self, task: Task, attempt: int = 0) -> Entry:
        """Take a rollout in, as part of the window that is open."""
        return Entry(self._writer, self._opened(), task, attempt)

    def enter_again(self, record: RolloutRecord) -> Entry:
        """Take a rollout in that goes on where its record ends."""
        entry = Entry(self._writer, self._opened(), record.task, record.summary.attempt)
        entry.id, entry.begun = record.summary.id, True
        return entry

    async def recorded(self, task: Task) -> RolloutRecord | None:
        """What the open window holds of a task from before it was opened, None where there is nothing of use.

        The record is that of a rollout that ended with a training signal, or of one that was cut off. One that a
        program of the user's played is of use if it can be given back exactly.
        """
        window = self._opened()

        def find(connection: sqlite3.Connection) -> RolloutRecord | None:
            number = window.found.get((task.group, task.member))
            if number is None:
                return None
            kept = connection.execute("SELECT seed, task FROM rollouts WHERE id = ?", [number]).fetchone()
            if tuple(kept) != (task.seed, task_text(task)):  # the dataset is another one by now
                return None
            record = read_rollout(connection, number)
            if record is not None and record.whole is not None and not record.whole.exact:
                update(connection, number, state=State.SUPERSEDED)
                return None
            return record

        return await self._writer.commit(find) if window.id is None or window.found else None

    async def keep(self, trajectories: Sequence[Trajectory], *, started: float, attempt: int = 0) -> None:
        """Write rollouts that a program of the user's played, all of them or none; returns when that is durable.

        Args:
            trajectories: They have ended; they get their numbers.
            started: When they began, in seconds since 1970.
            attempt: Attempts before them.
        """
        window = self._opened()
        self._name_inexact(trajectories)

        def write(connection: sqlite3.Connection) -> list[int]:
            assert window.id is not None
            return [write_whole(connection, window.id, t, attempt=attempt, started=started) for t in trajectories]

        for trajectory, number in zip(trajectories, await self._writer.commit(write), strict=True):
            trajectory.record = number

    def supersede(self, record: RolloutRecord) -> None:
        """Note that a rollout is played again from its beginning."""
        number = record.summary.id
        self._writer.put(lambda connection: update(connection, number, state=State.SUPERSEDED))

    def add_rewards(
        self, trajectories: Sequence[Trajectory], names: Sequence[str], rewards: Sequence[Sequence[float | None]]
    ) -> None:
        """Keep what each reward source gave each trajectory."""
        texts = [json.dumps(dict(zip(names, row, strict=True))) for row in rewards]
        self._set_each(trajectories, "rewards", texts)

    def add_advantages(self, trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]]) -> None:
        """Keep the advantage of each trajectory, or one for each of its turns."""
        self._set_each(trajectories, "advantages", [json.dumps(list(row)) for row in advantages])

    def add_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep what was logged after an optimizer step."""
        run, text, at = self._run, json.dumps(dict(metrics)), time.time()

        def write(connection: sqlite3.Connection) -> None:
            if run.id is not None:
                insert(connection, "logs", run=run.id, step=step, at=at, metrics=text)

        self._writer.put(write)

    def close(self) -> None:
        """Write everything and close the file; whatever is entered later opens it again."""
        self._writer.close()

    def _name_inexact(self, trajectories: Sequence[Trajectory]) -> None:
        """Warn, once, of each extra field that the journal cannot give back as it is."""
        for name, value in (item for trajectory in trajectories for item in trajectory.extra.items()):
            if name not in self._named and (lost := lost_type({name: value})) is not None:
                self._named.add(name)
                logger.warning(
                    "the journal cannot give back the field %r of a rollout (%s): a resumed run plays such rollouts "
                    "again. Numbers, strings, lists and dicts of them, bytes and images come back as they are.",
                    name,
                    lost,
                )

    def _opened(self) -> Window:
        if self._window is None:
            self.open_window(kind="play", step=0)
        assert self._window is not None
        return self._window

    def _set_each(self, trajectories: Sequence[Trajectory], column: str, texts: Sequence[str]) -> None:
        numbers = [trajectory.record for trajectory in trajectories]

        def write(connection: sqlite3.Connection) -> None:
            for number, text in zip(numbers, texts, strict=True):
                if number is not None:
                    update(connection, number, **{column: text})

        self._writer.put(write)


@dataclass(slots=True)
class _Run:
    id: int | None = None


def _supersede_older(connection: sqlite3.Connection, window: int, version: int) -> None:
    """Set the rollouts of a window aside of which weights older than a version drew something."""
    connection.execute(
        """
        UPDATE rollouts SET state = ? WHERE window = ?
        AND EXISTS (SELECT 1 FROM turns t WHERE t.rollout = rollouts.id AND t.weights_version < ?)
        """,
        [State.SUPERSEDED, window, version],
    )


def _usable(connection: sqlite3.Connection, window: int) -> dict[tuple[str, int], int]:
    """The numbers of a window's rollouts that may be used again, by group and member."""
    usable = {}
    for summary in read_summaries(connection, {"r.window = ?": window, "r.state != ?": State.SUPERSEDED}):
        signal = summary.outcome is None or summary.outcome.is_signal
        key = (summary.group, summary.member)
        if signal:
            usable[key] = summary.id
        else:
            usable.pop(key, None)
    return usable


def _prune(connection: sqlite3.Connection, run: int, oldest: int) -> None:
    """Delete the rollouts of a run's windows before a step, and the images that only they referred to."""
    old = [row["id"] for row in connection.execute("SELECT id FROM windows WHERE run = ? AND step < ?", [run, oldest])]
    for window in old:
        rollouts = "(SELECT id FROM rollouts WHERE window = ?)"
        for table in ("turns", "trajectory_rows", "rollout_images"):
            connection.execute(f"DELETE FROM {table} WHERE rollout IN {rollouts}", [window])
        connection.execute("DELETE FROM rollouts WHERE window = ?", [window])
        connection.execute("DELETE FROM windows WHERE id = ?", [window])
    if old:
        connection.execute("DELETE FROM images WHERE digest NOT IN (SELECT digest FROM rollout_images)")
