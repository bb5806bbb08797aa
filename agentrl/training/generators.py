"""Which generator a configuration selects, and how it samples.

`generation_kwargs` win over the arguments of the same name. Those that every generator knows (temperature, top-p, ...)
are simply that; any other one is something only `model.generate` knows, so it selects the plain generator.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from agentrl.generation.base import Generator, Probed, SamplingParams
from agentrl.generation.factory import make_generator
from agentrl.generation.threaded import ThreadedGenerator
from agentrl.training.arguments import RolloutConfig, as_dict

logger = logging.getLogger(__name__)

COMMON = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling arguments that every generator honours and the trainer scores with."""


def sampling_of(args: RolloutConfig) -> SamplingParams:
    """Return how to draw; `max_tokens`, `stop_ids` and `seed` are set for each turn."""
    given = as_dict(args.generation_kwargs) or {}
    chosen = {name: given.get(name, getattr(args, name)) for name in COMMON}
    return dataclasses.replace(SamplingParams(max_tokens=1), **chosen)


def samples_the_policy(generator: Generator, args: RolloutConfig, policy: PreTrainedModel) -> bool:
    """Whether the logprobs that come with samples are the policy's own but for the rounding of float32.

    Correcting for that would only carry noise into the update: how rows share a batch depends on when they arrive.
    """
    mixed = args.bf16 or args.fp16 or getattr(policy, "is_quantized", False) or policy.dtype != torch.float32
    same = isinstance(generator, ThreadedGenerator) and not isinstance(generator, Probed)
    return same and not mixed and not unscored(args)


def unscored(args: RolloutConfig) -> dict[str, object]:
    """What samples are drawn with and the trainer does not score with."""
    given = as_dict(args.generation_kwargs) or {}
    return {name: value for name, value in given.items() if name not in COMMON}


def warn_unscored(special: Mapping[str, object]) -> None:
    """Say that the trainer does not score as it samples."""
    logger.warning(
        "the trainer scores tokens without generation_kwargs %s: where they change the distribution, sampling "
        "is off-policy (see the metric sampling/sampling_logp_difference/max)",
        sorted(special),
    )


def generator_of(
    args: RolloutConfig,
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    autocast: Callable[[], AbstractContextManager[object]],
) -> Generator:
    """Make the generator that a configuration selects.

    Args:
        args: The configuration.
        model: The policy, not wrapped.
        processing_class: What it reads with.
        autocast: Makes the mixed-precision context of a forward pass.
    """
    special = unscored(args)
    if args.use_vllm:
        from agentrl.training.vllm import vllm_generator

        if special:
            warn_unscored(special)
        return vllm_generator(args, model, sampling_of(args), special, processing_class)
    if args.use_transformers_continuous_batching:
        from agentrl.generation.continuous import ContinuousGenerator

        return ContinuousGenerator(model, config=as_dict(args.transformers_continuous_batching_config))
    if special:
        warn_unscored(special)
    return make_generator(
        model,
        generation_kwargs=special or None,
        cache_implementation=args.cache_implementation,
        autocast=autocast,
    )
