"""Tiny random vision-language models with their processors, built without a download and without torchvision.

`tiny_vision("qwen2_5_vl")` is a model in float32 and evaluation mode and a processor around a tokenizer of bytes. A
picture of 24 x 16 pixels is a few tokens. As in `agentrl.testing.models`, weights are large, so that a wrong mask,
position or picture shows; that of the picture shows in the logits too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image as pil
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from agentrl.testing.tokenizers import qwen_like_tokenizer

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


class _Processor(Qwen3VLProcessor):
    """The processor of the Qwen VL families without videos, which would need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _qwen(
    model_class: Any, config_class: Any, text: dict[str, Any], vision: dict[str, Any]
) -> tuple[PreTrainedModel, ProcessorMixin]:
    tokenizer = qwen_like_tokenizer()
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    )
    vocabulary = tokenizer.get_added_vocab()
    text_config = {**_TEXT, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **text}
    config = config_class(
        text_config=text_config,
        vision_config={"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, **vision},
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return model_class(config), _Processor(images, tokenizer)


def _rope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*section]}}


def _qwen2_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {"embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "initializer_range": 0.3}
    return _qwen(Qwen2VLForConditionalGeneration, Qwen2VLConfig, _rope(1, 1, 2), vision)


def _qwen2_5_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.3,
    }
    return _qwen(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, _rope(1, 1, 2), vision)


def _qwen3_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.3,
    }
    return _qwen(Qwen3VLForConditionalGeneration, Qwen3VLConfig, {"head_dim": 8, **_rope(2, 1, 1)}, vision)


_FAMILIES: dict[str, Callable[[], tuple[PreTrainedModel, ProcessorMixin]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}

TINY_VISION_FAMILIES = tuple(_FAMILIES)
"""The names that `tiny_vision` knows."""


def tiny_vision(family: str, *, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """Build a random vision-language model and its processor, which has no chat template.

    Args:
        family: One of `TINY_VISION_FAMILIES`.
        seed: Seed of the weights; the global random state is left as it was.

    Raises:
        ValueError: The family is unknown.
    """
    if family not in _FAMILIES:
        raise ValueError(f"unknown family {family!r}, expected one of {', '.join(_FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = _FAMILIES[family]()
    return model.eval(), processor


def picture(number: int, width: int = 24, height: int = 16) -> pil.Image:
    """Make a small picture of noise, a different one for each number."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(number))
    return pil.fromarray(pixels.to(torch.uint8).numpy())
