"""The policy's weights as vLLM wants them: whole tensors under the names of a checkpoint.

transformers may keep a model under other names and in other shapes than its checkpoints (the experts of a mixture are
one tensor in memory); what comes out here is as in the checkpoint. Adapters are merged into what they adapt, one layer
at a time, and taken out again exactly: by putting back what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agentrl.errors import ConfigurationError
from agentrl.generation.vision import placeholder_id


class PolicyWeights:
    """Iterating yields names and tensors, as they are then; tied tensors come once.

    Args:
        model: The policy, not wrapped for distribution; with adapters of PEFT or without.

    Attributes:
        sees_images: Whether features of images are made with them too.

    Raises:
        ConfigurationError: The weights are quantized.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        given: Any = model
        self._model: Any = given.get_base_model() if hasattr(given, "peft_config") else given
        if getattr(self._model, "is_quantized", False):
            raise ConfigurationError(
                "the policy's weights are quantized, so they can neither be sent to vLLM nor be merged with adapters; "
                "load the model without quantization_config, or leave use_vllm=False."
            )
        self.sees_images = placeholder_id(self._model) is not None
        names = {name: value.to("meta") for name, value in _walk(self._model, "", merge=False)}
        self._converts = revert_weight_conversion(self._model, dict(names)).keys() != names.keys()

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._converts:
            yield from revert_weight_conversion(self._model, dict(_walk(self._model, "", copies=True))).items()
        else:
            yield from _walk(self._model, "")

    def described(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of what iterating yields, in its order."""
        if self._converts:
            return [(name, value.dtype, tuple(value.shape)) for name, value in self]
        return [(name, value.dtype, tuple(value.shape)) for name, value in _walk(self._model, "", merge=False)]


def _walk(root: nn.Module, path: str, *, merge: bool = True, copies: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights under its own names.

    Args:
        root: The model.
        path: Where it stands in a larger one.
        merge: Add what adapters learned.
        copies: Let what was merged outlive the next step of the iteration.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(path, root)]
    while waiting:
        path, module = waiting.pop()
        if hasattr(module, "modules_to_save"):  # PEFT trains a copy of the whole module
            waiting.append((path, module.modules_to_save[module.active_adapters[0]]))
            continue
        if hasattr(module, "base_layer"):
            for name, value in _merged(module, copies) if merge else _innermost(module).named_parameters():
                yield _join(path, name), value
            continue
        for name, value in _own(module):
            if id(value) not in seen:
                seen.add(id(value))
                yield _join(path, name), value.detach()
        waiting += [(_join(path, name), child) for name, child in reversed(list(module.named_children()))]


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, and those buffers that a checkpoint holds too (the bias of a router, say)."""
    yield from module.named_parameters(recurse=False)
    for name, value in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, value


def _merged(module: Any, copies: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of an adapted layer with its adapters merged, and leave the layer as it was."""
    layers = [module]
    while hasattr(layers[-1], "base_layer"):
        layers.append(layers[-1].base_layer)
    *adapted, base = layers
    before = {name: value.clone() for name, value in base.named_parameters()}
    for layer in reversed(adapted):
        layer.merge()
    try:
        for name, value in base.named_parameters():
            yield name, value.detach().clone() if copies else value.detach()
    finally:
        for layer in adapted:
            layer.unmerge()
        for name, value in base.named_parameters():
            value.copy_(before[name])


def _innermost(module: Any) -> nn.Module:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
