"""Every limit of an episode, checked in one documented order.

Pure: what has happened so far goes in, the first limit that is reached comes out. The order is that of
`agentrl.types.Limit`: cancelled, rollout time, context length, completion budget, tool iterations. It is checked
before each turn is sampled, before a tool round and after it; the rollout time also ends what is going on. The
completion budget and the context count every token of the row, tool results included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.errors import ConfigurationError
from agentrl.types import Limit, Outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of every episode of a run; None means no limit.

    Attributes:
        max_completion_length: Tokens after the prompt, over the whole episode.
        max_context: Tokens of the whole row.
        max_tool_iterations: Tool rounds; 0 means that no call is ever run.
        rollout_timeout: Seconds from the start of `reset` to the last turn, for each attempt.

    Raises:
        ConfigurationError: `rollout_timeout` is no positive, finite number.
    """

    max_completion_length: int | None = None
    max_context: int | None = None
    max_tool_iterations: int | None = None
    rollout_timeout: float | None = None

    def __post_init__(self) -> None:
        require_seconds("rollout_timeout", self.rollout_timeout)


@dataclass(slots=True)
class Progress:
    """Where an episode stands; not frozen, for four are made each turn and a frozen one takes thrice as long."""

    prompt_length: int
    completion_length: int
    tool_iterations: int = 0
    seconds: float = 0.0
    cancelled: bool = False


def require_seconds(name: str, value: object, error: type[ConfigurationError] = ConfigurationError) -> None:
    """Check a time limit.

    Raises:
        ConfigurationError: It is neither None nor a positive, finite number.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and math.isfinite(value) and value > 0):  # type: ignore[arg-type, operator]
        raise error(f"{name}={value!r}: expected a positive, finite number of seconds, or None for no limit.")


def reached(limits: Limits, progress: Progress, *, wants_tools: bool = False) -> Limit | None:
    """Return the first limit that forbids going on, or None.

    Args:
        limits: The limits.
        progress: Where the episode stands.
        wants_tools: The next thing to do is a tool round, so the iteration limit counts too.
    """
    if progress.cancelled:
        return Limit.CANCELLED
    if limits.rollout_timeout is not None and progress.seconds >= limits.rollout_timeout:
        return Limit.ROLLOUT_TIME
    if (limit := _length_limit(limits, progress)) is not None:
        return limit
    iterations = limits.max_tool_iterations
    if wants_tools and iterations is not None and progress.tool_iterations >= iterations:
        return Limit.TOOL_ITERATIONS
    return None


def room(limits: Limits, progress: Progress) -> int | None:
    """Return how many tokens the next turn may sample, None when nothing bounds it."""
    rooms = [left for left in (_context_left(limits, progress), _completion_left(limits, progress)) if left is not None]
    return max(0, min(rooms)) if rooms else None


def binding_limit(limits: Limits, progress: Progress) -> Limit:
    """Name the length limit that cuts a turn which used up its room; context wins a tie."""
    return _length_limit(limits, progress) or Limit.COMPLETION


def outcome_of(limit: Limit) -> Outcome:
    """How an episode has ended that a limit cut."""
    if limit is Limit.CANCELLED:
        return Outcome.CANCELLED
    return Outcome.TIMEOUT if limit is Limit.ROLLOUT_TIME else Outcome.TRUNCATED


def _length_limit(limits: Limits, progress: Progress) -> Limit | None:
    context, completion = _context_left(limits, progress), _completion_left(limits, progress)
    if context is not None and context <= 0:
        return Limit.CONTEXT
    if completion is not None and completion <= 0:
        return Limit.COMPLETION
    return None


def _context_left(limits: Limits, progress: Progress) -> int | None:
    if limits.max_context is None:
        return None
    return limits.max_context - progress.prompt_length - progress.completion_length


def _completion_left(limits: Limits, progress: Progress) -> int | None:
    if limits.max_completion_length is None:
        return None
    return limits.max_completion_length - progress.completion_length
