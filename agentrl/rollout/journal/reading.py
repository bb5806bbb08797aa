"""Reading a run's journals: runs, rollouts in short, and whole rollouts, as they are while the run goes on too.

The viewer, `agentrl replay`, `agentrl export` and resuming all read through this module. It needs neither torch nor
transformers, whose import would be most of the time that `agentrl view` takes to begin.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from agentrl.chat.continuation import Continuation
from agentrl.errors import ConfigurationError
from agentrl.rollout.journal.records import RolloutRecord, RolloutSummary, RunRecord, State, TurnRecord
from agentrl.rollout.journal.schema import open_for_reading, rank_of
from agentrl.rollout.journal.values import from_png, loads, unpack_ids, unpack_logprobs
from agentrl.rollout.journal.whole import fill_turns, read_whole
from agentrl.types import Failure, FinishReason, Limit, Outcome, Sample, Task, ToolCall, ToolResult, Turn


class RolloutKey(NamedTuple):
    """Names a rollout within a run's folder."""

    rank: int
    id: int

    @classmethod
    def parse(cls, text: str) -> RolloutKey:
        """Read "57" (of process 0) or "1:57" (of process 1).

        Raises:
            ConfigurationError: It is neither.
        """
        rank, _, number = text.rpartition(":")
        if not number.isdigit() or not (rank or "0").isdigit():
            raise ConfigurationError(f"{text!r} names no rollout; expected its number, or PROCESS:NUMBER")
        return cls(int(rank or 0), int(number))


class Records:
    """The journals of a run.

    Args:
        path: The run's folder, or one journal.

    Attributes:
        journals: The open journal of each process.

    Raises:
        ConfigurationError: There is no journal, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = sorted(path.glob("_rollouts*.db"), key=rank_of) if path.is_dir() else [path]
        if not files:
            raise ConfigurationError(f"there is no journal (_rollouts.db) in {path}")
        self.journals = {rank_of(file): open_for_reading(file) for file in files}

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for connection in self.journals.values():
            connection.close()

    @property
    def ranks(self) -> list[int]:
        """The processes that there are journals of."""
        return list(self.journals)

    def runs(self) -> list[RunRecord]:
        """The runs, oldest first, as the first process recorded them."""
        rows = next(iter(self.journals.values())).execute("SELECT * FROM runs ORDER BY id")
        return [RunRecord(row["id"], row["started"], json.loads(row["info"])) for row in rows]

    def summaries(
        self,
        *,
        run: int | None = None,
        kind: str | None = None,
        steps: tuple[int, int] | None = None,
        group: str | None = None,
        environment: str | None = None,
        outcome: Outcome | None = None,
        superseded: bool = False,
        after: int = 0,
        limit: int | None = None,
    ) -> list[RolloutSummary]:
        """Rollouts in short, in the order in which each process began them; what is None does not select.

        Args:
            run: Of this run.
            kind: Of this kind.
            steps: Played from the first of these steps to the last one, both included.
            group: Of this group.
            environment: In the environment of this name.
            outcome: That ended so.
            superseded: Those too that were cut off and played again.
            after: With a higher number, for reading on.
            limit: So many at most, of each process.
        """
        conditions = {"w.run = ?": run, "w.kind = ?": kind, 'r."group" = ?': group, "r.environment = ?": environment}
        conditions |= {"r.outcome = ?": outcome, "r.id > ?": after or None}
        conditions |= {"r.state != ?": None if superseded else State.SUPERSEDED}
        if steps is not None:
            conditions |= {"w.step >= ?": steps[0], "w.step <= ?": steps[1]}
        chosen = {text: value for text, value in conditions.items() if value is not None}
        return [
            summary
            for rank, connection in self.journals.items()
            for summary in read_summaries(connection, chosen, rank=rank, limit=limit)
        ]

    def rollout(self, key: RolloutKey | int) -> RolloutRecord:
        """One rollout with all its turns.

        Args:
            key: Which one; a number alone is one of the first process.

        Raises:
            ConfigurationError: There is none.
        """
        rank, number = (0, key) if isinstance(key, int) else key
        connection = self.journals.get(rank)
        record = None if connection is None else read_rollout(connection, number, rank=rank)
        if record is None:
            raise ConfigurationError(f"there is no rollout {number} of process {rank}; processes: {self.ranks}")
        return record

    def rollouts(self, summaries: Sequence[RolloutSummary]) -> Iterator[RolloutRecord]:
        """The whole rollouts of summaries, one after the other."""
        for summary in summaries:
            yield self.rollout(RolloutKey(summary.rank, summary.id))

    def image(self, digest: str) -> bytes | None:
        """The PNG file of an image."""
        for connection in self.journals.values():
            if (row := connection.execute("SELECT png FROM images WHERE digest = ?", [digest]).fetchone()) is not None:
                return bytes(row["png"])
        return None


def read_summaries(
    connection: sqlite3.Connection, conditions: dict[str, Any], *, rank: int = 0, limit: int | None = None
) -> list[RolloutSummary]:
    """Read the rollouts that meet all conditions, in order of their numbers."""
    where = " AND ".join(conditions) or "TRUE"
    rows = connection.execute(
        f"""
        SELECT r.*, w.run, w.kind, w.step, w.weights_version,
               (SELECT count(*) FROM turns t WHERE t.rollout = r.id) AS turns,
               (SELECT coalesce(sum(t.stop - t.start), 0) FROM turns t WHERE t.rollout = r.id) AS sampled
        FROM rollouts r JOIN windows w ON w.id = r.window WHERE {where} ORDER BY r.id LIMIT ?
        """,
        [*conditions.values(), -1 if limit is None else limit],
    )
    return [_summary(row, rank) for row in rows]


def read_rollout(
    connection: sqlite3.Connection, number: int, *, rank: int = 0, image: Callable[[str], Any] | None = None
) -> RolloutRecord | None:
    """Read one rollout with its turns, None if there is none of that number; `image` stands in for images."""
    summaries = read_summaries(connection, {"r.id = ?": number}, rank=rank)
    if not summaries:
        return None
    [summary] = summaries

    def from_journal(digest: str) -> Image.Image:
        [blob] = connection.execute("SELECT png FROM images WHERE digest = ?", [digest]).fetchone()
        return from_png(blob)

    image = from_journal if image is None else image
    row = connection.execute("SELECT * FROM rollouts WHERE id = ?", [number]).fetchone()
    rows = connection.execute("SELECT * FROM turns WHERE rollout = ? ORDER BY number", [number])
    turns, whole = [_turn(turn, image) for turn in rows], read_whole(connection, row, image)
    given = loads(row["task"], image)
    return RolloutRecord(
        summary=summary,
        task=Task(summary.group, summary.member, row["seed"], given["prompt"], given["columns"], summary.environment),
        prompt=loads(row["prompt"], image),
        prompt_ids=unpack_ids(row["prompt_ids"]),
        turns=turns if whole is None else fill_turns(turns, whole),
        whole=whole,
        extra=loads(row["extra"], image),
    )


def _summary(row: sqlite3.Row, rank: int) -> RolloutSummary:
    plain = ("id", "run", "kind", "step", "weights_version", "group", "member", "environment", "attempt")
    times = ("started", "ended", "resetting", "rewarding")
    return RolloutSummary(
        **{name: row[name] for name in (*plain, *times, "reward", "turns", "sampled")},
        rank=rank,
        state=State(row["state"]),
        outcome=None if row["outcome"] is None else Outcome(row["outcome"]),
        limit=None if row["limit"] is None else Limit(row["limit"]),
        failure=None if row["failure"] is None else Failure(**json.loads(row["failure"])),
        rewards=json.loads(row["rewards"] or "{}"),
        advantages=json.loads(row["advantages"] or "[]"),
    )


def _turn(row: sqlite3.Row, image: Any) -> TurnRecord:
    results = tuple(ToolResult(ToolCall(**answer.pop("call")), **answer) for answer in loads(row["results"], image))
    finish = FinishReason(row["finish"])
    following = None
    if row["next_ids"] is not None:
        following = Continuation(unpack_ids(row["next_ids"]), row["added"], bool(row["forks"]))
    version, updates = row["weights_version"], tuple((index, later) for index, later in json.loads(row["updates"]))
    span = row["start"], row["stop"], finish, results, row["seconds"], row["row"], row["listed_reward"]
    return TurnRecord(
        turn=Turn(*span, weights_version=version, updates=updates, prefill=row["prefill"]),
        sample=Sample(
            unpack_ids(row["ids"]), unpack_logprobs(row["logprobs"]), finish, version, updates, row["prefill"]
        ),
        message=loads(row["message"], image),
        shown=bool(row["shown"]),
        following=following,
        at=row["at"],
    )
