"""What writes rows of the journal's tables, within a transaction of whoever calls it."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import fields
from typing import Any

from agentrl.rollout.journal.records import State
from agentrl.rollout.journal.values import Images, dumps, png
from agentrl.types import Task, ToolResult, Trajectory, Turn


def insert(connection: sqlite3.Connection, table: str, **values: Any) -> int:
    """Add a row; gives its number."""
    columns = ", ".join(f'"{name}"' for name in values)
    places = ", ".join("?" * len(values))
    statement = f"INSERT INTO {table} ({columns}) VALUES ({places})"
    number = connection.execute(statement, list(values.values())).lastrowid
    assert number is not None
    return number


def update(connection: sqlite3.Connection, rollout: int, **values: Any) -> None:
    """Change columns of a rollout."""
    columns = ", ".join(f'"{name}" = ?' for name in values)
    connection.execute(f"UPDATE rollouts SET {columns} WHERE id = ?", [*values.values(), rollout])


def keep_images(connection: sqlite3.Connection, rollout: int, images: Images) -> None:
    """Add the images of a rollout that are not there yet."""
    for digest, image in images.items():
        if connection.execute("SELECT 1 FROM images WHERE digest = ?", [digest]).fetchone() is None:
            connection.execute("INSERT INTO images VALUES (?, ?)", [digest, png(image)])
        connection.execute("INSERT OR IGNORE INTO rollout_images VALUES (?, ?)", [rollout, digest])


def task_columns(task: Task, images: Images) -> dict[str, Any]:
    """What a rollout's row tells of its task."""
    return {
        "group": task.group,
        "member": task.member,
        "seed": task.seed,
        "environment": task.environment,
        "task": task_text(task, images),
    }


def turn_columns(number: int, turn: Turn) -> dict[str, Any]:
    """What a turn's row tells of its place in the rollout."""
    return {
        "number": number,
        "row": turn.row,
        "start": turn.start,
        "stop": turn.stop,
        "finish": turn.finish,
        "weights_version": turn.weights_version,
        "updates": json.dumps(turn.updates),
        "seconds": turn.seconds,
        "prefill": turn.prefill,
    }


def ending_columns(trajectory: Trajectory, images: Images) -> dict[str, Any]:
    """What a rollout's row tells of its end."""
    failure = trajectory.failure
    return {
        "state": State.ENDED,
        "outcome": trajectory.outcome,
        "limit": trajectory.limit,
        "failure": None if failure is None else json.dumps(plain_fields(failure)),
        "extra": dumps(trajectory.extra, images),
        "reward": trajectory.reward,
    }


def task_text(task: Task, images: Images | None = None) -> str:
    """What a dataset gave a rollout, as the journal has it."""
    return dumps({"prompt": task.prompt, "columns": task.columns}, images)


def plain_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, those of a call within a result too."""
    plain = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    return plain | {"call": plain_fields(value.call)} if isinstance(value, ToolResult) else plain
