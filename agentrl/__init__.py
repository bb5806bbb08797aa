"""agentrl trains language-model agents by reinforcement learning in real environments.

The public names below are imported on first use, so that `import agentrl` stays fast and needs no extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Agent": "agentrl.rollout.endpoint.programs",
    "Command": "agentrl.rollout.endpoint.programs",
    "AsyncGRPOConfig": "agentrl.training.async_arguments",
    "AsyncGRPOTrainer": "agentrl.training.async_grpo",
    "AsyncRLOOConfig": "agentrl.training.async_arguments",
    "AsyncRLOOTrainer": "agentrl.training.async_rloo",
    "EnvironmentFailure": "agentrl.errors",
    "EpisodeDone": "agentrl.errors",
    "GRPOConfig": "agentrl.training.arguments",
    "GRPOTrainer": "agentrl.training.grpo",
    "RLOOConfig": "agentrl.training.arguments",
    "RLOOTrainer": "agentrl.training.rloo",
    "RolloutError": "agentrl.errors",
    "ToolBrokenError": "agentrl.errors",
    "StepReward": "agentrl.types",
    "Tool": "agentrl.rollout.tools",
    "isolated": "agentrl.rollout.isolation.factory",
    "tool": "agentrl.rollout.policy",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
