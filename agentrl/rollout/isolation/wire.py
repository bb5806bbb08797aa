"""How values come back from a process that is not trusted: JSON beside binary blobs, never pickle.

What crosses: None, booleans, numbers, strings, lists, tuples (as lists), dicts, bytes and PIL images (as PNG).
NumPy and torch scalars and arrays cross as plain numbers and lists.

A frame is the length of its body (8 bytes, big-endian) and the body; the body is the length of the JSON (4 bytes),
the JSON, and the blobs one after the other.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any

from PIL import Image

FRAME = struct.Struct(">Q")
MAX_FRAME = 256 * 2**20
"""Most bytes of one answer; a longer one is a failure of the environment."""

_JSON = struct.Struct(">I")


def encode(value: Any) -> bytes:
    """Write a value as the body of a frame.

    Raises:
        TypeError: Something in it cannot cross.
    """
    blobs: list[bytes] = []
    text = json.dumps(_plain(value, blobs), ensure_ascii=True).encode()
    head = json.dumps({"sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([_JSON.pack(len(head)), head, _JSON.pack(len(text)), text, *blobs])


def decode(body: bytes) -> Any:
    """Read the body of a frame.

    Raises:
        ValueError: The bytes are not what `encode` writes, or an image cannot be read.
    """
    try:
        head, rest = _json_part(body)
        value, rest = _json_part(rest)
        blobs, start = [], 0
        for size in head["sizes"]:
            blobs.append(rest[start : start + size])
            start += size
        return _rich(value, blobs)
    except (
        struct.error,
        KeyError,
        IndexError,
        TypeError,
        OSError,
        RecursionError,
        Image.DecompressionBombError,
    ) as error:
        raise ValueError(f"unreadable answer of {len(body)} bytes: {error!r}") from error


def _json_part(body: bytes) -> tuple[Any, bytes]:
    (size,) = _JSON.unpack_from(body)
    start = _JSON.size
    return json.loads(body[start : start + size]), body[start + size :]


def _plain(value: Any, blobs: list[bytes]) -> Any:
    """A value in JSON; bytes and images become the number of their blob. Dicts are lists of pairs under a mark."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, blobs) for item in value]
    if isinstance(value, dict):
        return {"pairs": [[_plain(key, blobs), _plain(item, blobs)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        blobs.append(bytes(value))
        return {"bytes": len(blobs) - 1}
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG")
        blobs.append(file.getvalue())
        return {"image": len(blobs) - 1}
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), blobs)
    raise TypeError(
        f"a {type(value).__name__} cannot leave an isolated environment; give back text, numbers, lists, dicts, bytes "
        "or PIL images"
    )


def _rich(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_rich(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    if "pairs" in value:
        return {_rich(key, blobs): _rich(item, blobs) for key, item in value["pairs"]}
    if "bytes" in value:
        return blobs[value["bytes"]]
    image = Image.open(io.BytesIO(blobs[value["image"]]), formats=["PNG"])
    image.load()
    return image
