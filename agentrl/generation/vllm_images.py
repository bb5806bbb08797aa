"""Images for vLLM: the trainer's token ids and the trainer's pixels.

vLLM can read pictures and write their placeholders by itself, and then its row need not be the trainer's. So it gets
what the trainer reads: the row with every placeholder in it, where they stand, and what the vision tower is fed. In
the process that is a `MultiModalInput`; over HTTP it is the field `features` of `/inference/v1/generate` (vLLM 0.32),
whose tensors travel as msgpack in base64. Nothing is left for vLLM to expand, to resize or to tokenize.

How vLLM's models want the tensors is told by the names that transformers' processors give them (`_LAYOUTS`). What
vLLM calls an item is one run of placeholders, so a picture whose tiles have text between them (Idefics 3, SmolVLM) is
handed over tile by tile. That vLLM's model makes of it what the trainer's does is not taken on trust:
`agentrl.training.sampler_check` compares turns that are sampled behind a picture.

An item is named by the digest of its picture, by which vLLM finds its features and its part of the prefix again.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.vision import sees_images_whole
from agentrl.types import Image, ImageSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RAW = 3
"""The type that vLLM gives to a tensor's bytes in msgpack."""
_INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose positions of images transformers interleaves, whatever the config says."""


class _Field(NamedTuple):
    """A tensor, and by which kind of field with which options vLLM joins it with those of other items."""

    tensor: Tensor
    kind: str
    options: dict[str, Any]


class Item(NamedTuple):
    """A run of placeholders, and what the vision tower reads for it.

    Attributes:
        digest: Names what it reads.
        offset: Where the run begins in the row.
        length: Number of its tokens.
        fields: By name.
    """

    digest: str
    offset: int
    length: int
    fields: dict[str, _Field]


def require_known(model: PreTrainedModel) -> None:
    """Refuse models of which it is known, before anything is tried, that vLLM reads their images otherwise.

    Raises:
        ConfigurationError: The model is one of these.
    """
    if sees_images_whole(model) and model.device.type == "cpu":
        raise ConfigurationError(
            f"use_vllm=True with images and a model of type {model.config.model_type!r} on the CPU: the tokens of an "
            "image see each other in both directions, and vLLM's attention on the CPU lets each see only those before "
            "it; leave use_vllm out, or pass the tokenizer instead of the processor to train on text."
        )
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if model.config.model_type in _INTERLEAVED and not rope.get("mrope_interleaved"):
        raise ConfigurationError(
            f"use_vllm=True with images and a {model.config.model_type} whose text_config.rope_parameters lack "
            "mrope_interleaved=True: transformers interleaves the positions of images in any case, vLLM where the "
            "config says so; add it to the model's config.json."
        )


def require_msgpack() -> None:
    """Check that tensors can be written for a server.

    Raises:
        ConfigurationError: They cannot.
    """
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("images go to a vLLM server as msgpack: pip install msgspec.") from error


# How vLLM's models take the tensors ---------------------------------------------------------------------------


def _flat(tensor: Tensor) -> _Field:
    """Patches or tiles, which are put end to end."""
    return _Field(tensor, "flat", {"slices": [(0, len(tensor), None)], "dim": 0, "keep_on_cpu": False})


def _single(tensor: Tensor, *, keep_on_cpu: bool = True) -> _Field:
    """One tensor of each item; small ones, by which others are told apart, stay on the CPU."""
    return _Field(tensor, "batched", {"keep_on_cpu": keep_on_cpu})


def _patches(inputs: Mapping[str, Tensor], placeholder_id: int) -> dict[str, _Field]:
    return {"pixel_values": _flat(inputs["pixel_values"]), "image_grid_thw": _single(inputs["image_grid_thw"][0])}


def _sized(inputs: Mapping[str, Tensor], placeholder_id: int) -> dict[str, _Field]:
    pixels = _single(inputs["pixel_values"][0], keep_on_cpu=False)
    return {"pixel_values": pixels, "image_sizes": _single(inputs["image_sizes"][0])}


def _placed(inputs: Mapping[str, Tensor], placeholder_id: int) -> dict[str, _Field]:
    """Patches with their places, for which vLLM has a name of its own."""
    pixels, places = (inputs[name][0] for name in ("pixel_values", "image_position_ids"))
    return {
        "pixel_values": _single(pixels, keep_on_cpu=False),
        "pixel_position_ids": _single(places, keep_on_cpu=False),
    }


def _tiles(inputs: Mapping[str, Tensor], placeholder_id: int) -> dict[str, _Field]:
    """Tiles and their number, by both names that vLLM's models have for it; one of them asks for the placeholder."""
    count = torch.tensor(len(inputs["pixel_values"]))
    return {
        **{name: _flat(tensor) for name, tensor in inputs.items()},
        "num_patches": _single(count),
        "image_num_patches": _single(count),
        "image_token_id": _Field(torch.tensor(placeholder_id), "shared", {"batch_size": 1, "keep_on_cpu": True}),
    }


_Layout = Callable[[Mapping[str, Tensor], int], dict[str, _Field]]
_LAYOUTS: dict[frozenset[str], _Layout] = {
    frozenset({"pixel_values", "image_grid_thw"}): _patches,  # the Qwens
    frozenset({"pixel_values", "image_sizes"}): _sized,  # LLaVA-NeXT
    frozenset({"pixel_values", "image_position_ids"}): _placed,  # Gemma 4
    frozenset({"pixel_values", "pixel_attention_mask"}): _tiles,  # Idefics 3, SmolVLM
    frozenset({"pixel_values"}): _tiles,  # Gemma 3, InternVL
}
"""By the names of what the vision tower reads of a picture."""


# Items of a row -----------------------------------------------------------------------------------------------


def items(ids: Sequence[int], images: Sequence[ImageSpan]) -> list[Item]:
    """Cut the images of a row into vLLM's items.

    Raises:
        GenerationError: vLLM cannot be told of one of them.
    """
    return [item for span in images for item in _items_of(ids, span)]


def _items_of(ids: Sequence[int], span: ImageSpan) -> list[Item]:
    image, placeholder_id = span.image, ids[span.start]
    where = f"the image at tokens {span.start} to {span.stop} of the row"
    layout = _LAYOUTS.get(frozenset(image.inputs))
    if layout is None:
        raise GenerationError(f"{where} comes as {', '.join(image.inputs)}, and how vLLM takes these is not known.")
    runs = _runs(ids, span, placeholder_id)
    if sum(length for _, length in runs) != image.placeholders:
        raise GenerationError(f"{where} does not have the {image.placeholders} placeholders of its features there.")
    parts = _parts(image, layout, len(runs))
    if len(parts) != len(runs):
        raise GenerationError(
            f"{where} has {len(runs)} runs of placeholders and {len(parts)} parts, so vLLM cannot be told which "
            "features belong where."
        )
    digests = [image.digest] if len(runs) == 1 else [f"{image.digest}-{index}" for index in range(len(runs))]
    return [
        Item(digest, offset, length, layout(part, placeholder_id))
        for digest, (offset, length), part in zip(digests, runs, parts, strict=True)
    ]


def _runs(ids: Sequence[int], span: ImageSpan, placeholder_id: int) -> list[tuple[int, int]]:
    """Offset and length of each run of placeholders of an image."""
    runs = []
    places = range(span.start, span.stop)
    for stands, run in itertools.groupby(places, lambda place: ids[place] == placeholder_id):
        if stands:
            first, *rest = run
            runs.append((first, 1 + len(rest)))
    return runs


def _parts(image: Image, layout: _Layout, runs: int) -> list[Mapping[str, Tensor]]:
    """What the vision tower reads, for a single run of placeholders or tile by tile."""
    if layout is not _tiles:
        return [image.inputs]
    batched = image.inputs["pixel_values"].dim() == 5  # some processors make a batch of one picture
    tiles = {name: tensor[0] if batched else tensor for name, tensor in image.inputs.items()}
    if runs == 1:
        return [tiles]
    count = len(tiles["pixel_values"])
    return [{name: tensor[index : index + 1] for name, tensor in tiles.items()} for index in range(count)]


def engine_input(ids: Sequence[int], images: Sequence[ImageSpan]) -> Any:
    """Return a prompt for an engine in this process, without anything that it would have to process."""
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    def element(field: _Field) -> Any:
        options = dict(field.options)
        if "slices" in options:
            options["slices"] = [slice(*part) for part in options["slices"]]
        config = getattr(MultiModalFieldConfig, field.kind)("image", **options)
        return MultiModalFieldElem(data=field.tensor, field=config.field)

    found = items(ids, images)
    kwargs = [MultiModalKwargsItem({name: element(field) for name, field in item.fields.items()}) for item in found]
    return mm_input(
        prompt_token_ids=list(ids),
        mm_kwargs=MultiModalKwargsItems({"image": kwargs}),
        mm_hashes={"image": [item.digest for item in found]},
        mm_placeholders={"image": [PlaceholderRange(offset=item.offset, length=item.length) for item in found]},
    )


def features(ids: Sequence[int], images: Sequence[ImageSpan]) -> dict[str, Any]:
    """Return the same for a server, as JSON."""
    found = items(ids, images)
    return {
        "mm_hashes": {"image": [item.digest for item in found]},
        "mm_placeholders": {"image": [{"offset": item.offset, "length": item.length} for item in found]},
        "kwargs_data": {"image": [_packed(item) for item in found]},
    }


def _packed(item: Item) -> str:
    import msgspec

    def pack(tensor: Tensor) -> Any:
        data = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data

    fields = {
        name: {"data": pack(field.tensor), "field": (field.kind, field.options)} for name, field in item.fields.items()
    }
    return base64.b64encode(msgspec.msgpack.encode(fields)).decode("ascii")
