"""What the readers of all syntaxes share: the text, a call as written, and the reasons why one cannot be read.

A reader is given a text and the place where a call opens. It returns the calls that stand there and where
they end, or raises `Unreadable`. Reading takes linear time because nobody looks for the same thing twice: a
`Text` remembers the outcome of each search, and a call that cannot be read is skipped up to its closing
marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_SHOWN = 200
"""Characters of an unreadable call that its error quotes."""
_SPACE = re.compile(r"\s*")


class WrittenCall(NamedTuple):
    """A call as the model wrote it.

    Attributes:
        name: The tool's name, "" where it is not known.
        arguments: The keyword arguments, {} where they cannot be read.
        error: Why the call cannot be run, None where it can.
        id: The name that the model gave to the call, None where it gave none; the template may show it again.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    id: str | None = None


class Unreadable(Exception):  # noqa: N818 (it never leaves the package)
    """A call that cannot be read; the text says why, as the end of a sentence."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


class Text:
    """A text with searches that remember their outcome, for places asked for in rising order."""

    __slots__ = ("_found", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[str | re.Pattern[str], tuple[int, int, Any]] = {}

    def find(self, literal: str, start: int) -> int:
        """Index of the first occurrence from `start` on, -1 where there is none."""
        known = self._found.get(literal)
        if known is not None and known[0] <= start <= known[1]:
            return int(known[2])
        index = self.text.find(literal, start)
        self._found[literal] = (start, len(self.text) if index == -1 else index, index)
        return index

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """The first match from `start` on; the pattern must not look behind."""
        known = self._found.get(pattern)
        if known is not None and known[0] <= start <= known[1]:
            return known[2]
        match = pattern.search(self.text, start)
        self._found[pattern] = (start, len(self.text) if match is None else match.start(), match)
        return match

    def skip_space(self, start: int) -> int:
        """The place of the first character from `start` on that is not white space."""
        match = _SPACE.match(self.text, start)
        return start if match is None else match.end()

    def after(self, literal: str, start: int) -> int:
        """The place after the literal, which has to stand at `start` or after white space.

        Raises:
            Unreadable: Something else stands there.
        """
        start = self.skip_space(start)
        if not self.text.startswith(literal, start):
            raise Unreadable(f"{literal} is missing")
        return start + len(literal)


Schemas = list[dict[str, Any]] | None
"""Tool schemas in OpenAI form, for syntaxes that write arguments without their types."""

Reader = Callable[[Text, re.Match[str], Schemas], tuple[list[WrittenCall], int]]
"""Reads what a match opened: the calls there, and the place after them. Raises `Unreadable`."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """A way to write calls.

    Attributes:
        opening: Pattern without groups of what a call begins with.
        read: Reads the call.
        closing: The literal after which reading goes on when a call cannot be read; where it is missing, the
            rest of the turn is taken to be that call. Nothing within a broken call may run as another one.
        reopening: Whether reading goes on in front of `closing` instead, because it opens the next call.
        framing: Tokens around calls and content that are neither.
    """

    opening: str
    read: Reader = field(compare=False)
    closing: str | None = None
    reopening: bool = False
    framing: tuple[str, ...] = ()

    def skip(self, text: Text, start: int) -> tuple[int, bool]:
        """Where to go on after a call that cannot be read, and whether it was closed."""
        index = -1 if self.closing is None else text.find(self.closing, start)
        if self.closing is None or index == -1:
            return len(text.text), False
        return index + (0 if self.reopening else len(self.closing)), True


def refused(reason: str, body: str, name: str = "") -> WrittenCall:
    """A call that cannot be run.

    Args:
        reason: Why, as the end of a sentence.
        body: Its text, quoted in the error.
        name: The tool's name, where it is known.

    Returns:
        The call with its error.
    """
    shown = body.strip()
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
    return WrittenCall(name, {}, f"This tool call cannot be read: {reason}." + (f" It was: {shown}" if shown else ""))
