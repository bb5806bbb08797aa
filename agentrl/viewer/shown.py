"""What there is to show of several runs' folders; the server and the static file give the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.rollout.journal.reading import read_rollout
from agentrl.rollout.journal.records import RolloutRecord
from agentrl.viewer.content import Picture, content, served_png
from agentrl.viewer.index import Index
from agentrl.viewer.texts import Texts, tokenizer_places


class Shown:
    """The folders that a page shows. A *source* is the position of one among them.

    Args:
        paths: Runs' folders, or journals.
        tokenizer: Folder or name of the tokenizer; default: what the folder has, or that of the run's model.

    Raises:
        ConfigurationError: One is named twice, has no journal, or cannot be read.
    """

    def __init__(self, paths: Sequence[str | Path], tokenizer: str | None = None) -> None:
        if len({Path(path).resolve() for path in paths}) < len(paths):
            raise ConfigurationError("a run is named twice; name each folder once")
        self.indexes = [Index(path) for path in paths]
        self._texts = []
        for index in self.indexes:
            models = [str(run.info.get("model", "")) for run in index.runs()]
            self._texts.append(Texts([tokenizer] if tokenizer else tokenizer_places(index.path, models)))
        self._image = lru_cache(maxsize=64)(self._read_image)

    def read(self) -> None:
        """Read the lists now, so that the first page need not wait for them."""
        for index in self.indexes:
            index.changes()

    def close(self) -> None:
        """Close the journals."""
        for index in self.indexes:
            index.close()

    def runs(self) -> list[dict[str, Any]]:
        """All runs of all folders."""
        return [
            {
                "key": f"{source}.{run.id}",
                "source": source,
                "run": run.id,
                "folder": str(index.path),
                "started": run.started,
                "algorithm": str(run.info.get("algorithm", "")),
                "model": str(run.info.get("model", "")),
                "config": {name: str(value) for name, value in run.info.get("config", {}).items()},
            }
            for source, index in enumerate(self.indexes)
            for run in index.runs()
        ]

    def rollout(self, source: int, rank: int, number: int, *, full: bool = False) -> dict[str, Any] | None:
        """The content of a rollout, None if there is none."""
        record = self._record(source, rank, number)
        return None if record is None else content(record, full=full)

    def tokens(self, source: int, rank: int, number: int) -> dict[str, Any] | None:
        """The texts of a rollout's ids, None without a tokenizer."""
        record = self._record(source, rank, number)
        return None if record is None else self._texts[source].of_rows(record.trajectory().rows)

    def image(self, source: int, digest: str) -> bytes | None:
        """An image as PNG, None if there is none that can be shown."""
        return self._image(source, digest) if source < len(self.indexes) else None

    def _record(self, source: int, rank: int, number: int) -> RolloutRecord | None:
        if source >= len(self.indexes) or number >= 2**63:  # SQLite has no larger numbers
            return None
        index = self.indexes[source]
        with index.lock:
            connection = index.records.journals.get(rank)
            return None if connection is None else read_rollout(connection, number, rank=rank, image=Picture)

    def _read_image(self, source: int, digest: str) -> bytes | None:
        index = self.indexes[source]
        with index.lock:
            blob = index.records.image(digest)
        return None if blob is None else served_png(blob)
