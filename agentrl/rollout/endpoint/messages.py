"""Messages as a program sends them, brought into one form and compared. Pure.

A request of a program holds the whole conversation again. What it sends back of a sampled turn has to be what it was
given; these differences are none, because client libraries make them:

- `content` null, missing or "", and text as one string or as text blocks;
- the order of keys in a call's arguments, and white space in their JSON;
- keys that are null, and keys no template reads (`refusal`, `annotations`, what a library adds of its own);
- reasoning that is left out of a sampled turn: the program says nothing of it, so the row keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl.chat.messages import REASONING_FIELDS
from agentrl.types import Message

ROLES = frozenset({"system", "user", "assistant", "tool"})
_KEYS = ("role", "name", "tool_call_id", *REASONING_FIELDS)


class MessageError(ValueError):
    """A message of a request cannot be read."""


def normalise(messages: Sequence[Any]) -> list[Message]:
    """Bring a request's messages into one form.

    `developer` is read as `system`, as OpenAI describes it. A tool's answer gets the name of the tool it answers for,
    which some templates write and OpenAI's format does not have.

    Raises:
        MessageError: One has an unknown role, content that is not text, or a call without a name.
    """
    names: dict[str, str] = {}
    normal = []
    for number, message in enumerate(messages):
        try:
            normal.append(_normal(message, names))
        except (KeyError, TypeError, AttributeError, MessageError) as error:
            raise MessageError(f"messages[{number}]: {error or 'not in OpenAI form'}") from error
    return normal


def same(recorded: Message, sent: Message) -> bool:
    """Whether a message that was sent is one that is recorded; both are in normal form."""
    if recorded == sent:
        return True
    if recorded["role"] != "assistant" or any(name in sent for name in REASONING_FIELDS):
        return False
    return {key: value for key, value in recorded.items() if key not in REASONING_FIELDS} == sent


def common(recorded: Sequence[Message], sent: Sequence[Message]) -> int:
    """How many messages two conversations have in common at their beginning."""
    for number, pair in enumerate(zip(recorded, sent, strict=False)):
        if not same(*pair):
            return number
    return min(len(recorded), len(sent))


def _normal(message: Any, names: dict[str, str]) -> Message:
    if not isinstance(message, dict):
        raise MessageError(f"a {type(message).__name__}; expected an object")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise MessageError(f"role {role!r}; expected one of {sorted(ROLES)}")
    normal = {key: message[key] for key in _KEYS if message.get(key) is not None}
    normal |= {"role": role, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_call(call) for call in calls]
        names |= {call["id"]: call["function"]["name"] for call in normal["tool_calls"]}
    if role == "tool":
        normal.setdefault("name", names.get(normal.get("tool_call_id", ""), ""))
    return normal


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if any(block.get("type") not in ("text", "refusal") for block in content):
        raise MessageError("content blocks other than text are not served; send text")
    return "".join(block.get("text", "") for block in content)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = None
        arguments = read if isinstance(read, dict) else arguments
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
