"""All rollouts of a run's folder as short rows, kept up to date while the run goes on.

A page gets all of them once, and then those that changed. Its lists, filters and charts need nothing else, so they
work the same in a served page and in a file.
"""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.rollout.journal.reading import Records, read_summaries
from agentrl.rollout.journal.records import RolloutSummary, RunRecord, State

COLUMNS = (
    *("rank", "id", "run", "kind", "step", "weights_version", "group", "member", "environment", "attempt"),
    *("state", "outcome", "limit", "failure", "reward", "advantage", "turns", "sampled"),
    *("calls", "failed", "timed_out", "tools", "started", "ended"),
    *("resetting", "prefill", "sampling", "calling", "rewarding"),
)
"""What a row has. The last ones are seconds: before it began, until the first token of each turn, spent sampling (the
former included), in the slowest call of each turn, and for the reward of its environment; None where not known."""

RECENT = 2000
"""So many of the newest rollouts are looked at again: their rewards and advantages come after they ended."""

REFRESH_SECONDS = 1.0
"""A change of the file is looked for this often at most."""

Row = tuple[Any, ...]


@dataclass(slots=True)
class _Played:
    """What the turns of a rollout come to."""

    prefill: float | None = None
    sampling: float = 0.0
    calling: float = 0.0
    calls: int = 0
    failed: int = 0
    timed_out: int = 0
    tools: set[str] = field(default_factory=set)
    reward: float | None = None


class Index:
    """The rollouts of one run's folder, for several threads.

    Args:
        path: The folder, or one journal.

    Attributes:
        path: The same.
        lock: Held while the journals are read.

    Raises:
        ConfigurationError: There is no journal, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lock = threading.Lock()
        self._open()

    def close(self) -> None:
        """Close the files."""
        with self.lock:
            self.records.close()

    def runs(self) -> list[RunRecord]:
        """The runs that the folder's journals hold."""
        with self.lock:
            return self.records.runs()

    def changes(self, epoch: str = "", version: int = 0) -> dict[str, Any]:
        """The rows that are new or different since a version.

        Args:
            epoch: Of the earlier answer; if it is another one by now, all rows are given.
            version: Of the earlier answer.

        Returns:
            `epoch`, `version`, `columns` and `rows`.
        """
        with self.lock:
            self._refresh()
            since = version if epoch == self._epoch else 0
            rows = [row for changed, row in self._rows.values() if changed > since]
            return {"epoch": self._epoch, "version": self._version, "columns": COLUMNS, "rows": rows}

    def logs(self) -> dict[int, dict[str, list[list[float]]]]:
        """What the runs logged: `[step, value]` pairs by run and metric; a step that was logged again counts once."""
        series: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        with self.lock:
            [first, *_] = self.records.journals.values()
            for row in first.execute("SELECT run, step, metrics FROM logs ORDER BY rowid"):
                for name, value in json.loads(row["metrics"]).items():
                    series[row["run"]][name][row["step"]] = value
        return {
            run: {name: [[step, values[step]] for step in sorted(values)] for name, values in metrics.items()}
            for run, metrics in series.items()
        }

    def search(self, text: str) -> list[tuple[int, int]]:
        """Process and number of the rollouts that have a text, in any case of ASCII letters.

        Looked through are what the model wrote, its calls and their results, prompts, and what broke environments.
        """
        # What JSON writes otherwise is looked for so. LIKE's own signs stand for themselves.
        needle = json.dumps(text, ensure_ascii=False)[1:-1]
        pattern = "%" + needle.replace("!", "!!").replace("%", "!%").replace("_", "!_") + "%"
        found = """
            SELECT rollout AS id FROM turns WHERE message LIKE :p ESCAPE '!' OR results LIKE :p ESCAPE '!'
            UNION SELECT id FROM rollouts WHERE prompt LIKE :p ESCAPE '!' OR completion LIKE :p ESCAPE '!'
                OR failure LIKE :p ESCAPE '!' ORDER BY 1
        """
        try:
            pattern.encode()
        except UnicodeEncodeError:  # a lone surrogate is not text that could be searched for
            return []
        with self.lock:
            return [
                (rank, row["id"])
                for rank, connection in self.records.journals.items()
                for row in connection.execute(found, {"p": pattern})
            ]

    def _open(self) -> None:
        self.records = Records(self.path)
        self._weights = {run.id: run.info.get("config", {}).get("reward_weights") or [] for run in self.records.runs()}
        self._rows: dict[tuple[int, int], tuple[int, Row]] = {}
        self._epoch = secrets.token_hex(8)
        self._version = 0
        self._seen: dict[int, int] = {}
        self._looked = -math.inf

    def _refresh(self) -> None:
        if time.monotonic() - self._looked < REFRESH_SECONDS:
            return
        if self.path.is_dir() and len(list(self.path.glob("_rollouts*.db"))) != len(self.records.journals):
            self.records.close()  # another process has begun
            self._open()
        self._version += 1
        for rank, connection in self.records.journals.items():
            seen = connection.execute("PRAGMA data_version").fetchone()[0]
            if self._seen.get(rank) != seen:
                self._seen[rank] = seen
                self._read(rank, connection)
        held = sum(c.execute("SELECT count(*) FROM rollouts").fetchone()[0] for c in self.records.journals.values())
        if held < len(self._rows):  # old ones were deleted
            self.records.close()
            self._open()
            self._refresh()
        self._looked = time.monotonic()

    def _read(self, rank: int, connection: sqlite3.Connection) -> None:
        newest = max((number for of, number in self._rows if of == rank), default=0)
        text, old = f"(r.id > ? OR r.state IN ('{State.PLAYING}', '{State.PLAYED}'))", newest - RECENT
        summaries = read_summaries(connection, {text: old}, rank=rank)
        played = _played(connection, [summary.id for summary in summaries], old)
        for run in self.records.runs():
            self._weights.setdefault(run.id, run.info.get("config", {}).get("reward_weights") or [])
        for summary in summaries:
            key = (rank, summary.id)
            row = _row(summary, played[summary.id], self._weights.get(summary.run, []))
            if key not in self._rows or self._rows[key][1] != row:
                self._rows[key] = (self._version, row)


def total_reward(summary: RolloutSummary, weights: Sequence[float], by_turn: float | None) -> float | None:
    """The reward of a rollout: that of its sources, weighted, and those of its turns; None if nothing rewarded it.

    Args:
        summary: The rollout.
        weights: Of the reward functions, which come first among the sources; environments weigh 1.0.
        by_turn: Sum of the rewards of its turns.
    """
    weighted = list(weights) + [1.0] * (len(summary.rewards) - len(weights))
    given = [w * r for w, r in zip(weighted, summary.rewards.values(), strict=False) if r is not None]
    if not summary.rewards and summary.reward is not None:
        given = [summary.reward]
    if by_turn is not None:
        given.append(by_turn)
    return finite(sum(given)) if given else None


def finite(value: float | None) -> float | None:
    """A number as JSON can hold it; None for what it cannot."""
    return value if value is not None and math.isfinite(value) else None


def _row(summary: RolloutSummary, played: _Played, weights: Sequence[float]) -> Row:
    advantages = summary.advantages
    values = {
        "failure": None if summary.failure is None else f"{summary.failure.where}: {summary.failure.error}"[:200],
        "reward": total_reward(summary, weights, played.reward),
        "advantage": finite(sum(advantages) / len(advantages)) if advantages else None,
        "tools": sorted(played.tools),
        **{name: getattr(played, name) for name in ("calls", "failed", "timed_out")},
        **{name: _rounded(getattr(played, name)) for name in ("prefill", "sampling", "calling")},
        **{name: _rounded(getattr(summary, name)) for name in ("resetting", "rewarding")},
    }
    return tuple(values[name] if name in values else getattr(summary, name) for name in COLUMNS)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _played(connection: sqlite3.Connection, numbers: Sequence[int], old: int) -> dict[int, _Played]:
    """What the turns of rollouts come to; most of these have numbers above `old`."""
    played: dict[int, _Played] = defaultdict(_Played)
    columns = "SELECT rollout, seconds, prefill, listed_reward, results FROM turns WHERE rollout"
    rows = connection.execute(f"{columns} > ?", [old]).fetchall()
    for number in numbers:
        if number <= old:
            rows += connection.execute(f"{columns} = ?", [number]).fetchall()
    for row in rows:
        rollout = played[row["rollout"]]
        rollout.sampling += row["seconds"]
        if row["prefill"] is not None:
            rollout.prefill = (rollout.prefill or 0.0) + row["prefill"]
        results = json.loads(row["results"])
        rewards = [r for r in (row["listed_reward"], *(result["reward"] for result in results)) if r is not None]
        if rewards:
            rollout.reward = (rollout.reward or 0.0) + sum(rewards)
        rollout.calling += max((result["seconds"] for result in results), default=0.0)
        rollout.calls += len(results)
        rollout.failed += sum(result["failed"] for result in results)
        rollout.timed_out += sum(result["timed_out"] for result in results)
        rollout.tools |= {result["call"]["name"][:100] for result in results}
    return played
