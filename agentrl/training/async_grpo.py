"""Group Relative Policy Optimization on rollouts that are played meanwhile."""

from __future__ import annotations

from agentrl.training.async_arguments import AsyncGRPOConfig
from agentrl.training.async_training import AsyncTraining
from agentrl.training.grpo import GRPOTrainer


class AsyncGRPOTrainer(AsyncTraining, GRPOTrainer):
    """`GRPOTrainer`, except that the next rollouts are played while the optimizer works on the last ones.

    The arguments are those of `GRPOTrainer`; `docs/async.md` says how stale rollouts may be and how the loss corrects
    for it. With `max_staleness=0` it is `GRPOTrainer`.

    Raises:
        ConfigurationError: Something passed cannot work; the message says what, where and what to change.
    """

    config_class = AsyncGRPOConfig
    args: AsyncGRPOConfig
