"""One forward pass over rows that continue their slots: token ids in, logits of each row's last token out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, modeling_utils

from agentrl.generation.base import GenerationStats
from agentrl.generation.cache import SlotCache, plan_step
from agentrl.generation.support import attention_windows, cache_argument
from agentrl.generation.vision import VisionModel, blocks, ids_of
from agentrl.types import Image

_MEMORY_SHARE = 0.3
"""Share of the free memory that the cache may take by default."""

_EACH_ROW = hasattr(modeling_utils, "slice_logits_to_keep")
"""Whether `logits_to_keep` may name other columns for each row, as since transformers 5.24."""


class Chunk(NamedTuple):
    """Tokens with which a row continues its slot.

    Attributes:
        keys: The tokens, at least one; see `agentrl.generation.vision` for those of images.
        slot: The row's slot.
        start: Place of the first token in the row; the places before it are in the slot.
        images: The images among the tokens.
        positions: Positions of the tokens, (axes, count); None where that is their place.
    """

    keys: list[int]
    slot: int
    start: int
    images: list[Image]
    positions: Tensor | None


class ModelRunner:
    """Runs a decoder model on a `SlotCache`."""

    def __init__(
        self,
        model: PreTrainedModel,
        stats: GenerationStats,
        autocast: Callable[[], AbstractContextManager[object]] | None = None,
    ):
        self._stats = stats
        self.replace_model(model)
        self.config = model.config.get_text_config(decoder=True)
        self.windows = attention_windows(model)
        self.cache = SlotCache(self.config.num_hidden_layers)
        self._autocast = autocast

    def replace_model(self, model: PreTrainedModel) -> None:
        """Run a copy of the model from now on."""
        self.model, self.vision = model, VisionModel(model, self._stats)
        self._cache_argument = cache_argument(model)

    @property
    def device(self) -> torch.device:
        """Where the model is now; it may have been moved since construction."""
        return next(self.model.parameters()).device

    def forward(self, chunks_B: Sequence[Chunk]) -> Tensor:
        """Run B rows and write their keys and values; returns the logits [B, V] that follow each row's last token."""
        counts_B = [len(chunk.keys) for chunk in chunks_B]
        device = self.device
        step, place_BQ = plan_step(
            [chunk.slot for chunk in chunks_B], [chunk.start for chunk in chunks_B], counts_B, device
        )
        width = max(counts_B)
        ids_B = [ids_of(chunk.keys, self.vision.placeholder_id) for chunk in chunks_B]
        input_BQ = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in ids_B], device=device)
        self.cache.step = step
        columns_K, which_B = _wanted(torch.tensor(counts_B, device=device) - 1)
        with inference(self.model, self._autocast):
            output = self.model(
                input_ids=input_BQ,
                attention_mask=self._masks(chunks_B, place_BQ, step.length),
                position_ids=self._positions(chunks_B, place_BQ),
                use_cache=True,
                logits_to_keep=1 if width == 1 else columns_K,
                **{self._cache_argument: self.cache},
                **self.vision.features([image for chunk in chunks_B for image in chunk.images]),
            )
        if which_B is None or width == 1:
            return output.logits[:, 0]
        return output.logits[torch.arange(len(counts_B), device=device), which_B]

    def _positions(self, chunks_B: Sequence[Chunk], place_BQ: Tensor) -> Tensor:
        """Positions, [B, Q], or [axes, B, Q] where a row has some of its own."""
        given = [(row, chunk.positions) for row, chunk in enumerate(chunks_B) if chunk.positions is not None]
        if not given:
            return place_BQ
        position_ABQ = place_BQ.expand(len(given[0][1]), -1, -1).clone()
        for row, own in given:
            position_ABQ[:, row, : own.shape[1]] = own.to(place_BQ.device)
        return position_ABQ

    def default_budget(self) -> tuple[int, str]:
        """Tokens that fit into the default share of the free memory, and that in words."""
        cache = DynamicCache(config=self.config)
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with inference(self.model, self._autocast):
            self.model(
                input_ids=token_11,
                attention_mask=torch.ones_like(token_11),
                use_cache=True,
                **{self._cache_argument: cache},
            )
        kept: list[Any] = cache.layers
        bytes_per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = psutil.virtual_memory().available
        tokens = int(free * _MEMORY_SHARE) // bytes_per_token
        return tokens, (
            f"{tokens} tokens: {_MEMORY_SHARE:.0%} of the {free / 2**30:.1f} GiB free on {self.device}, "
            f"{bytes_per_token / 2**10:.2f} KiB a token"
        )

    def _masks(self, chunks_B: Sequence[Chunk], position_BQ: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """What each token may attend to [B, 1, Q, length]; by kind of layer where there are several kinds."""
        key_K = torch.arange(length, device=position_BQ.device)
        position_B1Q1 = position_BQ[:, None, :, None]
        causal = key_K <= position_B1Q1
        if self.vision.bidirectional:
            for row, chunk in enumerate(chunks_B):
                for start, stop in blocks(chunk.keys):
                    causal[row, :, start:stop, chunk.start + start : chunk.start + stop] = True
        masks = {}
        for kind, window in self.windows.items():
            mask = causal if window is None else causal & (key_K > position_B1Q1 - window)
            masks[kind] = self._additive(mask) if self.config._attn_implementation == "eager" else mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, mask: Tensor) -> Tensor:
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros_like(mask, dtype=self.model.dtype).masked_fill_(~mask, lowest)


def _wanted(last_B: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which columns' logits to ask for, and which of the answers is each row's, None where it is the only one."""
    return (last_B[:, None], None) if _EACH_ROW else torch.unique(last_B, return_inverse=True)


@contextmanager
def inference(model: nn.Module, autocast: Callable[[], AbstractContextManager[object]] | None) -> Iterator[None]:
    """Run a model without gradients, dropout and gradient checkpointing.

    Gradients are off by `no_grad` and not by inference mode, so that nothing made here (a weight that
    autocast has cast, say) is unusable for training afterwards.
    """
    device = next(model.parameters()).device
    with ExitStack() as stack:
        if device.type == "cuda":  # the current device is a property of the thread
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_evaluating(model))
        if autocast is not None:
            stack.enter_context(autocast())
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradient checkpointing off; each module gets its own mode back afterwards."""
    training = _in_training(model)
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _in_training(model: nn.Module) -> list[nn.Module]:
    """The modules in training mode; `modules()` and `children()` would name each on the way, at every token."""
    modules = [model]
    for module in modules:
        modules += [child for child in module._modules.values() if child is not None]
    return [module for module in modules if module.training]
