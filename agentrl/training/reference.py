"""The reference policy: the policy as it was before training, which the KL term keeps close.

With `sync_ref_model` it follows the policy: every `ref_model_sync_steps` optimizer steps its weights become

    ref = alpha * policy + (1 - alpha) * ref,    alpha = ref_model_mixup_alpha

(Gorbatovski et al. 2024, Learn Your Reference Model for Real Good Alignment, https://arxiv.org/abs/2404.09656). Its
weights are then part of a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from agentrl.errors import ConfigurationError
from agentrl.training.sharding import (
    WholeCopy,
    assign,
    resting_parameters,
    shard_reference,
    whole_parameters,
    whole_value,
)

STATE_FILE = "reference.safetensors"


class ReferencePolicy:
    """Scores as the initial policy, without gradients.

    A model with adapters is its own reference: its trainable weights are put back to what they were for as long as
    the reference is needed, which costs the memory of the adapters only. With fresh adapters that is the base model;
    with adapters that were trained before, it is the policy as it came. Any other model is copied and frozen; the copy
    is sharded where the policy is.

    Args:
        model: The policy, before training and before it is wrapped for distributed training.
        trainer: Knows how the policy will be distributed; None for a policy that stays where it is.
    """

    def __init__(self, model: PreTrainedModel, trainer: Trainer | None = None) -> None:
        self.copy: nn.Module | None = None
        self._initial: list[Tensor] = []
        if hasattr(model, "disable_adapter"):
            self._initial = [whole_value(parameter) for parameter in _trainable(model)]
        else:
            self.copy = _frozen_copy(model) if trainer is None else shard_reference(trainer, _frozen_copy(model))

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the module to score with; only inside is it the reference.

        Args:
            model: The policy, wrapped or not.
        """
        with torch.no_grad():
            if self.copy is not None:
                yield self.copy
                return
            training = model.training
            model.eval()  # the frozen copy has no dropout either
            trained = self._exchange(model, self._initial)
            try:
                yield model
            finally:
                self._exchange(model, trained)
                model.train(training)

    def mix(self, model: nn.Module, alpha: float) -> None:
        """Move the weights of the copy towards the policy's, by the share `alpha`.

        Args:
            model: The policy, wrapped or not.
            alpha: 1 makes the copy equal to the policy.
        """
        assert self.copy is not None, "adapters are refused when the synchronisation is set up"
        for mine, (_, its) in zip(resting_parameters(self.copy).values(), whole_parameters(model), strict=True):
            assign(mine, whole_value(mine).mul_(1 - alpha).add_(its, alpha=alpha))

    def save(self, folder: str, *, write: bool = True) -> None:
        """Write the copy's weights into a checkpoint.

        Args:
            folder: The checkpoint.
            write: Whether this is the process that writes; where weights are sharded the others help to collect them.
        """
        assert self.copy is not None
        whole = {name: value.cpu().clone() for name, value in whole_parameters(self.copy) if write}
        if write:
            save_file(whole, str(Path(folder) / STATE_FILE))

    def load(self, folder: str) -> None:
        """Read the copy's weights from a checkpoint.

        Raises:
            ConfigurationError: The checkpoint was written without `sync_ref_model`.
        """
        assert self.copy is not None
        path = Path(folder) / STATE_FILE
        if not path.exists():
            raise ConfigurationError(
                f"{folder} has no {STATE_FILE}: it was written without sync_ref_model, so the reference model of that "
                "run is not known. Resume with sync_ref_model=False, or start a new run from the checkpoint's weights."
            )
        values = load_file(path)
        for name, parameter in resting_parameters(self.copy).items():
            assign(parameter, values[name])

    def _exchange(self, model: nn.Module, values: list[Tensor]) -> list[Tensor]:
        """Give the trainable weights other values and return those that they had."""
        parameters = _trainable(model)
        current = [whole_value(parameter) for parameter in parameters]
        for parameter, value in zip(parameters, values, strict=True):
            assign(parameter, value)
        return current


class SyncReference(TrainerCallback):
    """Mixes the policy into the reference every `ref_model_sync_steps` optimizer steps.

    Args:
        reference: The reference.

    Raises:
        ConfigurationError: The policy is trained through adapters.
    """

    def __init__(self, reference: ReferencePolicy) -> None:
        if reference.copy is None:
            raise ConfigurationError(
                "sync_ref_model: the policy is trained through adapters, whose effect is a product of two weights; a "
                "mixture of the weights is no mixture of the policies. Leave sync_ref_model=False, or train without "
                "peft_config."
            )
        self.reference = reference

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after each optimizer step, before a checkpoint is written."""
        if state.global_step % args.ref_model_sync_steps == 0:
            self.reference.mix(kwargs["model"], args.ref_model_mixup_alpha)


def make_reference(model: PreTrainedModel, beta: float, trainer: Trainer | None = None) -> ReferencePolicy | None:
    """The reference policy of a model, None when nothing needs it (beta is 0); see `ReferencePolicy`."""
    return None if beta == 0 else ReferencePolicy(model, trainer)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in resting_parameters(model).values() if parameter.requires_grad]


def _frozen_copy(model: PreTrainedModel) -> nn.Module:
    """A copy of a model, in one piece also where the model was loaded in several."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        whole = WholeCopy(model, "cpu")  # from there, DeepSpeed takes one weight after the other
        whole.gather(model)
        return whole.model.eval()
    return copy.deepcopy(model).eval().requires_grad_(False)
