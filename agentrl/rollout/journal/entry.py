"""One rollout on its way into the journal, turn by turn as the engine plays it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.rollout.journal.records import State, TurnRecord
from agentrl.rollout.journal.statements import (
    ending_columns,
    insert,
    keep_images,
    plain_fields,
    task_columns,
    turn_columns,
    update,
)
from agentrl.rollout.journal.values import Images, dumps, pack_ids, pack_logprobs
from agentrl.rollout.journal.writer import Writer
from agentrl.types import Limit, Outcome, Prompt, Task, Trajectory


@dataclass(slots=True)
class Window:
    """Rollouts that belong together, see `agentrl.rollout.journal.journal`.

    Attributes:
        id: Its number, once it is written.
        found: What it held when it was opened, by group and member.
    """

    id: int | None = None
    found: dict[tuple[str, int], int] = field(default_factory=dict)


class Entry:
    """One rollout in the journal.

    Attributes:
        id: Its number, once it is written.
        begun: Whether it was handed in.
        rewarding: Seconds that the environment took for the reward; written with the end.
    """

    def __init__(self, writer: Writer, window: Window, task: Task, attempt: int) -> None:
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
            self.id = insert(
                connection,
                "rollouts",
                window=self._window.id,
                **task_columns(task, images),
                attempt=self._attempt,
                state=State.PLAYING,
                prompt=dumps(prompt, images),
                prompt_ids=pack_ids(ids),
                started=started,
                resetting=resetting,
            )
            keep_images(connection, self.id, images)

        self._writer.put(write)

    async def turn(self, number: int, record: TurnRecord, ending: tuple[Outcome, Limit | None] | None = None) -> None:
        """Write a finished turn, and how the rollout ended if it ended with it; returns when that is durable."""
        turn, sample, following, at = record.turn, record.sample, record.following, time.time()

        def write(connection: sqlite3.Connection) -> None:
            assert self.id is not None
            images: Images = {}
            insert(
                connection,
                "turns",
                rollout=self.id,
                **turn_columns(number, turn),
                ids=pack_ids(sample.ids),
                logprobs=pack_logprobs(sample.logprobs),
                message=dumps(record.message, images),
                results=dumps([plain_fields(result) for result in turn.results], images),
                shown=record.shown,
                next_ids=None if following is None else pack_ids(following.ids),
                added=None if following is None else following.added,
                forks=None if following is None else following.forks,
                at=at,
            )
            keep_images(connection, self.id, images)
            if ending is not None:
                update(connection, self.id, state=State.PLAYED, outcome=ending[0], limit=ending[1])

        await self._writer.commit(write)

    async def end(self, trajectory: Trajectory) -> None:
        """Write how the rollout ended; returns when that is durable, and gives the trajectory its number."""
        if not self.begun:
            self.begin(trajectory.prompt, trajectory.prompt_ids)
        ended = time.time()
        listed = [(turn.listed_reward, number) for number, turn in enumerate(trajectory.turns)]

        def write(connection: sqlite3.Connection) -> None:
            assert self.id is not None
            images: Images = {}
            update(
                connection,
                self.id,
                **ending_columns(trajectory, images),
                ended=ended,
                rewarding=self.rewarding,
            )
            given = [(value, self.id, number) for value, number in listed if value is not None]
            connection.executemany("UPDATE turns SET listed_reward = ? WHERE rollout = ? AND number = ?", given)
            keep_images(connection, self.id, images)

        await self._writer.commit(write)
        trajectory.record = self.id
