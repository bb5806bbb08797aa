"""REINFORCE Leave-One-Out: what differs from the trainer core."""

from __future__ import annotations

from torch import Tensor

from agentrl.errors import RewardError
from agentrl.objectives.advantages import rloo_advantages
from agentrl.objectives.aggregation import Denominators, row_loss
from agentrl.objectives.losses import rloo_loss
from agentrl.training.arguments import RLOOConfig
from agentrl.training.batching import MicroBatch
from agentrl.training.metrics import MetricStore
from agentrl.training.objective_metrics import clip_metrics_of_rows
from agentrl.training.scoring import Scores
from agentrl.training.trainer import RolloutTrainer
from agentrl.training.windows import BatchRewards


class RLOOTrainer(RolloutTrainer):
    """Trains a language model, or an agent with tools and environments, with RLOO.

    (Ahmadian et al. 2024, Back to Basics, https://arxiv.org/abs/2402.14740.) The arguments are those of
    `agentrl.GRPOTrainer`, tools and environments included.

    Raises:
        ConfigurationError: Something passed cannot work; the message says what, where and what to change.
    """

    config_class = RLOOConfig
    algorithm = "RLOO"
    args: RLOOConfig

    @property
    def penalises_kl_in_reward(self) -> bool:
        """With beta, the KL to the reference is part of the reward; no gradient goes through it."""
        return self.args.beta != 0

    def advantages(self, rewards: BatchRewards, kl_R: Tensor | None) -> Tensor:
        """Rewards (clipped, then less the KL penalty) against the mean of the others in the group.

        Raises:
            RewardError: Turns were rewarded.
        """
        if rewards.returns_RK is not None:
            raise RewardError(
                "an environment or tool rewarded single turns, but to RLOO a whole rollout is one action with one "
                "ratio and one advantage; use GRPOTrainer, or give one reward for each rollout from get_reward."
            )
        total_R = self._clipped(rewards.total_R)
        if kl_R is not None:
            total_R = total_R - self.args.beta * kl_R
        return rloo_advantages(total_R, rewards.group_R, normalize=self.args.normalize_advantages)

    def signals(self, rewards: BatchRewards) -> Tensor:
        """The clipped rewards; that the KL penalty alone tells rows apart does not count."""
        return self._clipped(rewards.total_R)[:, None]

    def _clipped(self, total_R: Tensor) -> Tensor:
        clip = self.args.reward_clip_range
        return total_R if clip is None else total_R.clamp(*clip)

    def loss(self, scores: Scores, batch: MicroBatch, denominators: Denominators, metrics: MetricStore) -> Tensor:
        """The clipped REINFORCE loss of whole rows."""
        args = self.args
        surrogate = rloo_loss(
            scores.logps_N,
            self.old_logps(scores, batch),
            batch.advantages_R,
            batch.row_N,
            args.epsilon,
            args.upper_clip,
        )
        clip_metrics_of_rows(surrogate, metrics)
        return row_loss(surrogate.loss, denominators)
