"""Generation by `model.generate`, for models and settings that the local generator cannot serve.

The requests that wait at the moment and sample alike become one left-padded batch; whoever comes later waits for the
whole batch, and every turn prefills its whole row. Images are encoded once all the same: `generate` gets features,
which stay until the weights change. What is kept is exactness: the ids up to and including the stop id, the logprobs
of the distribution that `generate` has processed, and one seed a turn. The draw itself is ours (the last logits
processor leaves a single token), so a turn's tokens do not depend on the rows beside it, up to floating point.
Settings that look at the padded ids (`no_repeat_ngram_size`, say) see the padding too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from agentrl.chat.images import image_types, join_inputs, model_ids
from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.runner import inference
from agentrl.generation.sampling import draw, settings
from agentrl.generation.support import context_length
from agentrl.generation.threaded import Answer, ThreadedGenerator, explain
from agentrl.generation.vision import VisionModel, vision_inputs
from agentrl.types import FinishReason, ImageSpan, Sample

_REFUSED = {
    "do_sample": "rollouts are sampled; for nearly greedy ones lower the temperature",
    "eos_token_id": "the stop ids come from the tokenizer and the chat template",
    "max_length": "set max_completion_length",
    "max_new_tokens": "set max_completion_length",
    "num_beams": "beam search has no sampling distribution",
    "num_return_sequences": "the group size decides how many rollouts a prompt gets",
    "prompt_lookup_num_tokens": "assisted generation has no logprobs",
}


class PlainGenerator(ThreadedGenerator):
    """Samples turns with `model.generate`; see `Generator` for the contract and the module for its limits.

    Args:
        model: A model of transformers with a `generate` method.
        generation_kwargs: Further fields of `GenerationConfig`; they win over the sampling parameters.
        cache_implementation: The kind of cache that `generate` uses, e.g. "static".
        autocast: Makes the autocast context of a batch.

    Raises:
        ConfigurationError: A field of `generation_kwargs` is unknown or would change what a sample is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        generation_kwargs: Mapping[str, Any] | None = None,
        cache_implementation: str | None = None,
        autocast: Callable[[], AbstractContextManager[object]] | None = None,
    ):
        options = dict(generation_kwargs or {})
        for name in options:
            if name in _REFUSED:
                raise ConfigurationError(f"generation_kwargs[{name!r}] cannot be set: {_REFUSED[name]}")
            if not hasattr(GenerationConfig(), name):
                raise ConfigurationError(f"generation_kwargs[{name!r}] is not a field of GenerationConfig")
        if cache_implementation is not None:
            options["cache_implementation"] = cache_implementation
        stats = GenerationStats()
        super().__init__(_Batches(model, options, autocast, stats), stats, context_length(model))


@dataclass(eq=False, slots=True)
class _Row:
    """A request and what has been drawn for it."""

    name: str
    ids: list[int]
    params: SamplingParams
    done: Answer
    images: tuple[ImageSpan, ...] = ()
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    asked: float = field(default_factory=time.monotonic)
    prefill: float | None = None
    uniforms: Random = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = Random(self.params.seed)

    @property
    def finish(self) -> FinishReason | None:
        """Why the turn is over, None if it is not."""
        if self.sampled and self.sampled[-1] in self.params.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.sampled) >= self.params.max_tokens else None


class _Batches:
    """The core: one call of `generate` a step."""

    def __init__(
        self,
        model: Any,  # PreTrainedModel, whose mixins mypy cannot follow
        options: dict[str, Any],
        autocast: Callable[[], AbstractContextManager[object]] | None,
        stats: GenerationStats,
    ):
        self._options = options
        self._autocast = autocast
        self._stats = stats
        self._version = 0
        self._rows: list[_Row] = []
        self.model = model

    @property
    def model(self) -> Any:
        """The model that is run."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model, self._vision = model, VisionModel(model, self._stats)

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def submit(
        self, name: str, ids: list[int], params: SamplingParams, done: Answer, images: tuple[ImageSpan, ...] = ()
    ) -> _Row:
        placeholder_id = self._vision.placeholder_id
        if images and placeholder_id is None:
            raise GenerationError("the row has images, but the model sees none; pass a vision-language model")
        row = _Row(name, model_ids(ids, images, placeholder_id), params, done, images)
        self._vision.hold(name, images)
        self._rows.append(row)
        return row

    def cancel(self, request: _Row) -> None:
        if request in self._rows:
            self._rows.remove(request)

    def release(self, name: str) -> None:
        """Forget a session; of its row nothing was kept but the features of images."""
        self._vision.let_go(name)

    def renew(self, version: int) -> None:
        self._version = version
        self._vision.forget()

    def fail(self, error: Exception) -> None:
        rows, self._rows = self._rows, []
        for row in rows:
            row.done(explain(row.name, error))

    def step(self) -> None:
        first = settings(self._rows[0].params)
        batch = [row for row in self._rows if settings(row.params) == first]
        self._rows = [row for row in self._rows if row not in batch]
        try:
            with inference(self.model, self._autocast):
                self._generate(batch)
        except Exception as error:  # noqa: BLE001 - whatever a model raises has to reach those who wait
            for row in batch:
                row.done(explain(row.name, error))
            return
        self._stats.prefilled_tokens += sum(len(row.ids) for row in batch)
        self._stats.decoded_tokens += sum(len(row.sampled) for row in batch)
        self._stats.forward_passes += max(len(row.sampled) for row in batch)
        for row in batch:
            finish = row.finish or FinishReason.LENGTH
            row.done(Sample(row.sampled, row.logprobs, finish, self._version, prefill=row.prefill))

    def _generate(self, batch: list[_Row]) -> None:
        """Run `generate` on a batch; the tokens arrive in the rows."""
        params = batch[0].params
        device = next(self.model.parameters()).device
        width = max(len(row.ids) for row in batch)
        pad_id = self.model.config.get_text_config(decoder=True).pad_token_id
        pad_id = 0 if pad_id is None else pad_id
        input_BT = torch.tensor([[pad_id] * (width - len(row.ids)) + row.ids for row in batch], device=device)
        mask_BT = torch.tensor([[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in batch], device=device)
        fields = {
            "do_sample": True,
            **settings(params),
            "max_new_tokens": max(row.params.max_tokens for row in batch),
            "pad_token_id": pad_id,
        } | self._options
        penalty = fields.pop("repetition_penalty")  # that of `generate` would punish the padding: `_Penalty`
        first = [_Penalty(penalty, mask_BT)] if penalty != 1.0 else []

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            **rest: Any,
        ) -> Any:
            # The model's own EOS ids do not count: a turn ends with its stop ids.
            others = [criterion for criterion in stopping_criteria if not hasattr(criterion, "eos_token_id")]
            return model._sample(
                input_ids,
                logits_processor=LogitsProcessorList([*first, *logits_processor, _Draw(batch)]),
                stopping_criteria=StoppingCriteriaList([*others, _TurnsEnd(batch)]),
                **rest,
            )

        with _own_defaults(self.model):
            self.model.generate(
                input_ids=input_BT,
                attention_mask=mask_BT,
                generation_config=GenerationConfig(**fields),
                custom_generate=decode,
                **self._image_inputs(batch, width, device),
            )

    def _image_inputs(self, batch: list[_Row], width: int, device: torch.device) -> dict[str, Any]:
        """What `generate` is told of images; nothing where no row has one."""
        images = [span.image for row in batch for span in row.images]
        if not images:
            return {}
        placeholder_id = self._vision.placeholder_id
        assert placeholder_id is not None
        types = [image_types(row.ids, row.images, placeholder_id) for row in batch]
        types_BT = torch.tensor([[0] * (width - len(own)) + own for own in types], device=device)
        inputs = join_inputs(images)
        if not self._vision.takes_features:
            self._stats.images_encoded += len(images)
            return vision_inputs(self.model, inputs, types_BT)
        del inputs["pixel_values"]
        return vision_inputs(self.model, inputs, types_BT) | self._vision.features(images)


@contextmanager
def _own_defaults(model: Any) -> Iterator[None]:
    """Hide the model's generation config, from which `generate` fills whatever is not set.

    A checkpoint's taste (a penalty, a top-k) would change the distribution behind the trainer's back.
    """
    holders = [model, model.get_base_model()] if hasattr(model, "peft_config") else [model]
    saved = [holder.generation_config for holder in holders]
    try:
        for holder in holders:
            holder.generation_config = GenerationConfig()
        yield
    finally:
        for holder, config in zip(holders, saved, strict=True):
            holder.generation_config = config


class _Penalty(LogitsProcessor):
    """The repetition penalty, over the real tokens of each row."""

    def __init__(self, penalty: float, mask_BT: Tensor):
        self._penalty = penalty
        self._mask_BT = mask_BT.bool()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        real_BT = torch.ones_like(input_ids, dtype=torch.bool)
        real_BT[:, : self._mask_BT.shape[1]] = self._mask_BT
        seen_BV = torch.zeros_like(scores).scatter_add_(-1, input_ids, real_BT.to(scores.dtype)) > 0
        penalised = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(seen_BV, penalised, scores)


class _Draw(LogitsProcessor):
    """The last processor: draws each row's token by the row's seed and leaves no other one."""

    def __init__(self, batch: list[_Row]):
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs_BV = scores.float().log_softmax(-1)
        # A finished row has its turn; it only keeps its place until the batch is finished.
        ids_B = draw(logprobs_BV, [0.0 if row.finish else row.uniforms.random() for row in self._batch])
        logprobs_B = logprobs_BV.gather(-1, ids_B[:, None])[:, 0]
        for row, token, logprob in zip(self._batch, ids_B.tolist(), logprobs_B.tolist(), strict=True):
            if row.finish is None:
                row.sampled.append(token)
                row.logprobs.append(logprob)
                if row.prefill is None:
                    row.prefill = time.monotonic() - row.asked
        return torch.full_like(scores, -torch.inf).scatter_(-1, ids_B[:, None], 0.0)


class _TurnsEnd(StoppingCriteria):
    """Ends each row at its own stop ids and its own length."""

    def __init__(self, batch: list[_Row]):
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([row.finish is not None for row in self._batch], device=input_ids.device)
