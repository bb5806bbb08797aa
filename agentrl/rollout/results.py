"""What a tool returned, as the model gets to see it.

| returned                        | content                                                       |
|---------------------------------|---------------------------------------------------------------|
| str                             | as it is                                                      |
| PIL image, text or image block, | blocks, images as PIL images; plain text if there is no image |
| list of these                   |                                                               |
| other dict, list, tuple         | JSON with real characters, no escapes (`{"r": "café"}`)       |
| bytes                           | UTF-8 text, undecodable bytes replaced                        |
| anything else, `None` included  | `str(value)`, NumPy and torch scalars as plain numbers        |

An image is copied, so that the tool may go on drawing on its own; `agentrl.chat.pictures` says what forms one may have.
Text above `MAX_CHARACTERS` is cut and says so.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from PIL.Image import Image

from agentrl.chat.pictures import holds_picture, image_block, is_image_block
from agentrl.types import Message, ToolResult

MAX_CHARACTERS = 32_768
"""Most characters of one text that reach the model, some 8000 tokens."""


def render(value: Any) -> str | list[dict[str, Any]]:
    """Render a tool's return value as the content of a tool message; see the table above.

    Raises:
        ImageError: An image cannot be read.
    """
    items = value if isinstance(value, list) else [value]
    if items and all(_is_block(item) for item in items):
        return _blocks(items)
    return truncate(_valid(_text(value)))


def tool_message(result: ToolResult) -> Message:
    """The chat message that answers a call."""
    call_id, name = result.call.id, result.call.name
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": result.content}


def truncate(text: str, limit: int = MAX_CHARACTERS, side: Literal["left", "right"] = "right") -> str:
    """Keep `limit` characters of a longer text and add a marker that counts what was left out.

    Args:
        text: What to cut.
        limit: How many characters to keep; the marker comes on top.
        side: Where to cut: "right" keeps the beginning, "left" the end.

    Example:
        >>> truncate("abcdef", 2, "left")
        '[4 characters left out]ef'
    """
    if side not in ("left", "right"):
        raise ValueError(f'side must be "left" or "right", not {side!r}')
    if len(text) <= limit:
        return text
    marker = f"[{len(text) - limit} characters left out]"
    return marker + text[len(text) - limit :] if side == "left" else text[:limit] + marker


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict | list | tuple):
        try:
            return json.dumps(value, ensure_ascii=False, default=_jsonable)
        except (TypeError, ValueError):  # keys that JSON has not, or a structure that contains itself
            return str(value)
    return str(_jsonable(value))


def _jsonable(value: Any) -> Any:
    """NumPy and torch values as plain numbers and lists, anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _valid(text: str) -> str:
    """Replace lone surrogates, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _is_block(item: Any) -> bool:
    if isinstance(item, Image):
        return True
    if not isinstance(item, dict):
        return False
    if item.get("type") == "text":
        return isinstance(item.get("text"), str)
    return is_image_block(item) and holds_picture(item)


def _blocks(items: list[Any]) -> str | list[dict[str, Any]]:
    blocks = [image_block(item) if isinstance(item, Image) or is_image_block(item) else item for item in items]
    if all(block["type"] == "text" for block in blocks):
        return truncate(_valid("".join(block["text"] for block in blocks)))
    return [block | {"text": truncate(_valid(block["text"]))} if block["type"] == "text" else block for block in blocks]
