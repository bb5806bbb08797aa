"""A copy of the policy for a generator that samples while the policy is trained."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel


class Mirror:
    """A copy of a policy that follows it when it is told to.

    Parameters that are not trained (below adapters, say) never change, so they are shared and cost no memory.

    Args:
        policy: The policy, not wrapped.

    Attributes:
        model: The copy; its weights are those of the policy at construction, or at the last `update`.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self._policy = policy
        frozen = {id(parameter): parameter for parameter in policy.parameters() if not parameter.requires_grad}
        self.model: PreTrainedModel = copy.deepcopy(policy, memo=dict(frozen))
        self.model.requires_grad_(False)
        self._pairs = [
            (name, value)
            for name, value in [*self.model.named_parameters(), *self.model.named_buffers()]
            if id(value) not in frozen
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Take over the policy's weights; neither model may run meanwhile."""
        current = dict(self._policy.named_parameters()) | dict(self._policy.named_buffers())
        for name, value in self._pairs:
            value.copy_(current[name])
