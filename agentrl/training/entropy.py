"""The entropy bonus of a run: its coefficient, fixed or adapted after each optimizer step, and its metrics.

The objective is L = L_policy - coefficient * H, where H is the mean entropy of a trained token over the optimizer step.
An adapted coefficient follows the exact H of the step over all its micro-batches and processes. It moves once a step,
after the step, and is applied only while the last measured entropy is at or below the target; so the first step, for
which nothing is measured yet, has no bonus.
"""

from __future__ import annotations

import json
from pathlib import Path

from accelerate.utils import gather_object
from torch import Tensor

from agentrl.objectives.aggregation import Denominators
from agentrl.objectives.regularizers import adapted_coefficient, entropy_bonus
from agentrl.training.arguments import GRPOConfig
from agentrl.training.metrics import MetricStore

STATE_FILE = "entropy_coef.json"


class EntropyBonus:
    """What is subtracted from the policy loss.

    Args:
        args: `entropy_coef`, `use_adaptive_entropy` and the arguments of the latter.

    Attributes:
        coefficient: The current one.
        measured: Mean entropy of the last optimizer step; None before the first.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self._args = args
        self.reset()

    def reset(self) -> None:
        """Begin a run."""
        self.coefficient = self._args.entropy_coef
        self.measured: float | None = None
        self._sum, self._count, self._policy_loss = 0.0, 0, 0.0

    def subtract(
        self,
        policy_loss: Tensor,
        entropy_N: Tensor,
        counts: Denominators,
        metrics: MetricStore,
        *,
        train: bool,
        selected_N: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a micro-batch with its part of the bonus.

        Args:
            policy_loss: Its loss so far.
            entropy_N: Entropy at each of its trained tokens, differentiable.
            counts: Counts of its optimizer step.
            metrics: Where an evaluation's `policy_loss` goes.
            train: Whether the micro-batch is trained on; what is evaluated does not move the coefficient.
            selected_N: bool, the tokens that the policy loss is computed over; None: all.
        """
        if train:
            kept_N = entropy_N.detach() if selected_N is None else entropy_N.detach()[selected_N]
            self._sum += kept_N.double().sum().item()
            self._count += kept_N.numel()
            self._policy_loss += policy_loss.item()
        else:
            metrics.add("policy_loss", policy_loss.item())
        return policy_loss - self._applied * entropy_bonus(entropy_N, counts, selected_N)

    def end_step(self, metrics: MetricStore) -> None:
        """Adapt the coefficient and log, after the last micro-batch of an optimizer step, in every process."""
        args = self._args
        if args.use_adaptive_entropy:
            local = [(self._sum, self._count)]
            parts = gather_object(local) if args.world_size > 1 else local
            total, count = (sum(column) for column in zip(*parts, strict=True))
            if count:
                self.measured = total / count
                self.coefficient = adapted_coefficient(
                    self.coefficient,
                    self.measured,
                    target=args.entropy_target,
                    delta=args.entropy_coef_delta,
                    lowest=args.entropy_coef_min,
                    highest=args.entropy_coef_max,
                )
        metrics.add("policy_loss", self._policy_loss)
        metrics.add("entropy_coef", self.coefficient)
        self._sum, self._count, self._policy_loss = 0.0, 0, 0.0

    def save(self, folder: str, *, write: bool = True) -> None:
        """Write the state into a checkpoint, if this is the process that writes; it is the same in all."""
        if write:
            state = {"coefficient": self.coefficient, "measured": self.measured}
            (Path(folder) / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: str) -> None:
        """Read the state from a checkpoint; one that was written without a bonus has none."""
        path = Path(folder) / STATE_FILE
        if path.exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            self.coefficient, self.measured = state["coefficient"], state["measured"]

    @property
    def _applied(self) -> float:
        args = self._args
        if not args.use_adaptive_entropy:
            return self.coefficient
        return self.coefficient if self.measured is not None and self.measured <= args.entropy_target else 0.0


def make_entropy_bonus(args: object) -> EntropyBonus | None:
    """The entropy bonus of a configuration; None where there is none, as always for RLOO."""
    if not isinstance(args, GRPOConfig) or not (args.entropy_coef or args.use_adaptive_entropy):
        return None
    return EntropyBonus(args)
