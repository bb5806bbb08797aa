"""Types for arguments that a syntax writes as bare text, from the tool's JSON schema.

A string stays exactly the text, white space included. Another type is read from the text without white space
at its ends, as JSON writes it or, for `True`, `False` and `None`, as Python does. Where several types are
allowed, string is the last to be tried. A text that fits no type stays a string, for the tool's check to
refuse by name. Without a known type, what is JSON other than a string is that value, and the rest is text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.chat.calls.reading import Schemas, Text, Unreadable
from agentrl.chat.calls.values import read_json

_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def argument_schemas(name: str, tools: Schemas) -> dict[str, Any]:
    """The schemas of a tool's arguments.

    Args:
        name: The tool's name.
        tools: Tool schemas in OpenAI form.

    Returns:
        Argument names to schemas; empty where the tool is not known.
    """
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """Give an argument its type.

    Args:
        text: As the model wrote it, without the framing of the syntax.
        schema: The JSON schema of the argument, None where there is none.

    Returns:
        The value.

    Raises:
        Unreadable: A list or an object is nested too deeply.
    """
    types = json_types(schema)
    bare = text.strip()
    if bare in _WORDS:
        word = _WORDS[bare]
        wanted = "null" if word is None else "boolean"
        return word if wanted in types or not types else text
    for known, pattern, read in (("integer", _INTEGER, _integer), ("number", _NUMBER, _number)):
        if (known in types or not types) and pattern.fullmatch(bare):
            try:
                return read(bare)
            except (ValueError, OverflowError):  # more digits than Python reads
                return text
    if bare[:1] in ("[", "{") and (not types or types & {"array", "object"}):
        return _structure(text, types)
    return text


def json_types(schema: Any) -> set[str]:
    """The JSON types that a schema allows at its top level.

    Args:
        schema: A JSON schema, or anything else that stands in its place.

    Returns:
        Names of types; empty where any is allowed.
    """
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else {item for item in declared or () if isinstance(item, str)}
    for choices in ("anyOf", "oneOf"):
        for choice in schema.get(choices) or ():
            types |= json_types(choice)
    if not types:
        types = {_type_of(value) for value in schema.get("enum") or ()}
    if types and schema.get("nullable"):  # how `get_json_schema` marks what may be None
        types.add("null")
    return types


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _integer(text: str) -> int:
    return int(text.partition(".")[0])


def _number(text: str) -> float | int:
    number = json.loads(text)
    if number in (float("inf"), float("-inf")):
        raise OverflowError(text)
    return number


def _structure(text: str, types: set[str]) -> Any:
    """A list or an object, or the text itself where it is neither."""
    source = Text(text)
    try:
        value, stop = read_json(source, 0)
    except Unreadable as error:
        if "nested" in str(error):
            raise
        return text
    if source.skip_space(stop) != len(text) or (types and _type_of(value) not in types):
        return text
    return value
