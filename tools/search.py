"""Full-text search over a folder of text files.

The index is SQLite's FTS5 with BM25 ranking. It is part of Python, so nothing has to be installed, and it finds word
forms (the Porter stemmer). Packages for this (bm25s, tantivy) are for millions of passages, kept between runs.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.errors import ConfigurationError

MAX_FILE = 4 * 2**20
"""Bytes of the largest file that is indexed."""

PASSAGE = 1200
"""Characters of a passage, the unit that is found; it ends with a paragraph where it can."""

MAX_RESULTS = 20

COLUMNS = "text, path UNINDEXED, tokenize='porter unicode61'"


class SearchTool:
    """Searches the text files of a folder. One instance serves all rollouts.

    Args:
        folder: What is searched, with its subfolders. Links that lead out of it are not followed.
        patterns: Names of the files that are indexed.
        max_characters: Most characters of an answer.

    Raises:
        ConfigurationError: There is no such folder, or no such file in it, or this SQLite has no FTS5.
    """

    __name__ = "search"

    def __init__(
        self, folder: Path | str, *, patterns: Sequence[str] = ("*.txt", "*.md"), max_characters: int = 8000
    ) -> None:
        self._folder = Path(folder).resolve()
        self._max_characters = max_characters
        self._lock = threading.Lock()
        if not self._folder.is_dir():
            raise ConfigurationError(f"there is no folder {folder} to search")
        try:
            self._index = sqlite3.connect(":memory:", check_same_thread=False)
            self._index.execute(
                "CREATE VIRTUAL TABLE passages USING fts5(text, path UNINDEXED, tokenize='porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            raise ConfigurationError(f"this Python's SQLite cannot search text ({error}); it needs FTS5") from error
        self._index.executemany("INSERT INTO passages VALUES (?, ?)", self._passages(patterns))
        (self.size,) = self._index.execute("SELECT count(*) FROM passages").fetchone()
        if not self.size:
            raise ConfigurationError(f"the folder {folder} has no text files called {' or '.join(patterns)}")

    def __call__(self, query: str, results: int = 5) -> str:
        """Search the documents for words.

        Args:
            query: The words to look for; passages with more of the rarer ones come first.
            results: How many passages to show.

        Returns:
            The passages with the files they are from.
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise ValueError("the query has no words")
        # Quoted, so that nothing in it is an operator of the query language.
        match = " OR ".join(f'"{word}"' for word in words[:64])
        command = "SELECT path, text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?"
        with self._lock:
            found = self._index.execute(command, (match, max(1, min(results, MAX_RESULTS)))).fetchall()
        answer = "\n\n".join(f"{path}:\n{text}" for path, text in found) or "nothing was found"
        return answer if len(answer) <= self._max_characters else answer[: self._max_characters] + " [cut]"

    def _passages(self, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
        paths = {path for pattern in patterns for path in self._folder.rglob(pattern)}
        for path in sorted(paths):
            if not path.resolve().is_relative_to(self._folder) or not path.is_file() or path.stat().st_size > MAX_FILE:
                continue
            name = path.relative_to(self._folder).as_posix()
            for passage in _split(path.read_text(encoding="utf-8", errors="replace")):
                yield passage, name


def _split(text: str) -> Iterator[str]:
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if passage and len(passage) + len(paragraph) > PASSAGE:
            yield passage
            passage = ""
        passage = f"{passage}\n\n{paragraph.strip()}".strip()
        while len(passage) > PASSAGE:
            yield passage[:PASSAGE]
            passage = passage[PASSAGE:]
    if passage:
        yield passage
