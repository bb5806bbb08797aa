"""Rollouts that a program of the user's played (`rollout_func`, `agent`), in the journal.

The engine saw neither what lies between their turns nor how they could go on, so they are written in one piece when
they have ended: their rows as they are, what followed the prompt, and their turns as spans of the rows.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.rollout.journal.records import TurnRecord, Whole
from agentrl.rollout.journal.statements import ending_columns, insert, keep_images, task_columns, turn_columns
from agentrl.rollout.journal.values import (
    Images,
    dumps,
    loads,
    lost_type,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from agentrl.types import Message, Prompt, Row, Trajectory


def write_whole(
    connection: sqlite3.Connection, window: int, trajectory: Trajectory, *, attempt: int, started: float
) -> int:
    """Write a trajectory that has ended into a window; gives its number."""
    images: Images = {}
    number = insert(
        connection,
        "rollouts",
        window=window,
        **task_columns(trajectory.task, images),
        attempt=attempt,
        prompt=dumps(trajectory.prompt, images),
        prompt_ids=pack_ids(trajectory.prompt_ids),
        completion=dumps(trajectory.completion, images),
        exact=lost_type(trajectory.extra) is None,
        started=started,
        ended=time.time(),
        **ending_columns(trajectory, images),
    )
    for index, row in enumerate(trajectory.rows):
        insert(
            connection,
            "trajectory_rows",
            rollout=number,
            number=index,
            prompt_ids=pack_ids(row.prompt_ids) if index else None,
            completion_ids=pack_ids(row.completion_ids),
            loss_mask=bytes(row.loss_mask),
            logprobs=pack_logprobs(row.logprobs),
        )
    for index, turn in enumerate(trajectory.turns):
        insert(
            connection,
            "turns",
            rollout=number,
            **turn_columns(index, turn),
            ids=b"",
            logprobs=b"",
            message="{}",
            results="[]",
            shown=False,
        )
    keep_images(connection, number, images)
    return number


def read_whole(connection: sqlite3.Connection, rollout: sqlite3.Row, image: Any) -> Whole | None:
    """Read the part of a rollout that its turns do not have, None where they have all of it."""
    if rollout["completion"] is None:
        return None
    rows = connection.execute("SELECT * FROM trajectory_rows WHERE rollout = ? ORDER BY number", [rollout["id"]])
    return Whole(
        completion=loads(rollout["completion"], image),
        rows=[
            Row(
                unpack_ids(rollout["prompt_ids"] if row["prompt_ids"] is None else row["prompt_ids"]),
                unpack_ids(row["completion_ids"]),
                list(row["loss_mask"]),
                unpack_logprobs(row["logprobs"]),
            )
            for row in rows
        ],
        exact=bool(rollout["exact"]),
    )


def fill_turns(turns: Sequence[TurnRecord], whole: Whole) -> list[TurnRecord]:
    """Give turns that were read without their content what the rest of their rollout has of it."""
    said = _said(whole.completion)
    filled = []
    for number, record in enumerate(turns):
        turn, row = record.turn, whole.rows[record.turn.row]
        span = slice(turn.start, turn.stop)
        sample = replace(record.sample, ids=row.completion_ids[span], logprobs=row.logprobs[span])
        message, *replies = said[number] if number < len(said) else [{"role": "assistant", "content": ""}]
        filled.append(replace(record, sample=sample, message=message, replies=tuple(replies)))
    return filled


def _said(completion: Prompt) -> list[list[Message]]:
    """A completion in parts, each of which begins with a message of the model.

    An agent's has one for each turn. A `rollout_func` only tells ids, so its whole text is the message of the first.
    """
    if isinstance(completion, str):
        return [[{"role": "assistant", "content": completion}]]
    parts: list[list[Message]] = []
    for message in completion:
        if message["role"] == "assistant" or not parts:
            parts.append([])
        parts[-1].append(message)
    return parts
