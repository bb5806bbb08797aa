"""Values as the journal keeps them: text for JSON, blobs for token ids and logprobs, images apart and once.

Messages, columns and tool results are JSON. What JSON has not is marked by a key that begins with `$`: images refer to
their digest, bytes are base64, NumPy and torch values are plain numbers and lists, anything else is its text. Keys of
the value itself that begin with `$` are doubled, so that nothing that a model wrote is taken for a mark.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

PNG_MODES = frozenset({"1", "L", "LA", "I;16", "RGB", "RGBA"})
"""Modes that PNG gives back as they were; others become RGB or RGBA."""

Images = dict[str, Image.Image]
"""Images by digest."""


def dumps(value: Any, images: Images | None = None) -> str:
    """Write a value as JSON.

    Args:
        value: The value.
        images: Takes the images that occur in it.
    """
    marks = 0

    def mark(item: Any) -> Any:
        nonlocal marks
        if hasattr(item, "tolist"):
            return item.tolist()
        marks += 1
        if isinstance(item, Image.Image):
            item = storable(item)
            key = digest(item)
            if images is not None:
                images[key] = item
            return {"$image": key}
        if isinstance(item, bytes | bytearray):
            return {"$bytes": base64.b64encode(item).decode()}
        return {"$text": str(item)}

    text = json.dumps(value, ensure_ascii=False, default=mark)
    if text.count('"$') != marks:
        text = json.dumps(_doubled(value), ensure_ascii=False, default=mark)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, which a model can write as escapes
        text = json.dumps(_doubled(value), default=mark)
    return text


def loads(text: str, image: Callable[[str], Image.Image]) -> Any:
    """Read what `dumps` wrote.

    Args:
        text: The JSON.
        image: Gives the image of a digest.
    """

    def unmark(item: dict[str, Any]) -> Any:
        if len(item) == 1:
            [(key, value)] = item.items()
            if key == "$image":
                return image(value)
            if key == "$bytes":
                return base64.b64decode(value)
            if key == "$text":
                return value
        return {key[1:] if key.startswith("$$") else key: value for key, value in item.items()}

    return json.loads(text, object_hook=unmark) if '"$' in text else json.loads(text)


def lost_type(value: Any) -> str | None:
    """Name the type of the first thing in a value that `loads` does not give back as it was, None if all comes back.

    What JSON has comes back, and so do bytes, and images in a mode that PNG keeps.
    """
    if isinstance(value, dict):
        parts = [lost_type(item) if isinstance(key, str) else type(key).__name__ for key, item in value.items()]
        return next((name for name in parts if name is not None), None)
    if isinstance(value, list):
        return next((name for name in map(lost_type, value) if name is not None), None)
    kept = value is None or isinstance(value, bool | int | float | str | bytes)
    return None if kept or (isinstance(value, Image.Image) and value.mode in PNG_MODES) else type(value).__name__


def storable(image: Image.Image) -> Image.Image:
    """An image in a mode that PNG keeps."""
    if image.mode in PNG_MODES:
        return image
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def digest(image: Image.Image) -> str:
    """SHA-256 of a storable image's mode, size and pixels."""
    return hashlib.sha256(repr((image.mode, image.size)).encode() + image.tobytes()).hexdigest()


def png(image: Image.Image) -> bytes:
    """An image as the bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def from_png(blob: bytes) -> Image.Image:
    """The image of a PNG file's bytes."""
    image = Image.open(io.BytesIO(blob), formats=["PNG"])
    image.load()
    return image


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return _little(array("i", ids)).tobytes()


def unpack_ids(blob: bytes) -> list[int]:
    """Read what `pack_ids` wrote."""
    return _unpacked("i", blob)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Logprobs as little-endian float64, exactly."""
    return _little(array("d", logprobs)).tobytes()


def unpack_logprobs(blob: bytes) -> list[float]:
    """Read what `pack_logprobs` wrote."""
    return _unpacked("d", blob)


def _unpacked(code: str, blob: bytes) -> list[Any]:
    values = array(code)
    values.frombytes(blob)
    return _little(values).tolist()


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _doubled(value: Any) -> Any:
    if isinstance(value, dict):
        return {"$" + key if str(key).startswith("$") else key: _doubled(item) for key, item in value.items()}
    return [_doubled(item) for item in value] if isinstance(value, list | tuple) else value
