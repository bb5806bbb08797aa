"""Calls written as Python: `[f(a=1), g(b='x')]`.

The notation is read by transformers' `python-call-list` parser, whose grammar is literals only (strings,
numbers, lists, dicts, `True`, `False`, `None`, and JSON's words for them), nested at most 100 levels deep.
Nothing is evaluated. Here is only what finds the end of a list, which that parser has to be given.
"""

from __future__ import annotations

import re

from transformers.utils.chat_parsing.content_parsers import parse_content

from agentrl.chat.calls.reading import Schemas, Syntax, Text, Unreadable, WrittenCall

# A string, a bracket, or what ends the search: a quote that opens a string without an end, a backslash outside of
# a string, the marker behind a call. Without the last two, a row of broken calls could take quadratic time.
_TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"()\[\]{}]|\\|<\|tool_call_end\|>|</code>""", re.DOTALL)
_POSITION = re.compile(r"python-call-list: (.*?)\.\nContent: ", re.DOTALL)
_NAME = re.compile(r"\s*([^\W\d]\w*(?:[-.]\w+)*)\s*\(")


def _list_end(text: str, start: int) -> int:
    """The place after the list or the parenthesis that opens at or after `start`.

    Raises:
        Unreadable: It has no end.
    """
    depth = 0
    for token in _TOKENS.finditer(text, start):
        character = token.group()
        if character in ("(", "[", "{"):
            depth += 1
        elif character in (")", "]", "}"):
            depth -= 1
        elif character in ("'", '"'):
            raise Unreadable("it is cut off within a string")
        elif character[0] not in "'\"":
            break
        if depth == 0:
            return token.end()
    raise Unreadable("it is cut off: a bracket is not closed")


def _calls(listed: str) -> list[WrittenCall]:
    """Read a list of calls."""
    try:
        calls = parse_content(listed, "python-call-list", {})
    except RecursionError as error:
        raise Unreadable("its lists and objects are nested too deeply") from error
    except ValueError as error:
        reason = _POSITION.match(str(error))
        raise Unreadable(f"it is not a list of calls ({reason.group(1) if reason else 'not valid'})") from error
    if not calls:
        raise Unreadable("it is an empty list")
    return [WrittenCall(call["name"], call["arguments"]) for call in calls]


def _read_bare(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
    start = text.skip_space(opened.start())
    stop = _list_end(text.text, start)
    return _calls(text.text[start:stop]), stop


# Brackets occur in prose too: a call list stands at the start of a line and begins with a call by keyword.
PYTHONIC = Syntax(
    r"(?:\A|(?<=[\n>]))[ \t]*\[\s*[^\W\d]\w*(?:[-.]\w+)*\(\s*(?:\)|[^\W\d]\w*\s*=(?!=))",
    _read_bare,
    framing=("<|python_start|>", "<|python_end|>"),
)


def _read_lfm2(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
    start = text.skip_space(opened.end())
    if not text.text.startswith("[", start):
        raise Unreadable("it does not begin with [")
    stop = _list_end(text.text, start)
    calls = _calls(text.text[start:stop])
    stop = text.skip_space(stop)
    return calls, stop if stop == len(text.text) else text.after("<|tool_call_end|>", stop)


LFM2 = Syntax(r"<\|tool_call_start\|>", _read_lfm2, "<|tool_call_end|>")


def _read_code(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
    calls, position = [], opened.end()
    while (named := _NAME.match(text.text, position)) is not None:
        position = _list_end(text.text, named.end() - 1)
        calls += _calls(f"[{text.text[named.start() : position].strip()}]")
        position += text.text.startswith(";", position)
    if not calls:
        raise Unreadable("it does not begin with a call f(name=value)")
    return calls, text.after("</code>", position)


PYTHON_TAGS = Syntax("<code>", _read_code, "</code>")
