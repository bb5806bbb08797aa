"""Pictures in messages, whatever form they came in.

A picture may be a PIL image, bytes, base64 text or a `data:` URL, in a content block of any of the usual shapes. Text
never opens a file and never reaches out: a path counts only as a `pathlib.Path`, which no model and no server can
write, and other URLs are refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image as Picture

from agentrl.errors import ImageError
from agentrl.types import Message

FORGOTTEN = "[earlier image]"
"""What stands for an image that is no longer shown."""
REPEATED = "[same image as before]"
"""What stands for an image that is not shown again."""

_SOURCES = ("image", "image_url", "url", "base64", "data", "bytes", "path")
"""Keys under which a block holds its picture."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What bytes may be; PIL knows formats that run programs."""


def is_image_block(block: Any) -> bool:
    """Whether a content block stands for a picture, with one or to be given one."""
    return isinstance(block, dict) and block.get("type") in ("image", "image_url")


def holds_picture(block: dict[str, Any]) -> bool:
    """Whether an image block has its picture."""
    return any(block.get(name) is not None for name in _SOURCES)


def image_block(picture: Any) -> dict[str, Any]:
    """Give the content block of a picture, which from here on nobody else changes.

    Args:
        picture: A PIL image, bytes, base64 text, a `data:` URL, a `pathlib.Path`, or a block with one of these.

    Raises:
        ImageError: It cannot be read.
    """
    return {"type": "image", "image": _read(picture)}


def _read(picture: Any) -> Picture.Image:
    try:
        if isinstance(picture, Picture.Image):
            return picture.copy()
        if isinstance(picture, dict):
            name = next((name for name in _SOURCES if picture.get(name) is not None), None)
            if name is None:
                raise ImageError(f"an image block has none of {', '.join(_SOURCES)}: {sorted(picture)}")
            return _read(picture[name])
        return _open(_bytes(picture))
    except (OSError, ValueError, SyntaxError, Picture.DecompressionBombError) as error:
        raise ImageError(f"an image cannot be read: {type(error).__name__}: {error}") from error


def _open(data: bytes) -> Picture.Image:
    with Picture.open(io.BytesIO(data), formats=_FORMATS) as picture:
        picture.load()
        return picture.copy()


def _bytes(picture: Any) -> bytes:
    if isinstance(picture, bytes | bytearray):
        return bytes(picture)
    if isinstance(picture, Path):
        return picture.read_bytes()
    if not isinstance(picture, str):
        raise ImageError(f"an image is a {type(picture).__name__}; expected a PIL image, bytes, base64 text or a Path")
    header, comma, data = picture.partition(",")
    if comma and header.startswith("data:"):
        if not header.endswith(";base64"):
            raise ImageError(f"an image has the data URL {header!r}; expected one with base64")
        picture = data
    try:
        return base64.b64decode(picture, validate=True)
    except binascii.Error:
        raise ImageError(
            f"an image is given as the text {picture[:40]!r}, which is no base64. Text is neither a path nor an "
            "address here; give a pathlib.Path, or load the image first."
        ) from None


def read_pictures(messages: Sequence[Message]) -> list[Message]:
    """Read the pictures in messages.

    Args:
        messages: Messages; they are not changed.

    Returns:
        The messages, each picture in a block `{"type": "image", "image": <PIL image>}`.

    Raises:
        ImageError: A picture cannot be read, or a block has none.
    """
    return [_with_content(message, lambda block: image_block(block)) for message in messages]


def take_pictures(messages: Sequence[Message]) -> tuple[list[Message], list[Picture.Image]]:
    """Take the pictures out of messages.

    Returns:
        The messages with empty image blocks, and the pictures in order.

    Raises:
        ImageError: A picture cannot be read, or a block has none.
    """
    pictures: list[Picture.Image] = []

    def take(block: dict[str, Any]) -> dict[str, Any]:
        pictures.append(_picture_of(block))
        return {"type": "image"}

    return [_with_content(message, take) for message in messages], pictures


def forget_pictures(messages: Sequence[Message], keep: int) -> list[Message]:
    """Put `FORGOTTEN` in the place of all image blocks but the last `keep` ones."""
    forgotten = itertools.chain(itertools.repeat(True, max(count_images(messages) - keep, 0)), itertools.repeat(False))
    text = {"type": "text", "text": FORGOTTEN}
    return [_with_content(message, lambda block: text if next(forgotten) else block) for message in messages]


def drop_repeated_pictures(messages: Sequence[Message], before: Picture.Image | None = None) -> list[Message]:
    """Put `REPEATED` in the place of images in results of tools that are the same, pixel by pixel, as the one before.

    Args:
        messages: Messages with pictures read; they are not changed.
        before: The last picture before these messages.
    """
    text = {"type": "text", "text": REPEATED}
    last = None if before is None else pixel_digest(before)

    def unless_repeated(block: dict[str, Any]) -> dict[str, Any]:
        nonlocal last
        previous, last = last, pixel_digest(_picture_of(block))
        return text if answers and last == previous else block

    shown: list[Message] = []
    for message in messages:
        answers = message.get("role") == "tool"
        shown.append(_with_content(message, unless_repeated))
    return shown


def last_picture(messages: Sequence[Message]) -> Picture.Image | None:
    """The last picture in messages, None where there is none."""
    blocks = _blocks_of(messages)
    return _picture_of(blocks[-1]) if blocks else None


def _picture_of(block: dict[str, Any]) -> Picture.Image:
    picture = block.get("image")
    return picture if isinstance(picture, Picture.Image) else _read(block)


def pixel_digest(picture: Picture.Image) -> str:
    """A hash of what a model sees of a picture: its size and its pixels in RGB."""
    rgb = picture if picture.mode == "RGB" else picture.convert("RGB")
    return hashlib.blake2b(repr(rgb.size).encode() + rgb.tobytes(), digest_size=16).hexdigest()


def place_pictures(messages: Sequence[Message], pictures: Sequence[Any]) -> list[Message]:
    """Put the pictures of a dataset row into the messages of its prompt.

    They go into the image blocks that have none, in order; where there is no such block at all, in front of the first
    message of the user.

    Args:
        messages: The prompt; it is not changed.
        pictures: What `image_block` takes, one or several.

    Raises:
        ImageError: There is another number of places than of pictures, or no message of the user.
    """
    places = [block for block in _blocks_of(messages) if not holds_picture(block)]
    if not places:
        first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), None)
        if first is None:
            raise ImageError("the row has images but its prompt has no message of the user to put them in")
        content = messages[first].get("content")
        text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
        content = [*({"type": "image", "image": picture} for picture in pictures), *text]
        return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]
    if len(places) != len(pictures):
        raise ImageError(f"the row has {len(pictures)} images, but its prompt has {len(places)} places for them")
    left = iter(pictures)
    return [
        _with_content(message, lambda block: block if holds_picture(block) else {"type": "image", "image": next(left)})
        for message in messages
    ]


def column_pictures(columns: Mapping[str, Any]) -> list[Any]:
    """The pictures of a dataset row: of its column `image`, then of its column `images`."""
    single, several = columns.get("image"), columns.get("images")
    return [*([] if single is None else [single]), *(several or [])]


def count_images(messages: Sequence[Message]) -> int:
    """Number of image blocks in messages."""
    return len(_blocks_of(messages))


def _blocks_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [block for content in contents for block in content if is_image_block(block)]


def _with_content(message: Message, change: Any) -> Message:
    """A message whose image blocks are changed; the same message where it has none."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image_block, content)):
        return message
    return {**message, "content": [change(block) if is_image_block(block) else block for block in content]}
