"""How sampled text is taken apart: transformers' response templates, also for calls that cannot be read.

transformers parses a whole turn or raises. Here the same template also exists in a raw form that hands out
the text of each call undecoded, so that one bad call costs only itself. For a chat template of no known
family whose calls are JSON between literal markers, the response template is found by rendering calls with
known names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from agentrl.chat.messages import REASONING_FIELDS
from agentrl.chat.prefix import Render, tool_call
from agentrl.errors import TemplateError

_BODY = "agentrl_body"


class CallSyntax(StrEnum):
    """How a model writes tool calls. `{}` stands for a JSON object of arguments."""

    HERMES = "hermes"
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`: Qwen2.5, Qwen3, SmolLM3 (XML tools), Hermes."""
    XML = "xml"
    """`<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`: Qwen3.5, Qwen3-Coder, Nemotron 3."""
    GLM = "glm"
    """`<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`: GLM 4.5, 4.6, 4.7."""
    DEEPSEEK = "deepseek"
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f` and a fenced JSON block (V3, R1), or
    `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}` (V3.1), each up to `<｜tool▁call▁end｜>`."""
    LLAMA = "llama"
    """`{"name": "f", "parameters": {}}`, or `<|python_tag|>` and such objects or `f.call(k="v")`: Llama 3.1, 3.2, 3.3."""
    PYTHONIC = "pythonic"
    """`[f(a=1), g()]` at the start of a line, maybe within `<|python_start|>` and `<|python_end|>`: Llama 4."""
    LFM2 = "lfm2"
    """`<|tool_call_start|>[f(a=1)]<|tool_call_end|>`: LFM2, LFM2.5."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": "f", "arguments": {}}]` or `[TOOL_CALLS]f[ARGS]{}`: Mistral, Ministral, Magistral."""
    HARMONY = "harmony"
    """Messages on channels, a call being a message to `functions.f`; also says what is reasoning: GPT-OSS."""
    COHERE = "cohere"
    """`<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>`: Command R7B, Command A."""
    GEMMA = "gemma"
    """`<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`: Gemma 4."""
    FUNCTION_GEMMA = "function_gemma"
    """`<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>`: FunctionGemma."""
    PHI = "phi"
    """`<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>`: Phi-4-mini."""
    PYTHON_TAGS = "python_tags"
    """`<code>f(a=1)</code>`: SmolLM3 (Python tools)."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """JSON objects between literal markers, for models of no known family.

    Attributes:
        opening: What stands in front of the object, or of a list of them.
        closing: What ends it.
        name_key: The key that holds the tool's name.
        arguments_key: The key that holds its arguments.
    """

    opening: str
    closing: str
    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model writes around its reasoning, and the field of the message that its template reads it from."""

    opening: str = "<think>"
    closing: str = "</think>"
    field: str = "reasoning_content"


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How a family writes a turn of the assistant.

    Attributes:
        calls: How it writes calls; None where it has none.
        reasoning: What surrounds its reasoning; None where it writes none. Harmony uses only `field`.
        framing: Further tokens around content, dropped from it, such as `<|START_RESPONSE|>`.
    """

    calls: CallSyntax | JsonCalls | None
    reasoning: Reasoning | None = Reasoning()
    framing: tuple[str, ...] = ()


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


def body_and_captures(raw_call: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Take apart an entry of `tool_calls` that the raw form of a format gave.

    Args:
        raw_call: The entry.

    Returns:
        The text between the markers of the call, and the named groups of the markers.
    """
    captures = dict(raw_call)
    return captures.pop(_BODY), captures


def _captures(field: ResponseTemplateField) -> set[str]:
    """The named groups of a field's markers that its transform uses."""
    groups: set[str] = set()
    for pattern in (field.open_re, field.close_re):
        groups |= set(pattern.groupindex) if pattern is not None else set()
    used = set(re.findall(r"\{(\w+)", json.dumps(field.transform)))
    return groups & used


def derive_response_template(render: Render, end_of_turn: str | None) -> dict[str, Any] | None:
    """Find the response template of a chat template that writes calls as JSON between literal markers.

    Args:
        render: The chat template.
        end_of_turn: The text that ends a turn.

    Returns:
        A response template, or None where calls are written in another way.
    """
    question = {"role": "user", "content": "probe"}
    calls = [tool_call(index, f"probe_{index}", {"key": f"value_{index}"}) for index in range(2)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    header = render([question], None, True).removeprefix(render([question], None, False))
    text = render([question, turn], None, False)
    first, second = _find_call(text, "probe_0"), _find_call(text, "probe_1")
    if first is None or second is None or not header.strip():
        return None
    close_and_open = text[first.stop : second.start]
    tail = text[second.stop :]
    close = (tail.split(end_of_turn)[0] if end_of_turn else tail).strip()
    opening = close_and_open.strip().removeprefix(close).strip()
    before_first = text[: first.start].rstrip()
    if not close or not opening or not before_first.endswith(opening):
        return None
    content: dict[str, Any] = {"repeats": True, "join": "\n", "content": "text"}
    return {
        "defaults": {"role": "assistant"},
        # What the generation prompt opens (a think block) has to be seen by the parser.
        "start_anchor": header.split("<think>")[0] or header,
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open": opening,
                "close": close,
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {
                        "name": f"{{content.{first.name_key}}}",
                        "arguments": f"{{content.{first.arguments_key}}}",
                    },
                },
            },
            "content": content | ({"close": end_of_turn} if end_of_turn else {}),
        },
    }


@dataclass(frozen=True, slots=True)
class _RenderedCall:
    start: int
    stop: int
    name_key: str
    arguments_key: str


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
