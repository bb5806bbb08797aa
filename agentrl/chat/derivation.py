"""Which format a chat template's model writes: the tokenizer's own word, the family's, or one found by rendering.

A template of no known family is asked: it renders calls with known names and arguments, and a format is
chosen only if it reads back exactly those. The published syntaxes are tried first, then JSON objects between
whatever markers the template writes.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.chat.families import Family
from agentrl.chat.formats import CallSyntax, JsonCalls, Reasoning, TurnFormat
from agentrl.chat.messages import REASONING_FIELDS
from agentrl.chat.parsing import parse_turn
from agentrl.chat.prefix import Render, tool_call
from agentrl.chat.response_templates import ResponseFormat, load_format
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.types import Message

logger = logging.getLogger(__name__)

_QUESTION: Message = {"role": "user", "content": "probe"}
_NAMES = ("probe_first", "probe_second")
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"text": "a value, with: some {signs}", "count": 7},
    {"text": "Zürich", "items": [1, {"deep": "x"}]},
)
_THOUGHT = re.compile(r"(<[^<>\s]+>|\[\w+\])\s*probe_thought\s*(<[^<>\s]+>|\[/?\w+\])")
_TYPES = {"text": "string", "count": "integer", "items": "array"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": _TYPES[key], "description": "It."} for key in arguments},
                "required": [*arguments],
            },
        },
    }
    for name, arguments in zip(_NAMES, _ARGUMENTS, strict=True)
]


def find_format(
    template: Template, end_of_turn: str | None, family: Family | None
) -> TurnFormat | ResponseFormat | None:
    """Find how the model of a template writes a turn.

    Args:
        template: The template in use; its tokenizer may bring a `response_template`.
        end_of_turn: The text that ends a turn, None where the next role's marker does.
        family: The family of the model's own template, None where it is not known.

    Returns:
        The tokenizer's own format, else the family's, else one that reads what the template renders (this is
        logged), else None.

    Raises:
        TemplateError: The tokenizer's `response_template` is not valid, or it has a `response_schema`.
    """
    if getattr(template.tokenizer, "response_schema", None) is not None:
        raise TemplateError(
            "`tokenizer.response_schema` is not read: transformers has replaced it by "
            "`tokenizer.response_template`. Set that, and delete `response_schema`."
        )
    own = getattr(template.tokenizer, "response_template", None)
    if own is not None:
        return load_format(own)
    if family is not None:
        return family.format
    derived = derive_format(template.render, end_of_turn)
    if derived is not None:
        logger.warning("the chat template is of no known family; its calls are read as %s", _described(derived))
    return derived


def derive_format(render: Render, end_of_turn: str | None) -> TurnFormat | None:
    """Find the format that reads back the calls which a template renders.

    Args:
        render: The chat template.
        end_of_turn: The text that ends a turn.

    Returns:
        A format, or None where none reads the calls, or the template writes none.
    """
    for count in (2, 1):  # some templates write one call a turn
        turn = _render_turn(render, count, end_of_turn)
        if turn is None:
            continue
        reasoning = _reasoning(render)
        for calls in _candidates(turn):
            form = TurnFormat(calls, reasoning)
            if _reads_back(form, turn, count):
                return form
    return None


def _render_turn(render: Render, count: int, end_of_turn: str | None) -> str | None:
    """A turn of the assistant that holds calls, without what ends it; None where the template cannot write it."""
    calls = [tool_call(index, _NAMES[index], _ARGUMENTS[index]) for index in range(count)]
    try:
        asked = render([_QUESTION], _TOOLS, True)
        called = render([_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}], _TOOLS, False)
        question = render([_QUESTION], _TOOLS, False)
    except TemplateError:
        return None
    turn = called.removeprefix(question)
    if turn == called or _NAMES[0] not in turn:
        return None
    header = asked.removeprefix(question)
    if not turn.startswith(header):  # the generation prompt opens reasoning that the finished turn lacks
        header = header.partition(Reasoning().opening)[0]
    turn = turn.removeprefix(header)
    return turn.partition(end_of_turn)[0] if end_of_turn else turn


def _candidates(turn: str) -> Iterator[CallSyntax | JsonCalls]:
    yield from CallSyntax
    between_markers = _json_between_markers(turn)
    if between_markers is not None:
        yield between_markers


def _reads_back(form: TurnFormat, turn: str, count: int) -> bool:
    parsed = parse_turn(turn, form, prompt="", tools=_TOOLS)
    expected = [(_NAMES[index], _ARGUMENTS[index], None) for index in range(count)]
    read = [(call.name, call.arguments, call.error) for call in parsed.calls]
    # A marker that is left over as content belongs to another syntax.
    return read == expected and not parsed.message["content"]


def _reasoning(render: Render) -> Reasoning:
    """What a template writes around reasoning, and the field from which it prints it."""
    for field in REASONING_FIELDS:
        turn = {"role": "assistant", "content": "answer", field: "probe_thought"}
        try:
            text = render([_QUESTION, turn], None, False)
        except TemplateError:
            continue
        if "probe_thought" in text:
            tags = _THOUGHT.search(text)
            return Reasoning(field=field) if tags is None else Reasoning(tags.group(1), tags.group(2), field)
    return Reasoning()


@dataclass(frozen=True, slots=True)
class _RenderedCall:
    start: int
    stop: int
    name_key: str
    arguments_key: str


def _json_between_markers(turn: str) -> JsonCalls | None:
    """The markers around the JSON objects of two calls."""
    first, second = (_find_call(turn, name) for name in _NAMES)
    if first is None or second is None:
        return None
    close = turn[second.stop :].strip()
    between = turn[first.stop : second.start].strip()
    opening = between.removeprefix(close).strip()
    if not close or not opening or not turn[: first.start].rstrip().endswith(opening):
        return None
    return JsonCalls(opening, close, first.name_key, first.arguments_key)


def _find_call(text: str, name: str) -> _RenderedCall | None:
    """Find the JSON object that holds the name of a call."""
    decoder = json.JSONDecoder()
    start = text.find(json.dumps(name))
    while start != -1 and (start := text.rfind("{", 0, start)) != -1:
        try:
            value, stop = decoder.raw_decode(text, start)
        except ValueError:
            continue
        names = [key for key, item in value.items() if item == name]
        arguments = [key for key, item in value.items() if isinstance(item, dict)]
        if len(names) == 1 and len(arguments) == 1:
            return _RenderedCall(start, stop, names[0], arguments[0])
    return None


def _described(form: TurnFormat) -> str:
    if isinstance(form.calls, JsonCalls):
        return f"JSON objects between {form.calls.opening!r} and {form.calls.closing!r}"
    return f"calls of the syntax {form.calls.value!r}" if form.calls is not None else "nothing"
