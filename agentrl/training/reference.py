"""The reference policy: the policy as it was before training, which the KL term keeps close."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn


class ReferencePolicy:
    """Scores as the initial policy, without gradients.

    A model with adapters carries its reference inside: itself with the adapters switched off. Any other model
    is copied and frozen.

    Args:
        model: The policy, before training and before it is wrapped for distributed training.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copy: nn.Module | None = None
        if not hasattr(model, "disable_adapter"):
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
            try:
                with extract_model_from_parallel(model).disable_adapter():
                    yield model
            finally:
                model.train(training)


def make_reference(model: nn.Module, beta: float) -> ReferencePolicy | None:
    """The reference policy of a model, None when nothing needs it (beta is 0)."""
    return None if beta == 0 else ReferencePolicy(model)
