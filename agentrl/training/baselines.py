"""What a window is scored by before anything is learned from it: the policy that sampled it, and the reference.

The first are the old logprobs of importance ratios, the second what a KL penalty is from. Both are taken where they are
needed, and only there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from agentrl.generation.base import SamplingParams
from agentrl.training.arguments import RolloutConfig
from agentrl.training.batching import MicroBatch
from agentrl.training.preparation import has_dropout
from agentrl.training.reference import make_reference
from agentrl.training.scoring import score


class Baselines:
    """Scores micro-batches before they are trained on.

    Args:
        trainer: Gives the mixed-precision context.
        args: The configuration.
        model: The policy.
        sampling: The distribution that tokens are drawn from.
        needs_kl: Whether the KL of rows from the reference is needed before the backward pass.
        corrects_sampler: Whether the loss weighs what the trainer and the sampler make of the same tokens.
        together: Whether all processes must score as often as each other, micro-batches without tokens included:
            those of a sharded policy, whose weights come together in every pass.

    Attributes:
        reference: The reference policy, None without one.
    """

    def __init__(
        self,
        trainer: Trainer,
        args: RolloutConfig,
        model: PreTrainedModel,
        sampling: SamplingParams,
        *,
        needs_kl: bool,
        corrects_sampler: bool,
        together: bool,
    ) -> None:
        self._trainer = trainer
        self._args = args
        self._model = model
        self._sampling = sampling
        self._needs_kl = needs_kl
        self._corrects_sampler = corrects_sampler
        self._together = together
        self.reference = make_reference(model, args.beta, trainer)

    @property
    def on_policy(self) -> bool:
        """Whether the policy that sampled a window is the one that is trained on all of it.

        When whole windows fit into each optimizer step, nothing is learned between sampling and the backward pass.
        """
        args = self._args
        assert args.steps_per_generation is not None
        return args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0

    @property
    def _needs_old_logps(self) -> bool:
        """Whether the scores of the backward pass cannot stand for those of the policy that sampled."""
        # Dropout is off while sampling; with it, a training pass differs from the sampler by more than rounding.
        return not self.on_policy or self._needs_kl or (self._corrects_sampler and has_dropout(self._model))

    def score(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with the scores that are needed."""
        old_N = ref_N = None
        if not batch.tokens and not self._together:
            old_N = torch.zeros(0) if self._needs_old_logps else None
            ref_N = torch.zeros(0) if self.reference is not None else None
            return dataclasses.replace(batch, old_logps_N=old_N, ref_logps_N=ref_N)
        with torch.no_grad(), self._trainer.compute_loss_context_manager():
            if self._needs_old_logps:
                with evaluating(self._model):
                    old_N = self._logps(self._model, batch)
            if self.reference is not None:
                with self.reference.active(self._model) as reference:
                    ref_N = self._logps(reference, batch)
        return dataclasses.replace(batch, old_logps_N=old_N, ref_logps_N=ref_N)

    def _logps(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        return score(model, batch.to(self._args.device), self._sampling, with_entropy=False).logps_N.cpu()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
