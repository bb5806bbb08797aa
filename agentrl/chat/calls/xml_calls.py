"""Calls written with a tag for each argument, whose values are bare text.

The values' types come from the tool's schema, see `argument_types`. A value goes on to the closing tag that
is followed by the next argument or by the end of the call, so it may hold any other tag.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from agentrl.chat.calls.argument_types import argument_schemas, typed
from agentrl.chat.calls.reading import Schemas, Syntax, Text, Unreadable, WrittenCall
from agentrl.chat.calls.values import check_value


class _Tags(NamedTuple):
    """How one argument is written.

    Attributes:
        opening: What stands in front of the value; its group is the name.
        end: The tag behind it, for messages.
        closing: That tag, where the next argument or the end of the call follows.
        framed: Whether the tags put a newline on each side of the value.
    """

    opening: re.Pattern[str]
    end: str
    closing: re.Pattern[str]
    framed: bool = True


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETERS = _Tags(
    re.compile(r"<parameter=([^<>\n]+)>"),
    "</parameter>",
    re.compile(r"</parameter>\s*(?=<parameter=|</function>)"),
)


def _read_xml(text: Text, opened: re.Match[str], tools: Schemas) -> tuple[list[WrittenCall], int]:
    function = _FUNCTION.match(text.text, opened.end())
    if function is None:
        raise Unreadable("it does not begin with <function=name>")
    name = function.group(1).strip()
    arguments, position = _arguments(text, function.end(), name, tools, _PARAMETERS)
    if not text.text.startswith("</function>", position):
        raise Unreadable("</function> is missing", name)
    stop = text.skip_space(position + len("</function>"))
    return [WrittenCall(name, arguments)], stop if stop == len(text.text) else text.after("</tool_call>", stop)


XML = Syntax("<tool_call>", _read_xml, "</tool_call>")

_BEAM_PARAMETERS = _Tags(
    re.compile(r'\s*<rfl:parameter name="([^"<>\n]+)">'),
    "</rfl:parameter>",
    re.compile(r"</rfl:parameter>\s*(?=<rfl:parameter name=|<\|(?:call|end|return|start)\|>|\Z)"),
)


def read_beam_arguments(text: Text, start: int, name: str, tools: Schemas) -> tuple[dict[str, Any], int]:
    """Read the arguments in a message of Beam to a tool, and give the place after them.

    Raises:
        Unreadable: One is not closed, or its value cannot be read.
    """
    return _arguments(text, start, name, tools, _BEAM_PARAMETERS)


_GLM_NAME = re.compile(r"\s*([^\s<>]+)\s*")
_GLM_ARGUMENTS = _Tags(
    re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)"),
    framed=False,
)


def _read_glm(text: Text, opened: re.Match[str], tools: Schemas) -> tuple[list[WrittenCall], int]:
    named = _GLM_NAME.match(text.text, opened.end())
    if named is None:
        raise Unreadable("it does not begin with the name of a tool")
    name = named.group(1)
    arguments, position = _arguments(text, named.end(), name, tools, _GLM_ARGUMENTS)
    if not text.text.startswith("</tool_call>", position):
        raise Unreadable("</tool_call> is missing", name)
    return [WrittenCall(name, arguments)], position + len("</tool_call>")


GLM = Syntax("<tool_call>", _read_glm, "</tool_call>")


def _arguments(text: Text, position: int, name: str, tools: Schemas, tags: _Tags) -> tuple[dict[str, Any], int]:
    """Read the arguments of a call, and give the place after the last one."""
    schemas, arguments = argument_schemas(name, tools), {}
    while (opened := tags.opening.match(text.text, position)) is not None:
        closed = text.search(tags.closing, opened.end())
        if closed is None:
            raise Unreadable(f"the argument {opened.group(1)!r} is not closed by {tags.end}", name)
        key, value = opened.group(1).strip(), text.text[opened.end() : closed.start()]
        arguments[key] = _typed(_unframed(value) if tags.framed else value, schemas.get(key), name)
        position = closed.end()
    return arguments, position


def _unframed(value: str) -> str:
    """A value without the one newline that its tags put on each side."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: Any, name: str) -> Any:
    try:
        check_value(value, value, 0, len(value))
        return typed(value, schema)
    except Unreadable as error:
        raise Unreadable(str(error), name) from error
