"""From what the user passes as `model` and `processing_class` to a model and a tokenizer ready for training."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from agentrl.chat.template import tokenizer_of
from agentrl.errors import ConfigurationError
from agentrl.generation.vision import placeholder_id
from agentrl.training.arguments import RolloutConfig, as_dict
from agentrl.training.preparation import cast_head, disable_dropout, freeze_vision_tower

logger = logging.getLogger(__name__)


def load_model(
    model: str | PreTrainedModel,
    args: RolloutConfig,
    *,
    quantization_config: Any = None,
    peft_config: Any = None,
) -> PreTrainedModel:
    """Load or take the policy and prepare it for training.

    Args:
        model: A hub name, a folder, a `PreTrainedModel` or a PEFT model.
        args: `model_init_kwargs`, `trust_remote_code`, `freeze_vision_tower`, `disable_dropout` and
            `cast_lm_head_to_fp32` are read.
        quantization_config: For loading by name; ignored for a model object, which is loaded already.
        peft_config: Wraps the model in adapters.

    Raises:
        ConfigurationError: The arguments contradict each other.
    """
    if isinstance(model, str):
        model = _load_by_name(model, args, quantization_config)
    elif args.model_init_kwargs is not None:
        raise ConfigurationError(
            "model_init_kwargs is for loading a model by name; `model` is a model object already. Drop one of them."
        )
    if peft_config is not None:
        model = _add_adapters(model, peft_config)
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        raise ConfigurationError(
            "prompt-learning adapters put virtual tokens before each row, so that logits and tokens no longer stand "
            "side by side; use LoRA or another adapter of weights."
        )
    if args.freeze_vision_tower:
        freeze_vision_tower(model)
    if args.disable_dropout:
        disable_dropout(model)
    if getattr(args, "cast_lm_head_to_fp32", False):  # GRPO only
        cast_head(model)
    return model


def load_processing_class(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None, model: PreTrainedModel, args: RolloutConfig
) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Load or take the tokenizer, or the processor of a vision-language model.

    A tokenizer without a pad token pads with EOS, and says so.
    """
    if processing_class is None:
        name = getattr(model.config, "_name_or_path", "")
        if not name:
            raise ConfigurationError(
                "the model was not loaded from a name or a folder, so its tokenizer is unknown; pass processing_class."
            )
        revision = (as_dict(args.model_init_kwargs) or {}).get("revision")
        loader: Any = AutoTokenizer if placeholder_id(model) is None else AutoProcessor
        processing_class = loader.from_pretrained(
            name, trust_remote_code=args.trust_remote_code, **({"revision": revision} if revision else {})
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
        raise ConfigurationError(
            f"processing_class is a {type(processing_class).__name__}; expected a tokenizer, or the processor of a "
            "vision-language model."
        )
    if isinstance(processing_class, ProcessorMixin) and placeholder_id(model) is None:
        raise ConfigurationError(
            f"processing_class is a {type(processing_class).__name__}, but {type(model).__name__} sees no images; pass "
            "a tokenizer."
        )
    tokenizer = tokenizer_of(processing_class)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigurationError("the tokenizer has neither a pad token nor an EOS token; set tokenizer.pad_token.")
        logger.warning("the tokenizer has no pad token; padding with its EOS token %r", tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return processing_class


def declared_eos_ids(model: PreTrainedModel) -> set[int]:
    """Every EOS id that the model's generation config or config declares."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)


def _load_by_name(name: str, args: RolloutConfig, quantization_config: Any) -> PreTrainedModel:
    kwargs: dict[str, Any] = {"dtype": "float32", **(as_dict(args.model_init_kwargs) or {})}
    kwargs["trust_remote_code"] = args.trust_remote_code
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] != "auto":
        kwargs["dtype"] = getattr(torch, kwargs["dtype"])
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    config = AutoConfig.from_pretrained(
        name, trust_remote_code=args.trust_remote_code, **{k: kwargs[k] for k in ("revision",) if k in kwargs}
    )
    if config.is_encoder_decoder:
        raise ConfigurationError(f"{name} is an encoder-decoder model; agentrl trains causal language models.")
    sees = getattr(config, "vision_config", None) is not None and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    loader: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return loader.from_pretrained(name, **kwargs)


def _add_adapters(model: PreTrainedModel, peft_config: Any) -> PreTrainedModel:
    try:
        from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
    except ImportError:
        raise ConfigurationError("peft_config needs the extra `peft`: pip install 'agentrl[peft]'.") from None
    if isinstance(model, PeftModel):
        raise ConfigurationError("`model` is a PEFT model already; drop peft_config.")
    if getattr(model, "is_quantized", False):
        # Whether activations are recomputed is said by the configuration; the Trainer sees to it.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, peft_config)
