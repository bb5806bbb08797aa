"""What comes of the ways in which servers fail: rows that tests play, and a table in the documentation made of them.

`docs/environments.md` has the tables, each between the comments `<!-- failures: NAME -->` and `<!-- end -->`. The rows
that the tests of NAME play are its only source:

    python -m tests.envs.failures    # writes all of them into the page
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.testing.invariants import assert_row_invariants
from agentrl.types import Outcome, Trajectory
from tests.docs import tables

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
END = "<!-- end -->"

_ROLLOUT = {Outcome.ENV_FAILURE: "environment failure"}


@dataclass(frozen=True, slots=True)
class Row:
    """One way to fail, and what the test that plays it asserts.

    Attributes:
        event: What happens to one of several rollouts.
        outcome: How that one ends.
        says: Words of its failure, or of what the model is told if it goes on; empty if nobody is told anything.
        how: For the test that plays it.
    """

    event: str
    outcome: Outcome
    says: str
    how: Any = None

    @property
    def name(self) -> str:
        """For the test's id."""
        return re.sub(r"\W+", "-", self.event).strip("-")


def assert_came_true(row: Row, hit: Trajectory, others: Sequence[Trajectory], reward: float, sessions: int) -> None:
    """Assert what the table says.

    Args:
        row: What was played.
        hit: The rollout that it happened to.
        others: Further rollouts, at the same time and afterwards.
        reward: What each of them must have earned.
        sessions: How many sessions (containers, ...) there were in the end.
    """
    assert hit.outcome is row.outcome, (hit.outcome, hit.failure)
    told = [str(result.content) for turn in hit.turns for result in turn.results]
    said = hit.failure.error if hit.failure is not None else " ".join(told)
    assert row.says in said, said
    assert (hit.failure is None) == hit.outcome.is_signal
    assert hit.outcome.is_signal or hit.reward is None
    for trajectory in others:
        assert_row_invariants(trajectory)
        assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, reward), trajectory.failure
    assert others
    assert sessions == 0


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| what happens | the rollout | it is told | the run | sessions left |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        says = f"… {row.says} …" if row.says else ""
        lines.append(f"| {row.event} | {_ROLLOUT.get(row.outcome, 'goes on')} | {says} | goes on | 0 |")
    return "\n".join(lines)


def assert_documented(name: str, rows: Sequence[Row]) -> None:
    """Assert that the documentation has the table of these rows."""
    _, known, _ = tables.split(PAGE.read_text(encoding="utf-8"), _begin(name), END)
    assert known.strip() == table(rows), f"the table of {name} in {PAGE} is not what the tests assert; write it anew"


def write(name: str, rows: Sequence[Row]) -> None:
    """Write the table of these rows into the documentation."""
    tables.write(PAGE, _begin(name), END, table(rows))


def _begin(name: str) -> str:
    return f"<!-- failures: {name} -->"


def main() -> None:
    """Write all tables."""
    for module in ("test_openenv_failures", "test_openenv_container", "test_ors_failures", "harbor.test_failures"):
        played = importlib.import_module(f"tests.envs.{module}")
        write(played.NAME, played.ROWS)


if __name__ == "__main__":
    main()
