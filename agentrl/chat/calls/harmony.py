"""The harmony format of GPT-OSS: a turn is a run of messages, each with a channel and maybe a recipient.

A message is `<|start|>ROLE<|channel|>CHANNEL<|message|>BODY` and an end. The recipient is `to=NAME`, after the
role or after the channel. What is said to a recipient is a call, whatever its channel; on `analysis` the rest
is reasoning, on any other channel content (https://cookbook.openai.com/articles/openai-harmony).

Beam writes the same, but for the arguments: each has a tag in place of JSON (what SGLang 0.5.23 reads,
`sglang/srt/parser/beam.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from agentrl.chat.calls.reading import Schemas, Text, Unreadable, WrittenCall, refused
from agentrl.chat.calls.values import arguments_from_json, read_json
from agentrl.chat.calls.xml_calls import read_beam_arguments

_MARK = re.compile(r"<\|(?:message|end|call|return|start)\|>")
_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:\A(?:assistant)?|<\|channel\|>\s*\w+)\s*\bto=([^\s<]+)")


Turn = tuple[list[str], list[str], list[WrittenCall]]
"""Bodies of content, bodies of reasoning, calls."""
ReadArguments = Callable[[Text, int, str], tuple[dict[str, Any], int]]
"""Reads the arguments of a named tool that stand at a place, and gives the place after them. Raises `Unreadable`."""


def read_harmony(prompt: str, turn: str) -> Turn:
    """Take a turn of GPT-OSS apart.

    Args:
        prompt: The generation prompt, which begins the first message.
        turn: What was sampled.
    """
    return _read(prompt, turn, _json_arguments)


def read_beam(prompt: str, turn: str, tools: Schemas, stopped: bool) -> Turn:
    """Take a turn of Beam apart.

    Args:
        prompt: The generation prompt, which begins the first message.
        turn: What was sampled.
        tools: Tool schemas, which give types to the arguments.
        stopped: Whether a stop token followed: nothing else tells a call without further arguments from one cut off.
    """

    def tagged_arguments(text: Text, start: int, name: str) -> tuple[dict[str, Any], int]:
        arguments, stop = read_beam_arguments(text, start, name, tools)
        if stop == len(text.text) and not stopped:
            raise Unreadable("it is cut off")
        return arguments, stop

    return _read(prompt, turn, tagged_arguments)


def _read(prompt: str, turn: str, read_arguments: ReadArguments) -> Turn:
    text = Text(prompt.rpartition("<|start|>")[2] + turn)
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[WrittenCall] = []
    position, length = 0, len(text.text)
    while position < length:
        mark = text.search(_MARK, position)
        header = text.text[position : length if mark is None else mark.start()]
        position = length if mark is None else mark.end()
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = None if recipient is None else recipient.group(1).removeprefix("functions.")
        if mark is None or mark.group() != "<|message|>":
            if name is not None:
                calls.append(refused("it is cut off before its arguments", "", name))
            elif channel is None:  # text outside of all messages
                content.append(header.removeprefix("assistant"))
            continue
        start = position
        if name is not None:
            call, position = _read_call(text, position, name, read_arguments)
            calls.append(call)
        end = text.search(_END, position)
        if name is None:
            body = text.text[start : length if end is None else end.start()]
            (reasoning if channel is not None and channel.group(1) == "analysis" else content).append(body)
        position = length if end is None else end.end()
    return content, reasoning, calls


def _read_call(text: Text, start: int, name: str, read_arguments: ReadArguments) -> tuple[WrittenCall, int]:
    """Read the arguments of a call; the place after them is where the end of its message is to be looked for."""
    try:
        arguments, stop = read_arguments(text, start, name)
    except Unreadable as error:
        end = text.search(_END, start)
        stop = len(text.text) if end is None else end.start()
        return refused(str(error), text.text[start:stop], name), stop
    stop = text.skip_space(stop)
    if stop < len(text.text) and _END.match(text.text, stop) is None:
        return refused("text follows its arguments", text.text[start:stop], name), stop
    return WrittenCall(name, arguments), stop


def _json_arguments(text: Text, start: int, _: str) -> tuple[dict[str, Any], int]:
    value, stop = read_json(text, start)
    arguments = arguments_from_json(value)
    if arguments is None:
        raise Unreadable("its arguments are not an object")
    return arguments, stop
