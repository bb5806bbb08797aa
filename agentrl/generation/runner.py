"""One forward pass over rows that continue their slots: token ids in, logits of each row's last token out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, modeling_utils

from agentrl.generation.cache import SlotCache, plan_step
from agentrl.generation.support import attention_windows, cache_argument

_MEMORY_SHARE = 0.3
"""Share of the free memory that the cache may take by default."""

_EACH_ROW = hasattr(modeling_utils, "slice_logits_to_keep")
"""Whether `logits_to_keep` may name other columns for each row, as since transformers 5.24."""


class ModelRunner:
    """Runs a decoder model on a `SlotCache`."""

    def __init__(self, model: PreTrainedModel, autocast: Callable[[], AbstractContextManager[object]] | None = None):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.windows = attention_windows(model)
        self.cache = SlotCache(self.config.num_hidden_layers)
        self._autocast = autocast

    @property
    def device(self) -> torch.device:
        """Where the model is now; it may have been moved since construction."""
        return next(self.model.parameters()).device

    def forward(self, tokens_B: Sequence[Sequence[int]], slots_B: Sequence[int], starts_B: Sequence[int]) -> Tensor:
        """Run B rows and write their keys and values.

        Args:
            tokens_B: New tokens of each row, at least one.
            slots_B: Slot of each row.
            starts_B: Position of each row's first new token; the positions before it are in the slot.

        Returns:
            Logits [B, V] that follow each row's last token.
        """
        counts_B = [len(tokens) for tokens in tokens_B]
        device = self.device
        step, position_BQ = plan_step(slots_B, starts_B, counts_B, device)
        width = max(counts_B)
        input_BQ = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in tokens_B], device=device)
        self.cache.step = step
        columns_K, which_B = _wanted(torch.tensor(counts_B, device=device) - 1)
        with inference(self.model, self._autocast):
            output = self.model(
                input_ids=input_BQ,
                attention_mask=self._masks(position_BQ, step.length),
                position_ids=position_BQ,
                use_cache=True,
                logits_to_keep=1 if width == 1 else columns_K,
                **{cache_argument(self.model): self.cache},
            )
        if which_B is None or width == 1:
            return output.logits[:, 0]
        return output.logits[torch.arange(len(counts_B), device=device), which_B]

    def default_budget(self) -> tuple[int, str]:
        """Tokens that fit into the default share of the free memory, and that in words."""
        cache = DynamicCache(config=self.config)
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with inference(self.model, self._autocast):
            self.model(
                input_ids=token_11,
                attention_mask=torch.ones_like(token_11),
                use_cache=True,
                **{cache_argument(self.model): cache},
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

    def _masks(self, position_BQ: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """What each token may attend to [B, 1, Q, length]; by kind of layer where there are several kinds."""
        key_K = torch.arange(length, device=position_BQ.device)
        position_B1Q1 = position_BQ[:, None, :, None]
        masks = {}
        for kind, window in self.windows.items():
            mask = key_K <= position_B1Q1
            if window is not None:
                mask &= key_K > position_B1Q1 - window
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
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
