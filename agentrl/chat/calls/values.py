"""JSON within a turn: values read where they stand, and the calls that they hold."""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.chat.calls.reading import Text, Unreadable, WrittenCall, refused

MAX_DEPTH = 100
"""Levels of lists and objects within arguments; the renderers of templates and journals recurse."""
_WINDOW = 4096
"""Characters of JSON to try first: an error of the decoder counts the lines of all that it was given."""
_LONGEST_WORD = len("-Infinity")
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")

_decode = json.JSONDecoder().raw_decode


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
    name = _first(value, names)
    if not isinstance(name, str) or not name:
        return refused(f"it has no `{names[0]}` that is a string", _shown(value))
    given = arguments_from_json(_first(value, arguments))
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


def _first(value: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """What the first key that is present holds, None where none is."""
    for key in keys:
        if key in value:
            return value[key]
    return None


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
