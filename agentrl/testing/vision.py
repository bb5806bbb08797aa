"""Tiny random vision-language models with their processors, built without a download and without torchvision.

`tiny_vision("qwen2_5_vl")` is a model in float32 and evaluation mode and a processor around a tokenizer of bytes. A
picture of 24 x 16 pixels is a few tokens. As in `agentrl.testing.models`, weights are large, so that a wrong mask,
position or picture shows; that of the picture shows in the logits too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image as Picture
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from agentrl.testing.tokenizers import byte_tokenizer, qwen_like_tokenizer

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
    output = "hidden_size" if config_class is Qwen2VLConfig else "out_hidden_size"
    vision = {**vision, output: text_config["hidden_size"]}
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


def _qwen2_vl(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {"embed_dim": 16, "num_heads": 2, "mlp_ratio": 2, "initializer_range": 0.3}
    return _qwen(Qwen2VLForConditionalGeneration, Qwen2VLConfig, {**_rope(1, 1, 2), **text}, vision)


def _qwen2_5_vl(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.3,
    }
    return _qwen(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, {**_rope(1, 1, 2), **text}, vision)


def _qwen3_vl(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.3,
    }
    return _qwen(Qwen3VLForConditionalGeneration, Qwen3VLConfig, {"head_dim": 8, **_rope(2, 1, 1), **text}, vision)


def _tokens(special: list[str], bos: str, eos: str, **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with special tokens of a family, which puts BOS in front of every text."""
    tokenizer = byte_tokenizer([*dict.fromkeys(["<pad>", bos, eos, *special, *named.values()])])
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=f"{bos} $0", special_tokens=[(bos, backend.token_to_id(bos))])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token=bos, eos_token=eos, extra_special_tokens=named
    )


def _text_of(tokenizer: PreTrainedTokenizerFast, **fields: Any) -> dict[str, Any]:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {**_TEXT, **ids, "vocab_size": len(tokenizer), **fields}


_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_SMALL: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _gemma3(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    tokenizer = _tokens(
        ["<start_of_turn>", "<end_of_turn>"],
        "<bos>",
        "<eos>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    layers = ["sliding_attention", "full_attention"]
    gemma = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": layers}
    config = Gemma3Config(
        text_config=_text_of(tokenizer, **gemma | text),
        vision_config={**_VISION, "model_type": "siglip_vision_model", "image_size": 16, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        tie_word_embeddings=False,
    )
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, **_SMALL)
    return model, Gemma3Processor(images, tokenizer, image_seq_length=4)


class _SmolProcessor(SmolVLMProcessor):
    """The processor of SmolVLM without videos, which would need torchvision and num2words."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, image_seq_len: int = 4
    ) -> None:
        self.fake_image_token, self.global_image_token = "<fake_token_around_image>", "<global-img>"
        self.image_token, self.video_token = "<image>", "<video>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.image_seq_len = image_seq_len
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _split(
    bos: str, classes: tuple[Any, Any, Any, Any], text: dict[str, Any]
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The families that split an image into rows and columns of tiles."""
    model_class, config_class, processor_class, images_class = classes
    grid = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokens(["<fake_token_around_image>", "<image>", "<global-img>", *grid], bos, "<end_of_utterance>")
    images = images_class(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True)
    processor = processor_class(images, tokenizer, image_seq_len=4)
    config = config_class(
        text_config={**_text_of(tokenizer, **text), "model_type": "llama"},
        vision_config={**_VISION, "image_size": 16},
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    return model_class(config), processor


def _idefics3(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    classes = Idefics3ForConditionalGeneration, Idefics3Config, Idefics3Processor, Idefics3ImageProcessorPil
    return _split("<|begin_of_text|>", classes, text)


def _smolvlm(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    classes = SmolVLMForConditionalGeneration, SmolVLMConfig, _SmolProcessor, SmolVLMImageProcessorPil
    return _split("<|im_start|>", classes, text)


def _llava_next(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    tokenizer = _tokens(["<image>"], "<s>", "</s>")
    pinpoints = [[8, 16], [16, 8], [16, 16]]
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**_VISION, image_size=8, projection_dim=16),
        text_config=LlamaConfig(**_text_of(tokenizer, **text)),
        image_token_index=tokenizer.get_added_vocab()["<image>"],
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, image_grid_pinpoints=pinpoints
    )
    processor = LlavaNextProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return LlavaNextForConditionalGeneration(config), processor


class _InternProcessor(InternVLProcessor):
    """The processor of InternVL without videos, which would need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_seq_length = 4
        self.start_image_token, self.end_image_token = tokenizer.start_image_token, tokenizer.end_image_token
        self.start_image_token_id = tokenizer.start_image_token_id
        self.end_image_token_id = tokenizer.end_image_token_id
        self.image_token, self.image_token_id = tokenizer.context_image_token, tokenizer.context_image_token_id
        self.video_token = tokenizer.video_token
        self.multimodal_pattern = re.compile(f"(?P<image>{re.escape(self.image_token)})")
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _internvl(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    tokenizer = qwen_like_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )
    config = InternVLConfig(
        text_config={**_text_of(tokenizer, **text), "model_type": "qwen2"},
        vision_config={**_VISION, "image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 1.0},
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4, **_SMALL
    )
    return InternVLForConditionalGeneration(config), _InternProcessor(images, tokenizer)


def _qwen3_5(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    rope = _rope(2, 1, 1)
    rope["rope_parameters"]["partial_rotary_factor"] = 1.0
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text = {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], **linear, **rope, **text}
    return _qwen(Qwen3_5ForConditionalGeneration, Qwen3_5Config, text, vision)


def _gemma4(text: dict[str, Any]) -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import Gemma4Processor  # up to transformers 5.19 this imports torchvision

    class Processor(Gemma4Processor):
        """Without videos, which would need torchvision, and without sound."""

        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
            self.boi_token, self.eoi_token = tokenizer.boi_token, tokenizer.eoi_token
            self.boa_token = self.eoa_token = ""
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    calls = ["<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
    tokenizer = _tokens(
        ["<|turn>", "<|channel>", "<channel|>", *calls],
        "<bos>",
        "<turn|>",
        boi_token="<|image>",
        eoi_token="<image|>",
        image_token="<|image|>",
    )
    layers = ["sliding_attention", "full_attention"]
    gemma = {"head_dim": 8, "global_head_dim": 8, "sliding_window": 8, "layer_types": layers}
    gemma |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": len(tokenizer)}
    config = Gemma4Config(
        text_config=_text_of(tokenizer, use_bidirectional_attention="vision", **gemma, **text),
        vision_config={**_VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64},
        audio_config=None,
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        tie_word_embeddings=False,
    )
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    return Gemma4ForConditionalGeneration(config), Processor(images, tokenizer)


_FAMILIES: dict[str, Callable[[dict[str, Any]], tuple[PreTrainedModel, ProcessorMixin]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "llava_next": _llava_next,
    "internvl": _internvl,
}

TINY_VISION_FAMILIES = tuple(_FAMILIES)
"""The names that `tiny_vision` knows."""


def tiny_vision(family: str, *, seed: int = 0, **text: Any) -> tuple[PreTrainedModel, Any]:
    """Build a random vision-language model and its processor, which has no chat template.

    Args:
        family: One of `TINY_VISION_FAMILIES`.
        seed: Seed of the weights; the global random state is left as it was.
        **text: Further fields of the config of its language model.

    Raises:
        ValueError: The family is unknown.
    """
    if family not in _FAMILIES:
        raise ValueError(f"unknown family {family!r}, expected one of {', '.join(_FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = _FAMILIES[family](text)
    return model.eval(), processor


def picture(number: int, width: int = 24, height: int = 16) -> Picture.Image:
    """Make a small picture of noise, a different one for each number."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(number))
    return Picture.fromarray(pixels.to(torch.uint8).numpy())
