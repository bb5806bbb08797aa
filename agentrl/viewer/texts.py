"""The text of token ids, where a tokenizer is at hand; nothing is downloaded for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from agentrl.types import Row

logger = logging.getLogger(__name__)


class Texts:
    """Decodes ids with the tokenizer of a run, loaded when it is first needed.

    Args:
        places: Folders or model names to look in, in order.
    """

    def __init__(self, places: Iterable[str | Path]) -> None:
        self._places = [str(place) for place in places]
        self._lock = threading.Lock()
        self._pieces: dict[int, str] = {}

    def of_rows(self, rows: Sequence[Row]) -> dict[str, Any] | None:
        """The text of every id that occurs, and of every row as a whole; None without a tokenizer.

        Returns:
            `pieces`: text by id; `exact`: of each row, the text of its ids, special tokens included.
        """
        with self._lock:
            tokenizer = self._tokenizer
            if tokenizer is None:
                return None
            known = self._pieces
            needed = {token for row in rows for token in (*row.prompt_ids, *row.completion_ids)}
            for token in needed - known.keys():
                known[token] = self._decode([token])
            exact = [self._decode([*row.prompt_ids, *row.completion_ids]) for row in rows]
            return {"pieces": {token: known[token] for token in sorted(needed)}, "exact": exact}

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError):  # ids of another tokenizer
            return "�"

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        for place in self._places:
            try:
                return AutoTokenizer.from_pretrained(place, local_files_only=True)
            except (OSError, ValueError, KeyError, ImportError) as error:
                logger.debug("no tokenizer in %s: %s", place, error)
        return None


def tokenizer_places(folder: Path, models: Iterable[str]) -> list[str | Path]:
    """Where the tokenizer of a run's folder may be: there, in its newest checkpoint, under its models' names."""
    folder = folder if folder.is_dir() else folder.parent
    saved = [file.parent for file in folder.glob("checkpoint-*/tokenizer_config.json")]
    newest = sorted(saved, key=lambda place: place.stat().st_mtime, reverse=True)[:1]
    here = [folder] if (folder / "tokenizer_config.json").exists() else []
    return [*here, *newest, *dict.fromkeys(model for model in models if model)]
