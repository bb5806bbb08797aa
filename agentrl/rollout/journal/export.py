"""A run's rollouts as one file for other programs: Parquet or JSON lines, a rollout a row.

Values without a fixed shape (prompt, completion, columns, rewards) are JSON, with images as their digests. The token
ids are those of the rows of the trajectory, of which there is one unless the chat template forked the episode.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import ConfigurationError
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.journal.records import RolloutRecord
from agentrl.rollout.journal.values import dumps

ROWS = pa.struct(
    {
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float64()),
    }
)

SCHEMA = pa.schema(
    {
        **dict.fromkeys(["id", "rank", "run"], pa.int64()),
        "kind": pa.string(),
        **dict.fromkeys(["step", "weights_version"], pa.int64()),
        "group": pa.string(),
        **dict.fromkeys(["member", "seed"], pa.int64()),
        "environment": pa.string(),
        "attempt": pa.int64(),
        **dict.fromkeys(["state", "outcome", "limit", "failure"], pa.string()),
        **dict.fromkeys(["started", "ended", "reward"], pa.float64()),
        "rewards": pa.string(),
        "advantages": pa.list_(pa.float64()),
        **dict.fromkeys(["turns", "sampled"], pa.int64()),
        **dict.fromkeys(["prompt", "completion", "columns"], pa.string()),
        "rows": pa.list_(ROWS),
    }
)

TOGETHER = 256
"""Rollouts held in memory at once."""


def export(records: Records, path: str | Path, *, run: int | None = None) -> int:
    """Write rollouts to a file; those that were played again are left out.

    Args:
        records: The journals.
        path: Ends in `.parquet` or `.jsonl`.
        run: Only this run.

    Returns:
        The number of rollouts.

    Raises:
        ConfigurationError: The name has another ending.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigurationError(f"{path}: expected a name that ends in .parquet or .jsonl")
    summaries = records.summaries(run=run)
    rows = (as_row(record) for record in records.rollouts(summaries))
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_without_nan(row), ensure_ascii=False) + "\n" for row in rows)
    else:
        with pq.ParquetWriter(path, SCHEMA) as writer:
            for part in _parts(rows):
                writer.write_table(pa.Table.from_pylist(part, schema=SCHEMA))
    return len(summaries)


def as_row(record: RolloutRecord) -> dict[str, Any]:
    """A rollout as a row of the exported table."""
    summary, trajectory = record.summary, record.trajectory()
    row = {name: getattr(summary, name, None) for name in SCHEMA.names}
    return row | {
        "seed": record.task.seed,
        "failure": None if summary.failure is None else f"{summary.failure.where}: {summary.failure.error}",
        "rewards": dumps(summary.rewards),
        "prompt": dumps(record.prompt),
        "completion": dumps(trajectory.completion),
        "columns": dumps(record.task.columns),
        "rows": [{name: getattr(part, name) for name in ROWS.names} for part in trajectory.rows],
    }


def _parts(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while part := list(itertools.islice(rows, TOGETHER)):
        yield part


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; a logprob that is not known is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
