"""agentrl trains language-model agents by reinforcement learning in real environments.

The public names below are imported on first use, so that `import agentrl` stays fast and needs no extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see of it
    from agentrl.errors import EnvironmentFailure as EnvironmentFailure
    from agentrl.errors import EpisodeDone as EpisodeDone
    from agentrl.errors import RolloutError as RolloutError
    from agentrl.errors import ToolBrokenError as ToolBrokenError
    from agentrl.rollout.endpoint.programs import Agent as Agent
    from agentrl.rollout.endpoint.programs import Command as Command
    from agentrl.rollout.isolation.factory import isolated as isolated
    from agentrl.rollout.policy import tool as tool
    from agentrl.rollout.tools import Tool as Tool
    from agentrl.training.arguments import GRPOConfig as GRPOConfig
    from agentrl.training.arguments import RLOOConfig as RLOOConfig
    from agentrl.training.async_arguments import AsyncGRPOConfig as AsyncGRPOConfig
    from agentrl.training.async_arguments import AsyncRLOOConfig as AsyncRLOOConfig
    from agentrl.training.async_grpo import AsyncGRPOTrainer as AsyncGRPOTrainer
    from agentrl.training.async_rloo import AsyncRLOOTrainer as AsyncRLOOTrainer
    from agentrl.training.grpo import GRPOTrainer as GRPOTrainer
    from agentrl.training.rloo import RLOOTrainer as RLOOTrainer
    from agentrl.types import StepReward as StepReward

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
