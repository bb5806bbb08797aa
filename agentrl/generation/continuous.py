"""transformers' own continuous batching engine behind the `Generator` protocol.

The engine holds the model (in evaluation mode) and its paged cache from the first request until every
session is released or the weights change; then the model gets its mode back and the memory is free for
training. All requests of such a period sample alike, because the engine knows one set of processors. Tokens
are drawn from torch's global random state: they cannot be repeated rollout by rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.sampling import settings
from agentrl.generation.support import context_length
from agentrl.generation.threaded import Answer, ThreadedGenerator, explain
from agentrl.types import FinishReason, Sample

_ATTENTION = ("sdpa", "eager", "paged|eager", "flash_attention_2", "flash_attention_3")
_ON_CPU = {
    # By default the engine sizes its cache by the free memory, which takes half a minute on a CPU.
    "page_size": 32,
    "num_blocks": 1024,
    "max_batch_tokens": 512,
    "use_cuda_graph": False,
    "use_async_batching": False,
}
_ON_GPU = {"max_memory_percent": 0.5}  # the engine's own default leaves no memory for the backward pass
_POLL = 0.01
"""Seconds to wait for a result before looking at new requests."""


class ContinuousGenerator(ThreadedGenerator):
    """Samples turns with transformers' continuous batching; see `Generator` for the contract.

    Args:
        model: A decoder model of transformers.
        config: Fields of `ContinuousBatchingConfig` that replace the defaults: half of the free memory on a
            GPU, a cache of 32768 tokens on the CPU.

    Raises:
        ConfigurationError: The engine cannot serve this model, or a field is unknown or fixed.
    """

    def __init__(self, model: PreTrainedModel, *, config: Mapping[str, Any] | None = None):
        given = dict(config or {})
        known = {field.name for field in fields(ContinuousBatchingConfig)}
        for name in given:
            if name not in known:
                raise ConfigurationError(
                    f"transformers_continuous_batching_config: ContinuousBatchingConfig has no field {name!r}"
                )
        if not given.get("return_logprobs", True):
            raise ConfigurationError(
                "transformers_continuous_batching_config: return_logprobs is False, but training needs them"
            )
        if reason := refuses(model):
            raise ConfigurationError(
                f"use_transformers_continuous_batching cannot serve {type(model).__name__}: {reason}; "
                "leave it off to use the local generator"
            )
        device = next(model.parameters()).device
        defaults = _ON_CPU if device.type == "cpu" else _ON_GPU
        stats = GenerationStats()
        engine = _Engine(model, {**defaults, **given, "return_logprobs": True}, stats)
        super().__init__(engine, stats, context_length(model))

    def own_weights(self) -> None:
        """Refuse: the engine of transformers cannot change weights while it samples."""
        raise ConfigurationError(
            "use_transformers_continuous_batching: the engine of transformers gives up its turns when weights change, "
            "so it cannot sample while the policy is trained; leave it off to use the local generator"
        )


def refuses(model: PreTrainedModel) -> str | None:
    """Say why the engine cannot serve a model, or None if it can."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if not hasattr(model, "init_continuous_batching"):
        return "it has no continuous batching"
    text = model.config.get_text_config(decoder=True)
    if text._attn_implementation not in _ATTENTION:
        return f"attention {text._attn_implementation!r}, expected one of {', '.join(_ATTENTION)}"
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    device = next(model.parameters()).device.type
    if device not in ("cpu", "cuda", "xpu", "mps"):
        return f"it is on {device!r}"
    return None


@dataclass(eq=False, slots=True)
class _Pending:
    """A request in the engine."""

    id: str
    name: str
    ids: list[int]
    params: SamplingParams
    done: Answer


class _Engine:
    """The core: a manager of transformers, made for the first request and stopped after the last session."""

    def __init__(self, model: PreTrainedModel, config: dict[str, Any], stats: GenerationStats):
        self.model: Any = model
        self._config = config
        self._stats = stats
        self._version = 0
        self._manager: Any = None
        self._settings: dict[str, Any] | None = None
        self._training: list[torch.nn.Module] = []
        self._pending: dict[str, _Pending] = {}
        self._sessions: set[str] = set()
        self._ids = count()

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def submit(self, name: str, ids: list[int], params: SamplingParams, done: Answer) -> _Pending:
        if params.repetition_penalty != 1.0:
            raise GenerationError(
                "transformers' continuous batching has no repetition penalty; set repetition_penalty to 1.0 "
                "or use_transformers_continuous_batching to False"
            )
        room = self._config.get("num_blocks")
        if room is not None and len(ids) + params.max_tokens > room * self._config.get("page_size", 256):
            raise GenerationError(
                f"{len(ids)} tokens and up to {params.max_tokens} new ones exceed the engine's cache; raise "
                "num_blocks in transformers_continuous_batching_config"
            )
        if self._settings != settings(params):
            if self._pending:
                raise GenerationError(
                    "all turns in transformers' continuous batching must sample alike, and others are running"
                )
            self._stop()
            self._start(params)
        request = _Pending(f"agentrl-{next(self._ids)}", name, ids, params, done)
        self._sessions.add(name)
        self._pending[request.id] = request
        self._manager.add_request(
            ids,
            request_id=request.id,
            max_new_tokens=params.max_tokens,
            eos_token_id=sorted(params.stop_ids) or -1,
        )
        return request

    def cancel(self, request: _Pending) -> None:
        if self._pending.pop(request.id, None) is not None:
            self._manager.cancel_request(request.id)
            self._rest()

    def release(self, name: str) -> None:
        self._sessions.discard(name)
        self._rest()

    def renew(self, version: int) -> None:
        self._version = version
        self.fail(GenerationError("the weights changed while the turn was being sampled"))

    def fail(self, error: Exception) -> None:
        pending, self._pending = self._pending, {}
        self._stop()
        for request in pending.values():
            request.done(explain(request.name, error))

    def step(self) -> None:
        result = self._manager.get_result(timeout=_POLL)
        if result is None:
            if not self._manager.is_running():
                error = self._manager.background_thread_status.fatal_error
                raise GenerationError(f"transformers' continuous batching stopped: {error!r}")
            return
        request = self._pending.pop(result.request_id, None)
        if request is None:
            return
        if result.error is not None:
            request.done(explain(request.name, RuntimeError(result.error)))
        else:
            request.done(self._sample(request, result.generated_tokens, result.logprobs))
        self._rest()

    def _sample(self, request: _Pending, ids: list[int], logprobs: list[float]) -> Sample:
        self._stats.prefilled_tokens += len(request.ids)
        self._stats.decoded_tokens += len(ids)
        stopped = bool(ids) and ids[-1] in request.params.stop_ids
        return Sample(ids, logprobs, FinishReason.STOP if stopped else FinishReason.LENGTH, self._version)

    def _start(self, params: SamplingParams) -> None:
        self._training = [module for module in self.model.modules() if module.training]
        config = GenerationConfig(do_sample=True, eos_token_id=-1, max_new_tokens=params.max_tokens, **settings(params))
        batching = ContinuousBatchingConfig(**self._config)
        self._manager = self.model.init_continuous_batching(config, continuous_batching_config=batching)
        self._manager.start()
        self._settings = settings(params)

    def _rest(self) -> None:
        """Give the model back once nobody can ask for a turn."""
        if not self._sessions and not self._pending:
            self._stop()

    def _stop(self) -> None:
        if self._manager is not None:
            self._manager.stop(hard_stop=True)
            self._manager = self._settings = None
        for module in self._training:
            module.training = True
        self._training = []
