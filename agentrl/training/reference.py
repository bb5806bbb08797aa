"""The reference policy: the policy as it was before training, which the KL term keeps close."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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

    def _swap(self) -> None:
        """Exchange the trainable weights with the ones that were kept."""
        for index, (parameter, kept) in enumerate(self._initial):
            current = parameter.data
            parameter.data = kept.to(current.device)
            self._initial[index] = parameter, current


def make_reference(model: nn.Module, beta: float) -> ReferencePolicy | None:
    """The reference policy of a model, None when nothing needs it (beta is 0)."""
    return None if beta == 0 else ReferencePolicy(model)
