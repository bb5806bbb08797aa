"""What the model is shown of an observation.

Fields that are null and `metadata` are left out. Of the rest,

- pictures (text of the form `data:image/png;base64,...`) are images after the text;
- if one field is left and it is text, the model reads that text;
- otherwise it reads a JSON object of the fields, in their order; without any field, nothing.

The result of an MCP tool is its content: texts one below the other, and images.
"""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.chat.pictures import image_block
from agentrl.envs.openenv.protocol import ProtocolError
from agentrl.envs.openenv.tools import HIDDEN
from agentrl.errors import ImageError

Content = str | list[dict[str, Any]]
"""Text, or blocks of text and images."""

_PICTURE = re.compile(r"data:image/[\w.+-]+;base64,(?P<data>[A-Za-z0-9+/=\s]+)\Z")


def observation_content(fields: dict[str, Any]) -> Content:
    """Show an observation; see above.

    Raises:
        ProtocolError: What says that it is a picture is none.
    """
    shown = {name: value for name, value in fields.items() if value is not None and name != HIDDEN}
    found = {
        name: match for name, value in shown.items() if isinstance(value, str) and (match := _PICTURE.match(value))
    }
    texts = {name: value for name, value in shown.items() if name not in found}
    images = [_image(match["data"]) for match in found.values()]
    only = next(iter(texts.values())) if len(texts) == 1 else None
    text = only if isinstance(only, str) else json.dumps(texts, ensure_ascii=False) if texts else ""
    return _joined(text, images)


def result_content(result: Any) -> Content:
    """Show the result of an MCP tool.

    Raises:
        ProtocolError: What says that it is a picture is none.
    """
    blocks = result.get("content") if isinstance(result, dict) else None
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    images = [_image(block["data"]) for block in blocks if _is_image(block)]
    others = [block for block in blocks if not _is_image(block)]
    texts = [b["text"] if isinstance(b.get("text"), str) else json.dumps(b, ensure_ascii=False) for b in others]
    return _joined("\n".join(texts), images)


def _is_image(block: dict[str, Any]) -> bool:
    return block.get("type") == "image" and isinstance(block.get("data"), str)


def _joined(text: str, images: list[dict[str, Any]]) -> Content:
    if not images:
        return text
    return [*([{"type": "text", "text": text}] if text else []), *images]


def _image(data: str) -> dict[str, Any]:
    try:
        return image_block("".join(data.split()))
    except ImageError as error:
        raise ProtocolError(f"an observation has a picture that cannot be read: {error}") from error
