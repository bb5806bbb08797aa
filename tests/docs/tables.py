"""Tables of the documentation that tests write, between two marks of a page."""

from __future__ import annotations

from pathlib import Path


def split(text: str, begin: str, end: str) -> tuple[str, str, str]:
    """Split a page around a table; the marks stay with what is around it."""
    before, _, rest = text.partition(begin)
    known, _, after = rest.partition(end)
    return before + begin, known, end + after


def write(page: Path, begin: str, end: str, table: str) -> None:
    """Put a table into its page."""
    before, _, after = split(page.read_text(encoding="utf-8"), begin, end)
    page.write_text(f"{before}\n{table}\n{after}", encoding="utf-8")
