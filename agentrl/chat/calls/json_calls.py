"""Calls written as JSON: objects within markers, bare objects, and objects of arguments after a name.

JSON is read by a decoder that knows where a value ends, so a closing marker within a string closes nothing.
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.chat.calls.reading import Schemas, Syntax, Text, Unreadable, WrittenCall, refused
from agentrl.chat.calls.values import arguments_from_json, call_from_json, read_json


def tagged(
    opening: str,
    closing: str,
    names: tuple[str, ...] = ("name",),
    arguments: tuple[str, ...] = ("arguments",),
    framing: tuple[str, ...] = (),
    ids: tuple[str, re.Pattern[str]] | None = None,
) -> Syntax:
    """The syntax of JSON objects, or lists of them, between two literal markers.

    The last call of a turn need not be closed: what matters is whether its JSON is complete. An empty list, which
    SmolLM2's prompt asks for where nothing is to be called, holds no calls.

    Args:
        opening: The marker in front.
        closing: The marker behind.
        names: Keys that may hold the name of the tool.
        arguments: Keys that may hold the arguments.
        framing: Tokens around content that are no content.
        ids: The key that may hold the name of a call, and what is one; None where calls have none.

    Returns:
        The syntax.
    """

    def read(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
        value, stop = read_json(text, opened.end())
        items = value if isinstance(value, list) else [value]
        calls = [call_from_json(item, names, arguments) for item in items]
        if ids is not None:
            calls = [_identified(call, item, *ids) for call, item in zip(calls, items, strict=True)]
        stop = text.skip_space(stop)
        if stop == len(text.text):
            return calls, stop
        return calls, text.after(closing, stop)

    return Syntax(re.escape(opening), read, closing, framing=framing)


def _identified(call: WrittenCall, item: Any, key: str, pattern: re.Pattern[str]) -> WrittenCall:
    """The call with the id that its object has, if that is one: of others a template would raise, or show nothing."""
    written = item.get(key) if isinstance(item, dict) else None
    known = isinstance(written, str) and pattern.fullmatch(written) is not None
    return call._replace(id=written) if known else call


def _read_llama(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
    start = opened.start() if text.text[opened.start()] == "{" else opened.end()
    value, stop = read_json(text, start)
    stop = text.skip_space(stop)
    stop += text.text.startswith(";", stop)
    return [call_from_json(value, ("name", "function"), ("parameters", "arguments"))], stop


# Another object is an answer in JSON. A call is recognised by its first keys, which the prompt dictates.
LLAMA = Syntax(
    r'<\|python_tag\|>|\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"[^"]*"\s*,'
    r'\s*"(?:parameters|arguments)"\s*:',
    _read_llama,
)

_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\])?")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


def _read_mistral(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
    named = _MISTRAL_NAME.match(text.text, opened.end())
    if named is None:
        try:
            value, stop = read_json(text, opened.end())
        except Unreadable as error:
            # The list holds all calls of the turn: another marker stands within it, and opens nothing.
            return [refused(str(error), text.text[opened.end() :])], len(text.text)
        items = value if isinstance(value, list) and value else [value]
        calls = [call_from_json(item, ("name",), ("arguments",)) for item in items]
        return [_identified(call, item, "id", _MISTRAL_ID) for call, item in zip(calls, items, strict=True)], stop
    calls, stop = _named(text, named.group(1), named.end())
    return [_identified(call, {"id": named.group(2)}, "id", _MISTRAL_ID) for call in calls], stop


MISTRAL = Syntax(r"\[TOOL_CALLS\]", _read_mistral, "[TOOL_CALLS]", reopening=True)

_SEPARATOR, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"\s*([^\s`{}]+)\s*```json\s*")


def _read_deepseek(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
    separator, end = text.find(_SEPARATOR, opened.end()), text.find(_CALL_END, opened.end())
    if separator == -1 or -1 < end < separator:
        raise Unreadable(f"{_SEPARATOR} is missing")
    start = separator + len(_SEPARATOR)
    fenced = _FENCED.match(text.text, start)
    if fenced is None:  # V3.1
        calls, stop = _named(text, text.text[opened.end() : separator].strip(), start)
    else:
        calls, stop = _named(text, fenced.group(1), fenced.end())
        stop = text.after("```", stop)
    stop = text.skip_space(stop)
    return calls, stop if stop == len(text.text) else text.after(_CALL_END, stop)


DEEPSEEK = Syntax(
    "<｜tool▁call▁begin｜>", _read_deepseek, _CALL_END, framing=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
)


def _named(text: Text, name: str, start: int) -> tuple[list[WrittenCall], int]:
    """Read the object of arguments of a call whose name is known."""
    if not name:
        raise Unreadable("it has no name")
    try:
        value, stop = read_json(text, start)
    except Unreadable as error:
        raise Unreadable(str(error), name) from error
    arguments = arguments_from_json(value)
    if arguments is None:
        return [refused("its arguments are not an object", text.text[start:stop], name)], stop
    return [WrittenCall(name, arguments)], stop
