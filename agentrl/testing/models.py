"""Tiny random models of real architectures, built in a few milliseconds and without a download.

`tiny_model("qwen3")` is a `Qwen3ForCausalLM` in float32 and evaluation mode. The weights are larger than the
usual initialisation, so that distributions are far from uniform and a wrong mask or position shows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_ROTARY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 64}
_GEMMA3: dict[str, Any] = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}

_FAMILIES: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _ROTARY),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_ROTARY, "head_dim": 8}),
    "llama": (LlamaForCausalLM, LlamaConfig, _ROTARY),
    "mistral": (MistralForCausalLM, MistralConfig, {**_ROTARY, "sliding_window": 8}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_ROTARY, **_GEMMA3}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
}

TINY_FAMILIES = tuple(_FAMILIES)
"""The names that `tiny_model` knows; Mistral and Gemma 3 have a sliding window of 8 tokens."""


def tiny_model(
    family: str,
    *,
    vocab_size: int = 64,
    seed: int = 0,
    max_position_embeddings: int = 512,
    **overrides: Any,
) -> PreTrainedModel:
    """Build a random model of a family with two layers and a hidden size of 32.

    Args:
        family: One of `TINY_FAMILIES`.
        vocab_size: Number of token ids.
        seed: Seed of the weights; the global random state is left as it was.
        max_position_embeddings: Context length in tokens.
        **overrides: Further fields of the model's config.

    Raises:
        ValueError: The family is unknown.
    """
    if family not in _FAMILIES:
        raise ValueError(f"unknown model family {family!r}, expected one of {', '.join(_FAMILIES)}")
    model_class, config_class, fields = _FAMILIES[family]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    config = config_class(
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        **{**fields, **special, **overrides},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.eval()
