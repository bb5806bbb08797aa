"""REINFORCE Leave-One-Out on rollouts that are played meanwhile."""

from __future__ import annotations

from agentrl.training.async_arguments import AsyncRLOOConfig
from agentrl.training.async_training import AsyncTraining
from agentrl.training.rloo import RLOOTrainer


class AsyncRLOOTrainer(AsyncTraining, RLOOTrainer):
    """`RLOOTrainer`, except that the next rollouts are played while the optimizer works on the last ones.

    The arguments are those of `RLOOTrainer`; `docs/async.md` says how stale rollouts may be and how the loss corrects
    for it. With `max_staleness=0` it is `RLOOTrainer`.

    Raises:
        ConfigurationError: Something passed cannot work; the message says what, where and what to change.
    """

    config_class = AsyncRLOOConfig
    args: AsyncRLOOConfig
