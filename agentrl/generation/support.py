"""What the local generator needs to know about a model's architecture.

Structure decides, not a list of names: the cache that transformers itself would build tells which layers
there are.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from agentrl.generation.vision import unknown_vision

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_ATTENTION = ("sdpa", "eager")
"""Attention functions that honour an explicit mask of any pattern."""


def supports(model: PreTrainedModel) -> str | None:
    """Say why the local generator cannot serve a model, or None if it can.

    It needs attention layers whose keys and values can be kept by position, a forward pass that takes
    explicit masks and positions, and one device.
    """
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    adapters = getattr(model, "peft_config", {})
    if any(adapter.is_prompt_learning for adapter in adapters.values()):
        return "its PEFT adapter puts virtual tokens before the prompt"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"its layers are on several devices ({', '.join(sorted(map(str, devices)))})"
    attention = config._attn_implementation
    if attention not in _ATTENTION:
        return f"attention {attention!r} takes no explicit mask; load it with attn_implementation='sdpa'"
    inner: Any = model
    if adapters:
        inner = inner.get_base_model()  # PEFT's own forward passes on what it does not know
    accepted = inspect.signature(inner.forward).parameters
    missing = {"position_ids", cache_argument(model), "logits_to_keep"} - accepted.keys()
    if missing:
        return f"its forward takes no {', '.join(sorted(missing))}"
    if reason := unknown_vision(model, accepted):
        return reason
    layers = DynamicCache(config=config).layers
    if len(layers) != config.num_hidden_layers:
        return f"it keeps {len(layers)} caches for {config.num_hidden_layers} layers"
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"layer {index} keeps a {type(layer).__name__}, not keys and values by position"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "it has layers of chunked attention"
    return None


def cache_argument(model: PreTrainedModel) -> str:
    """Name the argument of a model's forward that takes the cache; it had another name before transformers 5.24."""
    inner: Any = model
    if hasattr(model, "peft_config"):
        inner = inner.get_base_model()
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Name the kinds of attention layers, each with its sliding window in tokens (None: all tokens)."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    windows: dict[str, int | None] = {}
    for layer in layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            windows["sliding_attention"] = layer.sliding_window
        else:
            windows["full_attention"] = None
    return windows


def context_length(model: PreTrainedModel) -> int | None:
    """Read from the config how many tokens a row may have; None if it does not say."""
    config = model.config.get_text_config(decoder=True)
    for name in _CONTEXT_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
