"""Configurations of the asynchronous trainers: those of the others, and how far rollouts may run ahead.

Names and defaults are those of TRL's experimental `AsyncGRPOConfig`, with two exceptions. There, `max_staleness` is
the lag beyond which a finished rollout is thrown away; here it bounds what is started, and nothing is thrown away.
`ignore_data_skip` stays False: the order of the data is known here, so a resumed run goes on in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.errors import ConfigurationError
from agentrl.training.arguments import GRPOConfig, RLOOConfig, as_dict
from agentrl.training.arguments import _arg as arg
from agentrl.training.objective_checks import require

if TYPE_CHECKING:
    from agentrl.training.arguments import RolloutConfig as _Base
else:
    _Base = object  # its defaults would win over those of RLOO


@dataclass
class AsyncOptions(_Base):
    """What `AsyncGRPOConfig` and `AsyncRLOOConfig` add."""

    max_completion_length: int | None = arg(
        2048, "Most tokens after the prompt, over the whole episode, tool results included; None: no limit."
    )
    logging_steps: float = arg(1, "Log every so many optimizer steps; below 1, a share of all steps.")
    lr_scheduler_type: str = arg("constant", "The learning-rate schedule.")
    dtype: str = arg("float32", "What a model given by name is loaded in; a dtype in model_init_kwargs wins.")

    max_staleness: int = arg(
        4, "Most optimizer steps between the weights that began to play a rollout and those that train on it."
    )
    weight_sync_steps: int = arg(1, "Optimizer steps between updates of the generator's weights.")
    max_inflight_tasks: int = arg(
        -1, "Most rollouts at once, over all processes; -1: all that max_staleness lets start."
    )
    queue_maxsize: int = arg(1024, "Most rollouts in TRL's queue.")
    heartbeat_stale_after_s: float = arg(300.0, "Seconds without a sign of life from TRL's rollout worker.")
    token_budget: int | None = arg(None, "Most tokens of a micro-batch in TRL.")
    fork_threshold_tokens: int = arg(1024, "Drift of re-tokenized turns that TRL tolerates.")

    def __post_init__(self) -> None:
        if self.dtype != "float32":
            self.model_init_kwargs = {"dtype": self.dtype, **(as_dict(self.model_init_kwargs) or {})}
        super().__post_init__()
        staleness, every, tasks = self.max_staleness, self.weight_sync_steps, self.max_inflight_tasks
        require(staleness >= 0, "max_staleness", staleness, "0 (as the trainers that are not async) or more")
        require(every >= 1, "weight_sync_steps", every, "at least 1")
        if every > staleness + 1:
            raise ConfigurationError(
                f"weight_sync_steps={every} lets the generator's weights fall {every - 1} optimizer steps behind, but "
                f"max_staleness={staleness} allows less; raise max_staleness or lower weight_sync_steps."
            )
        fits = tasks == -1 or tasks >= self.world_size
        require(fits, "max_inflight_tasks", tasks, f"-1 or at least one for each of {self.world_size} processes")
        if staleness and self.vllm_enable_sleep_mode:
            raise ConfigurationError(
                f"vllm_enable_sleep_mode puts vLLM to sleep during the optimizer step, but max_staleness={staleness} "
                "wants it to sample then; set one of them to its off value."
            )

    @property
    def max_concurrency(self) -> int | None:
        """Most rollouts of this process at once; None for any number."""
        return None if self.max_inflight_tasks == -1 else self.max_inflight_tasks // self.world_size


@dataclass
class AsyncGRPOConfig(AsyncOptions, GRPOConfig):
    """Configuration of `AsyncGRPOTrainer`: all of `GRPOConfig`, and how far rollouts may run ahead."""


@dataclass
class AsyncRLOOConfig(AsyncOptions, RLOOConfig):
    """Configuration of `AsyncRLOOTrainer`: all of `RLOOConfig`, and how far rollouts may run ahead."""
