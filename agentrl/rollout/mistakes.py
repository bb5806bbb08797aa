"""What is wrong with a call that the model wrote.

Arguments are checked against the schema, not converted: names, and the type of each value as JSON has it (an
integer may be written `3.0`; null is fine for what may be left out; the inside of lists and objects is the
tool's own affair).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentrl.types import ToolCall


def mistake_of(written: ToolCall, schema: Mapping[str, Any] | None, names: Iterable[str]) -> str | None:
    """What is wrong with a call, or None.

    Args:
        written: The call.
        schema: The schema of the tool it names, None if there is no such tool.
        names: Those of all tools.
    """
    if written.error is not None:
        return written.error
    if schema is None:
        return f"there is no tool named {written.name!r}; the tools are: {', '.join(names) or 'none'}"
    parameters = schema["function"]["parameters"]
    properties, required = parameters["properties"], parameters.get("required", ())
    wrong = [f"the argument {name!r} is missing" for name in required if name not in written.arguments]
    for name, value in written.arguments.items():
        if name not in properties:
            wrong.append(f"there is no argument {name!r}")
        elif not (_fits(value, properties[name]) or (value is None and name not in required)):
            wrong.append(f"the argument {name!r} must be {_wanted(properties[name])}, not {reprlib.repr(value)}")
    if not wrong:
        return None
    takes = ", ".join(f"{name} ({_wanted(schema)})" for name, schema in properties.items())
    return f"{written.name}: {'; '.join(wrong)}. It takes: {takes or 'no arguments'}"


_JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _JSON_TYPES["number"](value) and value == value // 1,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of the JSON type that its schema asks for; types unknown to JSON fit anything."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    names = schema.get("type", "any")
    return any(
        name not in _JSON_TYPES or _JSON_TYPES[name](value) for name in (names if isinstance(names, list) else [names])
    )


def _wanted(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_wanted(option) for option in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    names = schema.get("type", "any")
    return " or ".join(names) if isinstance(names, list) else str(names)
