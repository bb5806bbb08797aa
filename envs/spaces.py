"""Gymnasium spaces in the words of JSON: the schema of an action, an action from its JSON, an observation as text.

Only spaces that a model can write as JSON are actions: `Discrete`, `MultiDiscrete`, `MultiBinary`, `Box` of numbers,
`Text`, and `Tuple`, `Dict` and `OneOf` of these. Any observation can be read, the rest as `str`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from PIL import Image

from agentrl.errors import ConfigurationError

MAX_ENTRIES = 64
"""Numbers of an action that a model can be expected to write."""


def schema(space: gym.Space[Any], where: str) -> dict[str, Any]:
    """The JSON schema of the elements of a space.

    Raises:
        ConfigurationError: They cannot be written as JSON; `where` says whose they are.
    """
    match space:
        case spaces.Discrete():
            return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
        case spaces.MultiBinary() | spaces.MultiDiscrete() | spaces.Box() if math.prod(space.shape) > MAX_ENTRIES:
            raise ConfigurationError(
                f"{where} is an array of {space.shape}: more than {MAX_ENTRIES} numbers. Wrap the environment so that "
                "a model can write its actions (gymnasium.wrappers.TransformAction)"
            )
        case spaces.MultiBinary():
            return _array(space.shape, {"type": "integer", "minimum": 0, "maximum": 1})
        case spaces.MultiDiscrete():
            low, high = int(space.start.min()), int((space.start + space.nvec).max()) - 1
            return _array(space.shape, {"type": "integer", "minimum": low, "maximum": high})
        case spaces.Box():
            number: dict[str, Any] = {"type": "integer" if np.issubdtype(space.dtype, np.integer) else "number"}
            low, high = space.low.min().item(), space.high.max().item()
            number |= {"minimum": low} if math.isfinite(low) else {}
            number |= {"maximum": high} if math.isfinite(high) else {}
            return _array(space.shape, number)
        case spaces.Text():
            return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
        case spaces.Tuple():
            items = [schema(part, where) for part in space.spaces]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        case spaces.Dict():
            return {
                "type": "object",
                "properties": {name: schema(part, where) for name, part in space.spaces.items()},
                "required": list(space.spaces),
            }
    raise ConfigurationError(f"{where} is {space}, which a model cannot write as JSON; wrap the environment")


def element(space: gym.Space[Any], value: Any) -> Any:
    """An element of a space from its JSON.

    Raises:
        ValueError: It is none; for the model to read.
    """
    try:
        found = _element(space, value)
        inside = space.contains(found)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{json.dumps(value)} is not an action of {space}: {error}") from None
    if not inside:
        raise ValueError(f"{json.dumps(value)} is not an action of {space}")
    return found


def text(observation: Any) -> str:
    """An observation as the model reads it: text as it is, anything else as JSON."""
    plain = _plain(observation)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def picture(observation: Any) -> Image.Image | None:
    """An observation of pixels, height x width x 3 (or 1) bytes, as an image; None if it is none."""
    if isinstance(observation, np.ndarray) and observation.dtype == np.uint8 and observation.ndim == 3:
        if observation.shape[2] == 3:
            return Image.fromarray(observation)
        if observation.shape[2] == 1:
            return Image.fromarray(observation[:, :, 0])
    return None


def _element(space: gym.Space[Any], value: Any) -> Any:
    match space:
        case spaces.Discrete():
            if isinstance(value, bool) or value != int(value):
                raise ValueError("expected an integer")
            return int(value)
        case spaces.Tuple():
            return tuple(_element(part, entry) for part, entry in zip(space.spaces, value, strict=True))
        case spaces.Dict():
            if unknown := sorted(value.keys() - space.spaces.keys()):
                raise ValueError(f"there is no {unknown}")
            return {name: _element(part, _entry(value, name)) for name, part in space.spaces.items()}
        case spaces.Text():
            return value
    found = np.asarray(value)
    if np.issubdtype(space.dtype, np.integer) and not np.array_equal(found, found.astype(space.dtype)):
        raise ValueError("expected integers")
    return found.astype(space.dtype)


def _entry(value: Mapping[str, Any], name: str) -> Any:
    if name not in value:
        raise ValueError(f"{name!r} is missing")
    return value[name]


def _array(shape: tuple[int, ...], entry: dict[str, Any]) -> dict[str, Any]:
    for length in reversed(shape):
        entry = {"type": "array", "items": entry, "minItems": length, "maxItems": length}
    return entry


def _plain(value: Any) -> Any:
    """As JSON knows it; floats with the six digits that their use in a prompt deserves."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | bool | type(None)) else str(value)
