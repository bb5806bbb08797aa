"""Images for vLLM: the trainer's token ids and the trainer's pixels.

vLLM can read pictures and write their placeholders by itself, and then its row need not be the trainer's. So it gets
what the trainer reads: the row with every placeholder in it, where they stand, and what the vision tower is fed. In
the process that is a `MultiModalInput`; over HTTP it is the field `features` of `/inference/v1/generate` (vLLM 0.32),
whose tensors travel as msgpack in base64. Nothing is left for vLLM to expand, to resize or to tokenize.

A picture is named by its digest, by which vLLM finds its features and its part of the prefix again.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.types import Image, ImageSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Model types whose vision tower vLLM feeds with the inputs that transformers' processor makes, under their names."""
_RAW = 3
"""The type that vLLM gives to a tensor's bytes in msgpack."""


def require_known(model: PreTrainedModel) -> None:
    """Check that images of a model can be handed to vLLM.

    Raises:
        ConfigurationError: They cannot.
    """
    if model.config.model_type not in FAMILIES:
        raise ConfigurationError(
            f"use_vllm=True with images and a model of type {model.config.model_type!r}: vLLM gets the pixels that the "
            f"trainer reads, and how is known for {', '.join(FAMILIES)} alone; leave use_vllm out, or pass the "
            "tokenizer instead of the processor to train on text."
        )
    rope = model.config.get_text_config().rope_parameters
    if model.config.model_type == "qwen3_vl" and not rope.get("mrope_interleaved"):
        raise ConfigurationError(
            "use_vllm=True with images and a qwen3_vl whose text_config.rope_parameters lack mrope_interleaved=True: "
            "transformers interleaves the positions of images in any case, vLLM where the config says so; add it to "
            "the model's config.json."
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


def places(ids: Sequence[int], images: Sequence[ImageSpan]) -> list[tuple[int, int]]:
    """Return offset and length of each image's run of placeholders.

    Raises:
        GenerationError: It has other tokens in between, about which vLLM is not told.
    """
    found = []
    for span in images:
        if len(set(ids[span.start : span.stop])) != 1 or span.stop - span.start != span.image.placeholders:
            raise GenerationError(
                f"the image at tokens {span.start} to {span.stop} of the row is no single run of "
                f"{span.image.placeholders} placeholders, so vLLM cannot be told where its features belong."
            )
        found.append((span.start, span.stop - span.start))
    return found


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

    def item(image: Image) -> Any:
        elements = {}
        for name, (tensor, kind, options) in _fields(image).items():
            slices = {"slices": [slice(*part) for part in options["slices"]]} if "slices" in options else {}
            config = getattr(MultiModalFieldConfig, kind)("image", **{**options, **slices})
            elements[name] = MultiModalFieldElem(data=tensor, field=config.field)
        return MultiModalKwargsItem(elements)

    return mm_input(
        prompt_token_ids=list(ids),
        mm_kwargs=MultiModalKwargsItems({"image": [item(span.image) for span in images]}),
        mm_hashes={"image": [span.image.digest for span in images]},
        mm_placeholders={"image": [PlaceholderRange(offset=at, length=length) for at, length in places(ids, images)]},
    )


def features(ids: Sequence[int], images: Sequence[ImageSpan]) -> dict[str, Any]:
    """Return the same for a server, as JSON."""
    return {
        "mm_hashes": {"image": [span.image.digest for span in images]},
        "mm_placeholders": {"image": [{"offset": at, "length": length} for at, length in places(ids, images)]},
        "kwargs_data": {"image": [_packed(span.image) for span in images]},
    }


def _packed(image: Image) -> str:
    import msgspec

    def pack(tensor: Tensor) -> Any:
        data = msgspec.msgpack.Ext(_RAW, tensor.contiguous().numpy().tobytes())
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data

    fields = {
        name: {"data": pack(tensor), "field": (kind, options)}
        for name, (tensor, kind, options) in _fields(image).items()
    }
    return base64.b64encode(msgspec.msgpack.encode(fields)).decode("ascii")


def _fields(image: Image) -> dict[str, tuple[Tensor, str, Mapping[str, Any]]]:
    """By name, what the vision tower reads, and how vLLM joins it with that of other images."""
    pixels, grid = image.inputs["pixel_values"], image.inputs["image_grid_thw"]
    flat = {"slices": [(0, len(pixels), None)], "dim": 0, "keep_on_cpu": False}
    return {"pixel_values": (pixels, "flat", flat), "image_grid_thw": (grid[0], "batched", {"keep_on_cpu": True})}
