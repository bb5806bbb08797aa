"""Formats that a tokenizer brings along: transformers' response templates, also for calls that cannot be read.

transformers parses a whole turn or raises. Here the same template also exists in a raw form that hands out
the text of each call undecoded, so that one bad call costs only itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from agentrl.chat.calls.reading import Schemas, Unreadable, WrittenCall, refused
from agentrl.chat.calls.values import arguments_from_json, check_value
from agentrl.chat.messages import REASONING_FIELDS
from agentrl.errors import TemplateError

_BODY = "agentrl_body"
_PIECE = 4096


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A response template in the forms that parsing needs.

    Attributes:
        typed: As given; parses calls to dicts.
        raw: The same, with `tool_calls` holding the text of each call and all pieces of content kept.
        calls: The field of the calls, None where the model writes none.
        reasoning: The name of the field with the reasoning, None where there is none.
    """

    typed: ResponseTemplate
    raw: ResponseTemplate
    calls: ResponseTemplateField | None
    reasoning: str | None


def load_format(response_template: dict[str, Any]) -> ResponseFormat:
    """Prepare a response template.

    Args:
        response_template: A template in transformers' form.

    Returns:
        The format.

    Raises:
        TemplateError: transformers does not accept the template.
    """
    try:
        typed = load_response_template(response_template)
    except ValueError as error:
        raise TemplateError(f"`tokenizer.response_template` is not valid: {error}") from error
    fields = dict(typed.fields)
    calls = fields.get("tool_calls")
    if calls is not None:
        fields["tool_calls"] = replace(
            calls,
            content="text",
            content_args={"strip": False},
            repeats=True,
            join=None,
            transform={_BODY: "{content}"} | {name: f"{{{name}}}" for name in _captures(calls)},
            transform_each=False,
        )
    content = fields.get("content")
    if content is not None and content.content == "text" and not content.repeats:
        # Without this, text after a call replaces the text before it.
        fields["content"] = replace(content, repeats=True, join="\n")
    reasoning = next((name for name in REASONING_FIELDS if name in fields), None)
    return ResponseFormat(typed, replace(typed, fields=fields), calls, reasoning)


def _captures(field: ResponseTemplateField) -> set[str]:
    """The named groups of a field's markers that its transform uses."""
    groups: set[str] = set()
    for pattern in (field.open_re, field.close_re):
        groups |= set(pattern.groupindex) if pattern is not None else set()
    used = set(re.findall(r"\{(\w+)", json.dumps(field.transform)))
    return groups & used


def read_by_template(
    text: str, form: ResponseFormat, prompt: str, tools: Schemas
) -> tuple[dict[str, Any], list[WrittenCall]]:
    """Take a turn apart.

    Args:
        text: The turn without its stop token.
        form: The format.
        prompt: The generation prompt in front of it.
        tools: Tool schemas, for arguments that are written as bare text.

    Returns:
        The fields of the message, content being a string, and the calls.
    """
    prompt += _unopened_reasoning(text, form, prompt)
    fields, reasoned = _split(text, form, prompt)
    calls = _read_calls(text, form, prompt, tools, fields.pop("tool_calls", []))
    content = fields.get("content")
    fields["content"] = content.strip() if isinstance(content, str) else ""
    if reasoned and form.reasoning is not None:
        fields.setdefault(form.reasoning, "")
    return fields, calls


def _unopened_reasoning(text: str, form: ResponseFormat, prompt: str) -> str:
    """The tag that is missing in front of a turn which closes reasoning it never opened, else nothing."""
    field = form.raw.fields[form.reasoning] if form.reasoning is not None else None
    if field is None or not field.open_literals or not field.close_literals:
        return ""
    opening, closing = field.open_literals[0], field.close_literals[0]
    close = text.find(closing)
    if close == -1 or opening in text[:close] or prompt.rfind(opening) > prompt.rfind(closing):
        return ""
    call = form.calls.open_re.search(text, endpos=close) if form.calls is not None else None
    return opening if call is None else ""


def _split(text: str, form: ResponseFormat, prompt: str) -> tuple[dict[str, Any], bool]:
    """The fields of a turn with raw calls, and whether it has a reasoning block."""
    try:
        parser = ResponseParser(form.raw, prefix=prompt)
        events = parser.initial_events
        # The parser looks for every marker up to the end of what it has; in pieces it takes linear time.
        for start in range(0, len(text), _PIECE):
            events += parser.feed(text[start : start + _PIECE])
        fields, last = parser.finalize()
    except (ValueError, KeyError):
        # Only a template of the user's own can demand a field; then the turn is content and nothing else.
        return {"content": text}, False
    opened = (event["field"] for event in (*events, *last) if event["type"] == "region_open")
    return fields, form.reasoning in opened


def _read_calls(
    text: str, form: ResponseFormat, prompt: str, tools: Schemas, raw_calls: list[dict[str, str]]
) -> list[WrittenCall]:
    """Decode the calls of a turn."""
    if form.calls is None or not raw_calls:
        return []
    if form.calls.content != "json":
        typed = _typed_calls(text, form, prompt, tools)
        if typed is not None:
            return [_checked(call, "") for call in typed]
    return [call for raw_call in raw_calls for call in _decode(raw_call, form.calls)]


def _typed_calls(text: str, form: ResponseFormat, prompt: str, tools: Schemas) -> list[Any] | None:
    """The calls as transformers reads them, with argument types from the tool schemas; None if it cannot."""
    try:
        parser = ResponseParser(form.typed, prefix=prompt, tools=list(tools or []))
        parser.feed(text)
        calls = parser.finalize()[0].get("tool_calls")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(calls, dict):
        return [calls]
    # `repeats` collects what each region gave; a region can hold a list of calls.
    return [call for item in calls or [] for call in (item if isinstance(item, list) else [item])]


def _decode(raw_call: dict[str, str], field: ResponseTemplateField) -> list[WrittenCall]:
    """Decode the text between the markers of a call."""
    captures = dict(raw_call)
    body = captures.pop(_BODY)
    try:
        value = process_field(body, field, captures)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "it has no name or no arguments" if isinstance(error, KeyError) else _first_line(error)
        return [refused(reason, body, captures.get("name", ""))]
    return [_checked(call, body) for call in (value if isinstance(value, list) else [value])]


def _checked(call: Any, body: str) -> WrittenCall:
    """Check that a decoded call has a name and named arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return refused("it is not an object with `name` and `arguments`", body)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return refused("it has no `name` that is a string", body)
    arguments = arguments_from_json(function.get("arguments"))
    if arguments is None:
        return refused("its `arguments` are missing or not an object", body, name)
    try:
        check_value([name, arguments], body, 0, len(body))
    except Unreadable as error:
        return refused(str(error), body)
    return WrittenCall(name, arguments)


def _first_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, json.JSONDecodeError) else None
    if cause is not None:
        return f"it is not valid JSON ({cause.msg} at character {cause.pos})"
    return str(error).split("\n", 1)[0] or type(error).__name__
