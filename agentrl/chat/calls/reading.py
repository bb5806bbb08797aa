"""What the readers of all syntaxes share: the text, a call as written, and the reasons why one cannot be read.

A reader is given a text and the place where a call opens. It returns the calls that stand there and where
they end, or raises `Unreadable`. Reading takes linear time because nobody looks for the same thing twice: a
`Text` remembers the outcome of each search, and a call that cannot be read is skipped up to its closing
marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 100
"""Levels of lists and objects within arguments; the renderers of templates and journals recurse."""
_SHOWN = 200
"""Characters of an unreadable call that its error quotes."""
_WINDOW = 4096
"""Characters of JSON to try first: an error of the decoder counts the lines of all that it was given."""
_LONGEST_WORD = len("-Infinity")
_SPACE = re.compile(r"\s*")
_BRACKETS = re.compile(r"[\[{]")
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as the model wrote it.

    Attributes:
        name: The tool's name, "" where it is not known.
        arguments: The keyword arguments, {} where they cannot be read.
        error: Why the call cannot be run, None where it can.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None


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


def read_json(text: Text, start: int) -> tuple[Any, int]:
    """Read one JSON value, which may follow white space.

    Args:
        text: The text.
        start: Where to begin.

    Returns:
        The value and the place after it.

    Raises:
        Unreadable: There is no valid JSON, or it is nested deeper than `MAX_DEPTH`.
    """
    start = text.skip_space(start)
    window = _WINDOW
    while True:
        piece = text.text[start : start + window]
        rest = start + window < len(text.text)
        try:
            value, stop = _decode(piece)
        except json.JSONDecodeError as error:
            cut = error.pos > len(piece) - _LONGEST_WORD or error.msg.startswith("Unterminated")
            if not (cut and rest):
                why = "its JSON is cut off" if cut else "it is not valid JSON"
                raise Unreadable(f"{why} ({error.msg} at character {error.pos})") from error
        except RecursionError as error:
            raise Unreadable(_too_deep()) from error
        except ValueError as error:
            raise Unreadable(f"it holds a number that cannot be read ({error})") from error
        else:
            if stop < len(piece) or not rest:
                check_value(value, piece, 0, stop)
                return value, start + stop
        window *= 4


def check_value(value: Any, text: str, start: int, stop: int) -> None:
    """Refuse what is no text or breaks those who read arguments recursively.

    Args:
        value: A decoded value.
        text: The text that it stands in.
        start: Where its own text begins.
        stop: Where it ends.

    Raises:
        Unreadable: It is nested deeper than `MAX_DEPTH`, or holds half a surrogate pair.
    """
    # Both checks are needed seldom; what is cheap to see in the text is looked for first.
    if text.count("[", start, stop) + text.count("{", start, stop) > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Unreadable(_too_deep())
    if _HALF_CHARACTER.search(text, start, stop) is not None and not _encodable(value):
        raise Unreadable("it has an escape that stands for half a character")


def call_from_json(value: Any, names: tuple[str, ...], arguments: tuple[str, ...]) -> WrittenCall:
    """Make a call of an object that holds a name and arguments.

    Args:
        value: What was decoded.
        names: Keys that may hold the name, the first one present counts.
        arguments: Keys that may hold the arguments.

    Returns:
        The call; with `error` set where something is missing.
    """
    if not isinstance(value, dict):
        return refused(f"it is not an object with `{names[0]}` and `{arguments[0]}`", _shown(value))
    name = next((value[key] for key in names if key in value), None)
    if not isinstance(name, str) or not name:
        return refused(f"it has no `{names[0]}` that is a string", _shown(value))
    given = arguments_from_json(next((value[key] for key in arguments if key in value), None))
    if given is None:
        return refused(f"its `{arguments[0]}` are missing or not an object", _shown(value), name)
    return WrittenCall(name, given)


def arguments_from_json(value: Any) -> dict[str, Any] | None:
    """Arguments as an object; those written as a JSON string are decoded again, at most twice.

    Args:
        value: What was decoded.

    Returns:
        The arguments, None where it is something else.
    """
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = read_json(Text(value), 0)[0]
        except Unreadable:
            return None
    return value if isinstance(value, dict) else None


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


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _too_deep() -> str:
    return f"its lists and objects are nested more than {MAX_DEPTH} levels deep"


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
    return depth


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
