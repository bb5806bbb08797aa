"""The journal as the engine and the trainers use it: rollouts are entered, their turns kept, and found again.

What belongs together is a *window*: rollouts that were played with one policy for one purpose. A window that is opened
again in the same run, with the same policy, is the same window: what it holds of finished rollouts need not be played
again, and those that were cut off may go on. The policy is a digest of weights and settings, so nothing of other
weights is ever taken for theirs. A run that begins anew has windows of its own.

All work happens in the thread of `agentrl.rollout.journal.writer`, in the order in which it is asked for.
"""

from __future__ import annotations

import copy
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agentrl.rollout.journal.reading import read_rollout, read_summaries
from agentrl.rollout.journal.records import RolloutRecord, State, TurnRecord
from agentrl.rollout.journal.schema import journal_path
from agentrl.rollout.journal.values import Images, dumps, pack_ids, pack_logprobs, png
from agentrl.rollout.journal.writer import Writer
from agentrl.types import Limit, Outcome, Prompt, Task, ToolResult, Trajectory


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
        self._window: _Window | None = None

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
            run.id = last or _insert(connection, "runs", started=time.time(), info=text)

        self._writer.put(begin)

    def open_window(
        self, *, kind: str, step: int, identity: Any = None, policy: str = "", weights_version: int = 0
    ) -> None:
        """Say which window the rollouts to come belong to.

        Args:
            kind: What they are for, "train" or "eval" for instance.
            step: Optimizer steps so far.
            identity: Which window it is among those of its kind: what JSON can hold.
            policy: Digest of the weights and of the settings that decide what is played; "": rollouts of this window
                are never found again.
            weights_version: Version of the weights.
        """
        run, window = self._run, _Window()
        self._window = window
        values = {"kind": kind, "step": step, "identity": json.dumps(identity), "policy": policy}
        values |= {"weights_version": weights_version, "started": time.time()}
        oldest = None if self._keep_steps is None or kind != "train" else step - self._keep_steps

        def open_(connection: sqlite3.Connection) -> None:
            if run.id is None:  # nobody said so
                run.id = _insert(connection, "runs", started=time.time(), info="{}")
            if oldest is not None:
                _prune(connection, run.id, oldest)
            found = connection.execute(
                "SELECT id FROM windows WHERE run = ? AND kind = ? AND identity = ? AND policy = ? AND policy != ''",
                [run.id, kind, values["identity"], policy],
            ).fetchone()
            window.id = _insert(connection, "windows", run=run.id, **values) if found is None else found["id"]
            window.found = {} if found is None else _usable(connection, found["id"])

        self._writer.put(open_)

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

        The record is that of a rollout that ended with a training signal, or of one that was cut off.
        """
        window = self._opened()

        def find(connection: sqlite3.Connection) -> RolloutRecord | None:
            number = window.found.get((task.group, task.member))
            record = None if number is None else read_rollout(connection, number)
            # The dataset may be another one by now.
            same = record is not None and record.task.seed == task.seed and _task(record.task) == _task(task)
            return record if same else None

        return await self._writer.commit(find) if window.id is None or window.found else None

    def supersede(self, record: RolloutRecord) -> None:
        """Note that a rollout is played again from its beginning."""
        number = record.summary.id
        self._writer.put(lambda connection: _update(connection, number, state=State.SUPERSEDED))

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
                _insert(connection, "logs", run=run.id, step=step, at=at, metrics=text)

        self._writer.put(write)

    def close(self) -> None:
        """Write everything and close the file; whatever is entered later opens it again."""
        self._writer.close()

    def _opened(self) -> _Window:
        if self._window is None:
            self.open_window(kind="play", step=0)
        assert self._window is not None
        return self._window

    def _set_each(self, trajectories: Sequence[Trajectory], column: str, texts: Sequence[str]) -> None:
        numbers = [trajectory.record for trajectory in trajectories]

        def write(connection: sqlite3.Connection) -> None:
            for number, text in zip(numbers, texts, strict=True):
                if number is not None:
                    _update(connection, number, **{column: text})

        self._writer.put(write)


class Entry:
    """One rollout in the journal.

    Attributes:
        id: Its number, once it is written.
        begun: Whether it was handed in.
        rewarding: Seconds that the environment took for the reward; written with the end.
    """

    def __init__(self, writer: Writer, window: _Window, task: Task, attempt: int) -> None:
        self._writer = writer
        self._window = window
        self._task = task
        self._attempt = attempt
        self.id: int | None = None
        self.begun = False
        self.rewarding: float | None = None

    def begin(self, prompt: Prompt, prompt_ids: Sequence[int], *, resetting: float | None = None) -> None:
        """Hand in the task, and the prompt as the model sees it. It is written before whatever comes later.

        Args:
            prompt: The prompt.
            prompt_ids: Its ids.
            resetting: Seconds that it took to get there: an instance of the environment, `reset`, rendering.
        """
        self.begun = True
        task, ids, started = self._task, list(prompt_ids), time.time()

        def write(connection: sqlite3.Connection) -> None:
            images: Images = {}
            self.id = _insert(
                connection,
                "rollouts",
                window=self._window.id,
                group=task.group,
                member=task.member,
                seed=task.seed,
                environment=task.environment,
                task=_task(task, images),
                attempt=self._attempt,
                state=State.PLAYING,
                prompt=dumps(prompt, images),
                prompt_ids=pack_ids(ids),
                started=started,
                resetting=resetting,
            )
            _keep_images(connection, self.id, images)

        self._writer.put(write)

    async def turn(self, number: int, record: TurnRecord, ending: tuple[Outcome, Limit | None] | None = None) -> None:
        """Write a finished turn, and how the rollout ended if it ended with it; returns when that is durable."""
        turn, sample, following, at = record.turn, record.sample, record.following, time.time()

        def write(connection: sqlite3.Connection) -> None:
            assert self.id is not None
            images: Images = {}
            _insert(
                connection,
                "turns",
                rollout=self.id,
                number=number,
                row=turn.row,
                start=turn.start,
                stop=turn.stop,
                finish=turn.finish,
                ids=pack_ids(sample.ids),
                logprobs=pack_logprobs(sample.logprobs),
                weights_version=sample.weights_version,
                updates=json.dumps(sample.updates),
                message=dumps(record.message, images),
                results=dumps([_plain(result) for result in turn.results], images),
                shown=record.shown,
                next_ids=None if following is None else pack_ids(following.ids),
                added=None if following is None else following.added,
                forks=None if following is None else following.forks,
                seconds=turn.seconds,
                prefill=turn.prefill,
                at=at,
            )
            _keep_images(connection, self.id, images)
            if ending is not None:
                _update(connection, self.id, state=State.PLAYED, outcome=ending[0], limit=ending[1])

        await self._writer.commit(write)

    async def end(self, trajectory: Trajectory) -> None:
        """Write how the rollout ended; returns when that is durable, and gives the trajectory its number."""
        if not self.begun:
            self.begin(trajectory.prompt, trajectory.prompt_ids)
        failure, ended = trajectory.failure, time.time()
        listed = [(turn.listed_reward, number) for number, turn in enumerate(trajectory.turns)]

        def write(connection: sqlite3.Connection) -> None:
            assert self.id is not None
            images: Images = {}
            _update(
                connection,
                self.id,
                state=State.ENDED,
                ended=ended,
                outcome=trajectory.outcome,
                limit=trajectory.limit,
                failure=None if failure is None else json.dumps(_plain(failure)),
                extra=dumps(trajectory.extra, images),
                reward=trajectory.reward,
                rewarding=self.rewarding,
            )
            given = [(value, self.id, number) for value, number in listed if value is not None]
            connection.executemany("UPDATE turns SET listed_reward = ? WHERE rollout = ? AND number = ?", given)
            _keep_images(connection, self.id, images)

        await self._writer.commit(write)
        trajectory.record = self.id


@dataclass(slots=True)
class _Run:
    id: int | None = None


@dataclass(slots=True)
class _Window:
    id: int | None = None
    found: dict[tuple[str, int], int] = field(default_factory=dict)


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
        connection.execute(f"DELETE FROM turns WHERE rollout IN {rollouts}", [window])
        connection.execute(f"DELETE FROM rollout_images WHERE rollout IN {rollouts}", [window])
        connection.execute("DELETE FROM rollouts WHERE window = ?", [window])
        connection.execute("DELETE FROM windows WHERE id = ?", [window])
    if old:
        connection.execute("DELETE FROM images WHERE digest NOT IN (SELECT digest FROM rollout_images)")


def _task(task: Task, images: Images | None = None) -> str:
    return dumps({"prompt": task.prompt, "columns": task.columns}, images)


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, those of a call within a result too."""
    plain = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    return plain | {"call": _plain(value.call)} if isinstance(value, ToolResult) else plain


def _keep_images(connection: sqlite3.Connection, rollout: int, images: Images) -> None:
    for digest, image in images.items():
        if connection.execute("SELECT 1 FROM images WHERE digest = ?", [digest]).fetchone() is None:
            connection.execute("INSERT INTO images VALUES (?, ?)", [digest, png(image)])
        connection.execute("INSERT OR IGNORE INTO rollout_images VALUES (?, ?)", [rollout, digest])


def _insert(connection: sqlite3.Connection, table: str, **values: Any) -> int:
    columns = ", ".join(f'"{name}"' for name in values)
    places = ", ".join("?" * len(values))
    statement = f"INSERT INTO {table} ({columns}) VALUES ({places})"
    number = connection.execute(statement, list(values.values())).lastrowid
    assert number is not None
    return number


def _update(connection: sqlite3.Connection, rollout: int, **values: Any) -> None:
    columns = ", ".join(f'"{name}" = ?' for name in values)
    connection.execute(f"UPDATE rollouts SET {columns} WHERE id = ?", [*values.values(), rollout])
