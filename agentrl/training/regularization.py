"""What is added to the loss of the objective: the entropy bonus and the router loss, and their state in checkpoints.

The third regularizer, the KL to the reference, is part of the objectives themselves; a reference that moves has its
state kept here too.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from agentrl.objectives.aggregation import Denominators
from agentrl.training.arguments import RolloutConfig
from agentrl.training.batching import MicroBatch
from agentrl.training.entropy import EntropyBonus, make_entropy_bonus
from agentrl.training.experts import router_coefficient, router_term
from agentrl.training.metrics import MetricStore
from agentrl.training.reference import ReferencePolicy, SyncReference
from agentrl.training.scoring import Scores


class Regularization:
    """The regularizers of a run.

    Args:
        args: The configuration.
        model: The policy.
        reference: The reference policy, None if there is none.

    Attributes:
        score_options: What scoring has to give for them.
        callbacks: What the trainer has to call for them.

    Raises:
        ConfigurationError: The model does not suit the arguments.
    """

    def __init__(self, args: RolloutConfig, model: PreTrainedModel, reference: ReferencePolicy | None) -> None:
        self._args = args
        self.entropy_bonus = make_entropy_bonus(args)
        self.router_coef = router_coefficient(model, args)
        self.score_options = {"entropy_grad": self.entropy_bonus is not None, "router_loss": self.router_coef != 0}
        self.callbacks: list[TrainerCallback] = []
        self._kept: list[EntropyBonus | ReferencePolicy] = []
        if self.entropy_bonus is not None:
            self._kept.append(self.entropy_bonus)
        if args.sync_ref_model:
            assert reference is not None, "refused without beta"
            self.callbacks.append(SyncReference(reference))
            self._kept.append(reference)

    def reset(self) -> None:
        """Begin a run."""
        if self.entropy_bonus is not None:
            self.entropy_bonus.reset()

    def add(
        self,
        loss: Tensor,
        scores: Scores,
        batch: MicroBatch,
        counts: Denominators,
        metrics: MetricStore,
        *,
        train: bool,
    ) -> Tensor:
        """Return a micro-batch's loss with its part of everything that is added.

        Args:
            loss: Its part of the objective's loss.
            scores: Its scores, with what `score_options` asks for.
            batch: The micro-batch.
            counts: Counts of its optimizer step.
            metrics: Of training or of evaluation.
            train: Whether it is trained on.
        """
        if self.entropy_bonus is not None:
            loss = self.entropy_bonus.subtract(
                loss, scores.entropy_N, counts, metrics, train=train, selected_N=scores.selected_N
            )
        if scores.router_loss is not None:
            loss = loss + self.router_coef * router_term(scores.router_loss, batch.tokens, counts)
            metrics.add("aux_loss", scores.router_loss.item(), weight=float(batch.tokens > 0))
        return loss

    def end_step(self, metrics: MetricStore) -> None:
        """Take notice that an optimizer step has had its last micro-batch; every process calls it."""
        if self.entropy_bonus is not None:
            self.entropy_bonus.end_step(metrics)

    def save(self, folder: str) -> None:
        """Write the state into a checkpoint; every process calls it, and one writes."""
        for part in self._kept:
            part.save(folder, write=self._args.should_save)

    def load(self, folder: str) -> None:
        """Read the state from a checkpoint, in every process."""
        for part in self._kept:
            part.load(folder)
