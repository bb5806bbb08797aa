"""Images in the local generator: keys of rows, positions, and features that are computed once.

A row that the scheduler compares with others is made of keys: ids of text, and in place of an image's placeholders a
negative number that only this picture has. So two rows have a common beginning as far as their text and their pictures
are the same, and nothing else in the scheduler needs to know of images.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.chat.images import STAND_IN, image_types
from agentrl.generation.base import GenerationStats
from agentrl.types import Image, ImageSpan

_KEPT_BYTES = 2**28
"""Features that are kept for other rows with the same picture, besides those that are held."""


def row_keys(ids: Sequence[int], images: Sequence[ImageSpan], placeholder_id: int) -> list[int]:
    """Give the keys of a row; see the module."""
    keys = list(ids)
    for span in images:
        key = -1 - int(span.image.digest[:15], 16)
        for index in range(span.start, span.stop):
            if keys[index] == placeholder_id:
                keys[index] = key
    return keys


def ids_of(keys: Sequence[int], placeholder_id: int | None) -> list[int]:
    """Give the ids that the model reads for keys."""
    if placeholder_id is None:
        return list(keys)
    return [placeholder_id if key < 0 else STAND_IN if key == placeholder_id else key for key in keys]


def blocks(keys: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of placeholders stand: start and stop of each."""
    runs, start = [], None
    for index, key in enumerate([*keys, 0]):
        if start is not None and (key >= 0 or key != keys[start]):
            runs.append((start, index))
            start = None
        if start is None and key < 0:
            start = index
    return runs


class VisionModel:
    """What the generator asks of a vision-language model besides its logits.

    Args:
        model: The model, PEFT-wrapped or not.
        stats: Counts the images that are encoded.

    Attributes:
        placeholder_id: The id that stands for a feature of an image; None for a model of text.
        bidirectional: Whether the tokens of an image see each other, also those behind them.
        takes_features: Whether its forward takes features in the place of pixels.
    """

    def __init__(self, model: PreTrainedModel, stats: GenerationStats) -> None:
        wrapped: Any = model
        self._model: Any = wrapped.get_base_model() if hasattr(model, "peft_config") else model
        self._stats = stats
        self.placeholder_id = placeholder_id(model)
        self.bidirectional = sees_images_whole(model)
        self.takes_features = "mm_encoder_outputs" in inspect.signature(self._model.forward).parameters
        self._features: OrderedDict[str, Any] = OrderedDict()
        self._held: dict[str, set[str]] = {}
        encode = getattr(self._model, "get_image_features", None)
        self._accepted = () if encode is None else tuple(inspect.signature(encode).parameters)

    def positions(self, ids: Sequence[int], images: Sequence[ImageSpan]) -> Tensor | None:
        """Positions of a row's tokens, int64 (axes, T), where images have two dimensions; None: 0, 1, 2, ..."""
        rope: Any = getattr(getattr(self._model, "model", None), "get_rope_index", None)
        if rope is None or not images:
            return None
        assert self.placeholder_id is not None
        grids = torch.cat([span.image.inputs["image_grid_thw"] for span in images])
        types = torch.tensor([image_types(ids, images, self.placeholder_id)])
        positions: Tensor = rope(torch.tensor([list(ids)]), mm_token_type_ids=types, image_grid_thw=grids)[0]
        return positions[:, 0]

    def features(self, images: Sequence[Image]) -> dict[str, Any]:
        """Give the model's input for images, encoding those that are not known; empty without images."""
        if not images:
            return {}
        return {"mm_encoder_outputs": {"image": _join([self._encoded(image) for image in images])}}

    def hold(self, session: str, images: Sequence[ImageSpan]) -> None:
        """Keep the features of a session's images, however many there are, because each turn asks for them again."""
        if images:
            self._held[session] = {span.image.digest for span in images}

    def let_go(self, session: str) -> None:
        """Keep the features of a session's images no longer than those of any other."""
        self._held.pop(session, None)

    def forget(self) -> None:
        """Drop features: the weights that made them have changed."""
        self._features.clear()

    def _encoded(self, image: Image) -> Any:
        if image.digest in self._features:
            self._features.move_to_end(image.digest)
            return self._features[image.digest]
        inputs = {
            name: _as_the_model_has(self._model, tensor)
            for name, tensor in image.inputs.items()
            if name in self._accepted
        }
        output = self._model.get_image_features(**inputs, return_dict=True)
        self._stats.images_encoded += 1
        kept = {name: output[name] for name in ("pooler_output", "deepstack_features") if output.get(name) is not None}
        encoded = type(output)(**kept)
        self._make_room()
        self._features[image.digest] = encoded
        return encoded

    def _make_room(self) -> None:
        """Drop the features that were not asked for the longest, if there are too many."""
        held = set().union(*self._held.values())
        others = {digest: _size(features) for digest, features in self._features.items() if digest not in held}
        excess = sum(others.values()) - _KEPT_BYTES
        for digest, size in others.items():
            if excess <= 0:
                return
            del self._features[digest]
            excess -= size


def vision_inputs(model: Any, inputs: Mapping[str, Tensor], types_ST: Tensor) -> dict[str, Tensor]:
    """Give what a forward pass over whole rows takes for their images.

    Args:
        model: A vision-language model, PEFT-wrapped or not.
        inputs: Of the vision tower, for the images of all rows in order.
        types_ST: Which tokens stand for images, 1 for those.
    """
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    accepted = inspect.signature(inner.forward).parameters
    types = [name for name in ("mm_token_type_ids", "token_type_ids") if name in accepted]
    return {name: _as_the_model_has(inner, tensor) for name, tensor in inputs.items() if name in accepted} | (
        dict.fromkeys(types, types_ST)
    )


def _as_the_model_has(model: Any, tensor: Tensor) -> Tensor:
    """Pixels in the precision of the weights, anything else as it is; on the model's device."""
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)


def placeholder_id(model: PreTrainedModel) -> int | None:
    """The id that stands for a feature of an image; None for a model of text."""
    found = getattr(model.config, "image_token_id", None)
    return getattr(model.config, "image_token_index", None) if found is None else found


def sees_images_whole(model: PreTrainedModel) -> bool:
    """Whether the tokens of an image see each other in both directions: Gemma 3, and the larger ones of Gemma 4."""
    if getattr(model.config.get_text_config(decoder=True), "use_bidirectional_attention", None) == "vision":
        return True
    return bool(model.config.model_type == "gemma3")


def unknown_vision(model: PreTrainedModel, accepted: Collection[str]) -> str | None:
    """Say why images of a model cannot be handed to it feature by feature, or None if they can, or it has none.

    Args:
        model: The model.
        accepted: Names of the arguments of its forward.
    """
    if placeholder_id(model) is None:
        return None
    if "mm_encoder_outputs" not in accepted:
        return "its forward takes no features of images"
    if "token_type_ids" in accepted and not sees_images_whole(model):
        return "it looks at the types of tokens in a way that is not known"
    return None


def _join(outputs: Sequence[Any]) -> Any:
    """Put the features of single images together as if they had been encoded at once."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    pooled = [output.pooler_output for output in outputs]
    if isinstance(pooled[0], Tensor):
        joined: dict[str, Any] = {"pooler_output": torch.cat(pooled)}
    else:
        joined = {"pooler_output": [part for parts in pooled for part in parts]}
    if first.get("deepstack_features") is not None:  # by layer, then by image
        layers = zip(*(output.deepstack_features for output in outputs), strict=True)
        joined["deepstack_features"] = [[part for parts in layer for part in parts] for layer in layers]
    return type(first)(**joined)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_size, value.values() if isinstance(value, dict) else value))
