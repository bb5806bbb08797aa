"""What an ORS server says, read strictly: a type that is not the protocol's is an error, never a value.

Pure. Everything wrong is a `ProtocolError`, which is a failure of the environment: a rollout whose reward came as
`"1"`, as NaN or not at all must not be trained on.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.chat.pictures import image_block
from agentrl.errors import EnvironmentFailure, ImageError, ToolDefinitionError
from agentrl.rollout.schemas import explicit_schema

Content = str | list[dict[str, Any]]
"""Text, or content blocks where there are images."""

MODEL_MISTAKES = frozenset({"not_found", "input_validation", None})
"""Reasons of a refused call that are the model's to mend. Servers made with `ors-sdk` give none."""


class ProtocolError(EnvironmentFailure):
    """The server said something that the Open Reward Standard does not know."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a tool gave back.

    Attributes:
        content: What the model is told.
        reward: The reward of this call, None if it gave none.
        finished: Whether the episode is over.
    """

    content: Content
    reward: float | None
    finished: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that the server did not run: why, in its words, and the kind of reason if it named one."""

    error: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Terminal:
    """The tool that takes the final answer: its name, and its argument if it has one."""

    name: str
    argument: str | None


@dataclass(frozen=True, slots=True)
class ToolList:
    """The tools of a task in OpenAI form, and the one that the model does not see."""

    schemas: list[dict[str, Any]]
    terminal: Terminal | None


def read_json(text: str | bytes, what: str) -> Any:
    """Read JSON; what it has not (NaN, infinities) is refused, and so is a key twice, which hides a value.

    Raises:
        ProtocolError: It is none.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"JSON has no {constant}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(read := dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return read

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON ({error}): {reprlib.repr(text)}") from error


def read_result(text: str) -> Output | Refusal:
    """Read the result of a call.

    Raises:
        ProtocolError: It is not one.
    """
    what = "the result of a call"
    result = _object(read_json(text, what), what)
    ok = _field(result, "ok", bool, what)
    if not ok:
        reason = result.get("reason")
        if not isinstance(reason, str | None):
            raise _wrong(what, "reason", "text or null", reason)
        return Refusal(_field(result, "error", str, what), reason)
    output = _field(result, "output", dict, what)
    content = read_blocks(_field(output, "blocks", list, what), what)
    return Output(content, _reward(output, what), _field(output, "finished", bool, what))


def read_blocks(blocks: Any, what: str) -> Content:
    """Read text and image blocks: joined to one text where there are no images, else content blocks.

    Raises:
        ProtocolError: They are no list of blocks, one is of another type, or an image cannot be decoded.
    """
    if not isinstance(blocks, list):
        raise ProtocolError(f"{what} has blocks that are no list: {reprlib.repr(blocks)}")
    content = [_block(_object(block, f"a block of {what}"), what) for block in blocks]
    if all(block["type"] == "text" for block in content):
        return "".join(block["text"] for block in content)
    return content


def read_tools(value: Any, what: str) -> ToolList:
    """Read a list of tools; nested schemas stay whole.

    Raises:
        ProtocolError: It is none, or one of the tools cannot be described to the model.
    """
    listed = _object(value, what)
    schemas = [_schema(_object(tool, f"a tool of {what}"), what) for tool in _field(listed, "tools", list, what)]
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ProtocolError(f"{what} has two tools of one name: {names}")
    return ToolList(schemas, None if listed.get("terminal_tool") is None else _terminal(listed["terminal_tool"], what))


def _terminal(value: Any, what: str) -> Terminal:
    what = f"the terminal tool of {what}"
    terminal = _object(value, what)
    argument = terminal.get("arg")
    if not isinstance(argument, str | None):
        raise _wrong(what, "arg", "text or null", argument)
    return Terminal(_field(terminal, "name", str, what), argument)


def _schema(tool: Mapping[str, Any], what: str) -> dict[str, Any]:
    name = _field(tool, "name", str, what)
    described = {
        "name": name,
        "description": tool.get("description") or name,  # a tool without a docstring is one all the same
        "parameters": tool.get("input_schema"),
    }
    try:
        return explicit_schema(described, lambda **arguments: None)
    except ToolDefinitionError as error:
        raise ProtocolError(f"{what}: {error}") from error


def _block(block: Mapping[str, Any], what: str) -> dict[str, Any]:
    kind = _field(block, "type", str, what)
    if kind == "text":
        return {"type": "text", "text": _field(block, "text", str, what)}
    if kind == "image":
        return _image(_field(block, "data", str, what), what)
    raise ProtocolError(f"{what} has a block of the type {kind!r}, which no model can be shown; known: text, image")


def _image(data: str, what: str) -> dict[str, Any]:
    try:
        return image_block(data)
    except ImageError as error:
        raise ProtocolError(f"{what} has an image that cannot be decoded: {error}") from error


def _reward(output: Mapping[str, Any], what: str) -> float | None:
    if "reward" not in output:
        raise ProtocolError(f"{what} has no `reward` (null means none): {reprlib.repr(output)}")
    reward = output["reward"]
    if reward is None:
        return None
    try:
        number = math.nan if isinstance(reward, bool) or not isinstance(reward, int | float) else float(reward)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(what, "reward", "a finite number or null", reward)
    return number


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} must be an object, not {reprlib.repr(value)}")
    return value


def _field(value: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
    if not isinstance(value.get(name), kind):
        raise _wrong(what, name, f"a {kind.__name__}", value.get(name))
    return value[name]


def _wrong(what: str, name: str, wanted: str, value: Any) -> ProtocolError:
    return ProtocolError(f"{what} has `{name}` = {reprlib.repr(value)}; it must be {wanted}")
