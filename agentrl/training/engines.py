"""From a configuration to the engine that plays its episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.chat.renderer import Renderer
from agentrl.generation.base import Generator, SamplingParams
from agentrl.rollout.endpoint.programs import Agent
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.limits import Limits
from agentrl.rollout.policy import ToolPolicy
from agentrl.rollout.tools import Tool
from agentrl.training.arguments import RolloutConfig


def engine_of(
    args: RolloutConfig,
    generator: Generator,
    renderer: Renderer,
    sampling: SamplingParams,
    *,
    tools: Sequence[Callable[..., Any] | Tool],
    environments: Any,
    journal: Journal | None,
    agent: Agent | None,
) -> RolloutEngine:
    """Make the engine with the limits and policies of a configuration; see `RolloutEngine` for the rest."""
    return RolloutEngine(
        generator,
        renderer,
        tools=tools,
        environments=environments,
        limits=Limits(
            max_completion_length=args.max_completion_length,
            max_context=generator.max_context,
            max_tool_iterations=args.max_tool_calling_iterations,
            rollout_timeout=args.rollout_timeout,
        ),
        sampling=sampling,
        failures=FailurePolicy(
            retries=args.environment_retries,
            delay=args.environment_retry_delay,
            max_rate=args.max_failure_rate,
            window=args.failure_window,
        ),
        environment_timeout=args.environment_timeout,
        tool_policy=ToolPolicy(timeout=args.tool_timeout),
        tool_max_failures=args.tool_max_failures,
        journal=journal,
        max_concurrency=getattr(args, "max_concurrency", None),
        agent=agent,
    )
