"""Chooses the in-process generator for a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedModel

from agentrl.generation.local import LocalGenerator
from agentrl.generation.plain import PlainGenerator
from agentrl.generation.support import supports

logger = logging.getLogger(__name__)


def make_generator(
    model: PreTrainedModel,
    *,
    generation_kwargs: Mapping[str, Any] | None = None,
    cache_implementation: str | None = None,
    max_cache_tokens: int | None = None,
    max_batch_tokens: int = 4096,
    autocast: Callable[[], AbstractContextManager[object]] | None = None,
) -> LocalGenerator | PlainGenerator:
    """Make a `LocalGenerator`, or a `PlainGenerator` where the model or a setting rules the local one out.

    Falling back is logged as a warning, with the reason.

    Args:
        model: The model, on its device.
        generation_kwargs: Fields of `GenerationConfig`; only `generate` honours them.
        cache_implementation: A kind of cache of transformers; only `generate` honours it.
        max_cache_tokens: See `LocalGenerator`.
        max_batch_tokens: See `LocalGenerator`.
        autocast: Makes the autocast context of a forward pass.
    """
    reason = supports(model)
    if generation_kwargs:
        reason = f"generation_kwargs are set ({', '.join(generation_kwargs)})"
    elif cache_implementation is not None:
        reason = f"cache_implementation is set ({cache_implementation!r})"
    if reason is None:
        return LocalGenerator(
            model, max_cache_tokens=max_cache_tokens, max_batch_tokens=max_batch_tokens, autocast=autocast
        )
    logger.warning(
        "%s is sampled with model.generate, because %s: turns are sampled in batches and each turn prefills "
        "its whole row again",
        type(model).__name__,
        reason,
    )
    return PlainGenerator(
        model,
        generation_kwargs=generation_kwargs,
        cache_implementation=cache_implementation,
        autocast=autocast,
    )
