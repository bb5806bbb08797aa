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
from accelerate.utils import extract_model_from_parallel
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import TrainerCallback

from agentrl.errors import ConfigurationError

STATE_FILE = "reference.safetensors"


class ReferencePolicy:
    """Scores as the initial policy, without gradients.

    A model with adapters is its own reference: its trainable weights are put back to what they were for as long as
    the reference is needed, which costs the memory of the adapters only. With fresh adapters that is the base model;
    with adapters that were trained before, it is the policy as it came. Any other model is copied and frozen.

    Args:
        model: The policy, before training and before it is wrapped for distributed training.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copy: nn.Module | None = None
        self._initial: list[tuple[nn.Parameter, Tensor]] = []
        if hasattr(model, "disable_adapter"):
            self._initial = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
        else:
            self.copy = copy.deepcopy(model).eval().requires_grad_(False)

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
            self._swap()
            try:
                yield model
            finally:
                self._swap()
                model.train(training)

    def mix(self, model: nn.Module, alpha: float) -> None:
        """Move the weights of the copy towards the policy's, by the share `alpha`.

        Args:
            model: The policy, wrapped or not.
            alpha: 1 makes the copy equal to the policy.
        """
        assert self.copy is not None, "adapters are refused when the synchronisation is set up"
        policy = extract_model_from_parallel(model)
        with torch.no_grad():
            for mine, its in zip(self.copy.parameters(), policy.parameters(), strict=True):
                mine.mul_(1 - alpha).add_(its, alpha=alpha)

    def save(self, folder: str) -> None:
        """Write the copy's weights into a checkpoint."""
        assert self.copy is not None
        save_model(self.copy, str(Path(folder) / STATE_FILE))

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
        load_model(self.copy, str(path), device=str(next(self.copy.parameters()).device))

    def _swap(self) -> None:
        """Exchange the trainable weights with the ones that were kept."""
        for index, (parameter, kept) in enumerate(self._initial):
            current = parameter.data
            parameter.data = kept.to(current.device)
            self._initial[index] = parameter, current


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


def make_reference(model: nn.Module, beta: float) -> ReferencePolicy | None:
    """The reference policy of a model, None when nothing needs it (beta is 0)."""
    return None if beta == 0 else ReferencePolicy(model)
