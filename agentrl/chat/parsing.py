"""Sampled text to an assistant message.

Every text gives a turn; nothing raises and nothing the model wrote is run by mistake:

- A call inside reasoning is no call. A closing think tag that nothing opened and that stands before the first
  call ends reasoning that began with the turn.
- Content is what stands outside of reasoning and calls: its pieces without white space at their ends, joined
  by a newline.
- Each call is read on its own. One that cannot be read, or was cut off, becomes a `ToolCall` with `error`; in
  the message it has an empty name or empty arguments, so that a template can render it and the tool message
  that answers it.
- Arguments written as a JSON string instead of an object are decoded again, at most twice; no other type
  passes for an object.
- The last call of a turn need not be closed: what matters is whether its text is complete.

The time is linear in the text, whatever it is.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from agentrl.chat.calls import syntax_of
from agentrl.chat.calls.harmony import read_beam, read_harmony
from agentrl.chat.calls.reading import Schemas, Syntax, Text, Unreadable, WrittenCall, refused
from agentrl.chat.formats import CallSyntax, Reasoning, TurnFormat
from agentrl.chat.prefix import call_id
from agentrl.chat.response_templates import ResponseFormat, read_by_template
from agentrl.types import Message, ToolCall


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
    form: TurnFormat | ResponseFormat,
    *,
    prompt: str,
    tools: list[dict[str, Any]] | None = None,
    first_call: int = 0,
    stopped: bool = True,
) -> ParsedTurn:
    """Parse a sampled turn.

    Args:
        text: The turn without its stop token.
        form: The format of the model.
        prompt: The generation prompt in front of it, which may have opened a think block.
        tools: Tool schemas, which give types to arguments that the format writes as bare text.
        first_call: Number of calls earlier in the rollout, for the ids of calls to which the model gave none.
        stopped: Whether a stop token stood behind the text, which is the only end that a last call of Beam has.

    Returns:
        The message and its calls.
    """
    if isinstance(form, ResponseFormat):
        fields, written = read_by_template(text, form, prompt, tools)
    else:
        fields, written = _read(text, form, prompt, tools, stopped)
    message: Message = {"content": "", **fields, "role": "assistant"}
    if not written:
        return ParsedTurn(message, [])
    ids = [call.id or call_id(index) for index, call in enumerate(written, first_call)]
    if len(set(ids)) < len(ids):  # the model used one twice: which result answers which call must be clear
        ids = [call_id(index) for index in range(first_call, first_call + len(written))]
    calls = [ToolCall(name, call.name, call.arguments, call.error) for name, call in zip(ids, written, strict=True)]
    message["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return ParsedTurn(message, calls)


def _read(
    text: str, form: TurnFormat, prompt: str, tools: Schemas, stopped: bool
) -> tuple[dict[str, str], list[WrittenCall]]:
    """The fields of a turn, and its calls."""
    if form.calls is CallSyntax.HARMONY:
        content, thoughts, calls = read_harmony(prompt, text)
    elif form.calls is CallSyntax.BEAM:
        content, thoughts, calls = read_beam(prompt, text, tools, stopped)
    else:
        content, thoughts, calls = _scan(Text(text), form, prompt, tools)
    fields = {"content": _join(content)}
    if thoughts and form.reasoning is not None:
        fields[form.reasoning.field] = _join(thoughts)
    return fields, calls


def _scan(text: Text, form: TurnFormat, prompt: str, tools: Schemas) -> tuple[list[str], list[str], list[WrittenCall]]:
    """Go through a turn from mark to mark: pieces of content, pieces of reasoning, calls."""
    marks = _marks(form)
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[WrittenCall] = []
    position = 0
    if marks.reasoning is not None and _begins_in_reasoning(text, marks, marks.reasoning, prompt):
        position = _take_reasoning(text, marks.reasoning, 0, thoughts)
    while (mark := marks.pattern.search(text.text, position)) is not None:
        content.append(text.text[position : mark.start()])
        literal = mark.group()
        if marks.reasoning is not None and literal == marks.reasoning.opening:
            position = _take_reasoning(text, marks.reasoning, mark.end(), thoughts)
        elif marks.syntax is None or literal in marks.syntax.framing:
            position = mark.end()
        else:
            read, position = _read_calls(text, marks.syntax, mark, tools)
            calls += read
    content.append(text.text[position:])
    return content, thoughts, calls


def _read_calls(text: Text, syntax: Syntax, mark: re.Match[str], tools: Schemas) -> tuple[list[WrittenCall], int]:
    """Read what a mark opened; a call that cannot be read ends where the syntax says."""
    try:
        return syntax.read(text, mark, tools)
    except Unreadable as error:
        stop, closed = syntax.skip(text, mark.end())
        reason = str(error)
        if not closed and syntax.closing is not None and syntax.closing not in reason:
            reason = f"it is cut off before {syntax.closing}; {reason}"
        body = text.text[mark.end() : stop].removesuffix(syntax.closing or "")
        return [refused(reason, body, error.name)], stop


def _take_reasoning(text: Text, reasoning: Reasoning, start: int, thoughts: list[str]) -> int:
    """Collect a block of reasoning; without an end it takes all the rest."""
    end = text.find(reasoning.closing, start)
    thoughts.append(text.text[start : len(text.text) if end == -1 else end])
    return len(text.text) if end == -1 else end + len(reasoning.closing)


def _begins_in_reasoning(text: Text, marks: _Marks, reasoning: Reasoning, prompt: str) -> bool:
    """Whether the prompt opened reasoning, or the turn closes reasoning that it never opened."""
    if prompt.rfind(reasoning.opening) > prompt.rfind(reasoning.closing):
        return True
    close = text.find(reasoning.closing, 0)
    if close == -1:
        return False
    # Framing in front of it decides nothing; the first opening of reasoning or of a call does.
    framing = () if marks.syntax is None else marks.syntax.framing
    opened = (mark for mark in marks.pattern.finditer(text.text, 0, close) if mark.group() not in framing)
    return next(opened, None) is None


@dataclass(frozen=True, slots=True)
class _Marks:
    """What to look for in a turn, in one pattern without groups."""

    pattern: re.Pattern[str]
    reasoning: Reasoning | None
    syntax: Syntax | None


@functools.lru_cache(maxsize=64)
def _marks(form: TurnFormat) -> _Marks:
    syntax = None if form.calls is None else syntax_of(form.calls)
    literals = [] if form.reasoning is None else [form.reasoning.opening]
    patterns = [re.escape(literal) for literal in (*literals, *(syntax.framing if syntax is not None else ()))]
    patterns += [] if syntax is None else [syntax.opening]
    return _Marks(re.compile("|".join(patterns) or "(?!)"), form.reasoning, syntax)


def _join(pieces: list[str]) -> str:
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip()))
