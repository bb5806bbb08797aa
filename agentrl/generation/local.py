"""The in-process generator: continuous batching on a transformers model, keys and values kept between turns.

Any number of sessions sample at once; each joins and leaves the running batch when it likes. A turn
prefills only what its row has more than the previous turn, and a prompt that several sessions share is
prefilled once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from agentrl.errors import ConfigurationError
from agentrl.generation.base import GenerationStats
from agentrl.generation.runner import ModelRunner
from agentrl.generation.scheduler import Scheduler
from agentrl.generation.slots import SlotPool
from agentrl.generation.support import context_length, supports
from agentrl.generation.threaded import ThreadedGenerator

logger = logging.getLogger(__name__)


class LocalGenerator(ThreadedGenerator):
    """Samples turns from a decoder model in this process; see `Generator` for the contract.

    Args:
        model: A decoder model of transformers, PEFT-wrapped or not, in training or evaluation mode.
        max_cache_tokens: Most tokens whose keys and values are kept, over all sessions. When they do not
            suffice, sessions between turns are evicted, and then requests wait. Default: 30% of the memory
            that is free at the first request; the memory is taken only when it is needed.
        max_batch_tokens: Most tokens of prompts in one forward pass, padding included.
        autocast: Makes the autocast context of a forward pass, e.g. `accelerator.autocast`.

    Raises:
        ConfigurationError: The model's state cannot be kept by position (`supports` says why), or a size is
            not positive.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_cache_tokens: int | None = None,
        max_batch_tokens: int = 4096,
        autocast: Callable[[], AbstractContextManager[object]] | None = None,
    ):
        if reason := supports(model):
            raise ConfigurationError(
                f"LocalGenerator cannot serve {type(model).__name__}: {reason}; use PlainGenerator "
                "(make_generator chooses it by itself)"
            )
        for name, value in (("max_cache_tokens", max_cache_tokens), ("max_batch_tokens", max_batch_tokens)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}, expected at least 1")
        stats = GenerationStats()
        runner = ModelRunner(model, stats, autocast)

        def budget() -> int:
            if max_cache_tokens is not None:
                return max_cache_tokens
            tokens, reason = runner.default_budget()
            logger.info("max_cache_tokens is not set; the generator keeps at most %s", reason)
            return tokens

        scheduler = Scheduler(runner, SlotPool(runner.cache, budget), max_batch_tokens, stats)
        super().__init__(scheduler, stats, context_length(model))
