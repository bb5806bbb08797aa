"""What is done to a policy before training: dropout off, and the language-model head in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigurationError


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of a model to 0."""
    for module, name in _dropouts(model):
        setattr(module, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether a training pass of the model is random."""
    return any(getattr(module, name) > 0 for module, name in _dropouts(model))


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a model keeps its dropout probabilities: the modules, and the names of their attributes.

    Dropout layers have it as `p`. Attention and some older architectures keep it as a number of their own, which
    they hand to a function while training: attributes whose name ends in `dropout`.
    """
    found: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found.append((module, "p"))
        numbers = [name for name, value in vars(module).items() if isinstance(value, float)]
        found += [(module, name) for name in numbers if name.endswith("dropout")]
    return found


def inner(model: nn.Module) -> Any:
    """The model itself, without the wrapper that adapters put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32, also under autocast and for inputs of less precision."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the layer; the output is float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())


def cast_head(model: PreTrainedModel) -> None:
    """Make a model's language-model head compute in float32 from float32 weights, under its old name.

    (Khatri et al. 2025, The Art of Scaling Reinforcement Learning Compute for LLMs, https://arxiv.org/abs/2510.13786.)
    Scoring, the local generator and the reference, which is a copy, all go through the head, so they agree.

    Raises:
        ConfigurationError: The head shares its weight with the input embeddings, or is no plain linear layer.
    """
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    if head is not None and head.weight is getattr(embeddings, "weight", None):
        raise ConfigurationError(
            f"cast_lm_head_to_fp32: the head of {type(model).__name__} shares its weight with the input embeddings "
            "(tie_word_embeddings), which would become float32 too; load the whole model in float32 instead "
            "(model_init_kwargs={'dtype': 'float32'})."
        )
    if type(head) is not nn.Linear:
        raise ConfigurationError(
            f"cast_lm_head_to_fp32: the head of {type(model).__name__} is a {type(head).__name__}; only a plain "
            "linear layer can be cast. Leave it out of quantization and of the adapter's target_modules and "
            "modules_to_save, or leave cast_lm_head_to_fp32 unset."
        )
    cast = Float32Linear(
        head.in_features, head.out_features, bias=head.bias is not None, device="meta", dtype=torch.float32
    )
    for name, parameter in head.named_parameters():
        if parameter.dtype != torch.float32:  # else the very parameter, which may lie in pieces
            parameter = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        setattr(cast, name, parameter)
    inner(model).set_output_embeddings(cast)
