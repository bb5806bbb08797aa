"""Sampled text to an assistant message.

Every text gives a turn; nothing raises and nothing the model wrote is run by mistake:

- Reasoning is split off first, so a call inside it is no call. A closing think tag that nothing opened and
  that stands before the first call ends reasoning that began with the turn.
- Content is what stands outside of reasoning and calls: its pieces without white space at their ends, joined
  by a newline.
- Each call is decoded on its own. One that cannot be read becomes a `ToolCall` with `error`; in the message
  it has an empty name or empty arguments, so that a template can render it and the tool message that answers
  it.
- Arguments written as a JSON string instead of an object are decoded again, at most twice; no other type
  passes for an object.
- The last call of a turn need not be closed: what matters is whether its text is complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import process_field

from agentrl.chat.formats import ResponseFormat, body_and_captures
from agentrl.chat.prefix import call_id
from agentrl.types import Message, ToolCall

_PIECE = 4096
_SHOWN = 200
"""Characters of an unreadable call that its error quotes."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn as a message.

    Attributes:
        message: Role, content (a string), maybe reasoning, maybe `tool_calls` in OpenAI form with dict
            arguments; a template can render it.
        calls: The calls in the order written, unreadable ones included with `error` set.
    """

    message: Message
    calls: list[ToolCall]


def parse_turn(
    text: str,
    form: ResponseFormat,
    *,
    prompt: str,
    tools: list[dict[str, Any]] | None = None,
    first_call: int = 0,
) -> ParsedTurn:
    """Parse a sampled turn.

    Args:
        text: The turn without its stop token.
        form: The format of the model.
        prompt: The generation prompt in front of it, which may have opened a think block.
        tools: Tool schemas, which give types to arguments that the format writes as bare text.
        first_call: Number of calls earlier in the rollout, so that ids are unique within it.

    Returns:
        The message and its calls.
    """
    prompt += _unopened_reasoning(text, form, prompt)
    fields, reasoned = _split(text, form, prompt)
    functions = _functions(text, form, prompt, tools, fields.pop("tool_calls", []))
    calls = [
        ToolCall(call_id(first_call + index), function.name, function.arguments, function.error)
        for index, function in enumerate(functions)
    ]
    content = fields.get("content")
    message = {**fields, "role": "assistant", "content": content.strip() if isinstance(content, str) else ""}
    if reasoned and form.reasoning is not None:
        message.setdefault(form.reasoning, "")
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return ParsedTurn(message, calls)


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


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    arguments: dict[str, Any]
    error: str | None = None


def _functions(
    text: str,
    form: ResponseFormat,
    prompt: str,
    tools: list[dict[str, Any]] | None,
    raw_calls: list[dict[str, str]],
) -> list[_Function]:
    """Decode the calls of a turn."""
    if form.calls is None or not raw_calls:
        return []
    if form.calls.content != "json":
        typed = _typed_calls(text, form, prompt, tools)
        if typed is not None:
            return [_read_call(call, "") for call in typed]
    return [function for raw_call in raw_calls for function in _decode(raw_call, form)]


def _typed_calls(text: str, form: ResponseFormat, prompt: str, tools: list[dict[str, Any]] | None) -> list[Any] | None:
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


def _decode(raw_call: dict[str, str], form: ResponseFormat) -> list[_Function]:
    """Decode the text between the markers of a call."""
    body, captures = body_and_captures(raw_call)
    if form.calls is None:
        return []
    try:
        value = process_field(body, form.calls, captures)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "it has no name or no arguments" if isinstance(error, KeyError) else _first_line(error)
        return [_Function(captures.get("name", ""), {}, _unreadable(reason, body))]
    return [_read_call(call, body) for call in (value if isinstance(value, list) else [value])]


def _read_call(call: Any, body: str) -> _Function:
    """Check that a decoded call has a name and named arguments."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _Function("", {}, _unreadable("it is not an object with `name` and `arguments`", body))
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return _Function("", {}, _unreadable("it has no `name` that is a string", body))
    arguments = _decode_string(function.get("arguments"))
    if not isinstance(arguments, dict):
        return _Function(name, {}, _unreadable("its `arguments` are missing or not an object", body))
    if _has_lone_surrogate(name) or _has_lone_surrogate(arguments):
        return _Function("", {}, _unreadable("it has an escape that stands for half a character", body))
    return _Function(name, arguments)


def _decode_string(arguments: Any) -> Any:
    for _ in range(2):
        if not isinstance(arguments, str):
            break
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            break
    return arguments


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _unreadable(reason: str, body: str) -> str:
    shown = body.strip()
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
    return f"This tool call cannot be read: {reason}." + (f" It was: {shown}" if shown else "")


def _first_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, json.JSONDecodeError) else None
    if cause is not None:
        return f"it is not valid JSON ({cause.msg} at character {cause.pos})"
    return str(error).split("\n", 1)[0] or type(error).__name__
