"""What is done about tools that hang, fail or must not run too often at once; and when a tool counts as broken.

The policy of a tool is the engine's default, where the tool's author did not say otherwise with `@tool(...)`.

A tool that fails everywhere must end the run: a model that learns to avoid it has learnt something about our
infrastructure. `Breaker` watches for that. What speaks of the arguments (`MODEL_MISTAKES`) is a failure of the call
and not of the tool, so it neither counts nor clears anything; whatever else a tool raises counts, and so does a
timeout.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from agentrl.errors import ToolBrokenError, ToolDefinitionError
from agentrl.rollout.failures import describe
from agentrl.rollout.limits import require_seconds
from agentrl.types import Task

F = TypeVar("F", bound=Callable[..., Any])

MODEL_MISTAKES = (
    ArithmeticError,
    LookupError,
    SyntaxError,
    ValueError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Exceptions that speak of the values a tool was given; they are answered like all others, but break no tool."""

_ATTRIBUTE = "__agentrl_tool__"


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """How the calls of a tool are run.

    Attributes:
        timeout: Seconds that one call may take, None for as long as it likes. The wait for `max_concurrency` is not
            counted.
        retries: How often a call that raised is repeated before the model is told. Only for tools that may be called
            twice without harm. Neither timeouts nor `MODEL_MISTAKES` are repeated.
        max_concurrency: Most calls of the tool at once over all rollouts of an engine, None for no limit.

    Raises:
        ToolDefinitionError: A number is out of range.
    """

    timeout: float | None = 600.0
    retries: int = 0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        require_seconds("timeout", self.timeout, ToolDefinitionError)
        if not isinstance(self.retries, int) or self.retries < 0:
            raise ToolDefinitionError(f"retries={self.retries!r}: expected 0 or more")
        if self.max_concurrency is not None and (not isinstance(self.max_concurrency, int) or self.max_concurrency < 1):
            raise ToolDefinitionError(f"max_concurrency={self.max_concurrency!r}: expected None or at least 1")


def tool(
    *, timeout: float | Literal["default"] | None = "default", retries: int = 0, max_concurrency: int | None = None
) -> Callable[[F], F]:
    """Set the policy of a tool: a function, or a method of an environment.

    Args:
        timeout: Seconds that one call may take, None for as long as it likes; default: `tool_timeout` of the
            configuration.
        retries: See `ToolPolicy`.
        max_concurrency: See `ToolPolicy`.

    Example:
        >>> @tool(timeout=10, retries=2, max_concurrency=4)
        ... def search(query: str) -> str:
        ...     ...

    Raises:
        ToolDefinitionError: A number is out of range.
    """
    said: dict[str, Any] = {"retries": retries, "max_concurrency": max_concurrency}
    if timeout != "default":
        said["timeout"] = timeout
    ToolPolicy(**said)

    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, said)
        return function

    return mark


def policy_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """What the author of a tool said about its policy, also through partials and methods."""
    while isinstance(function, functools.partial):
        function = function.func
    said: Mapping[str, Any] | None = getattr(function, _ATTRIBUTE, None)
    return said or getattr(type(function).__call__, _ATTRIBUTE, None) or {}


class Breaker:
    """Ends the run when the last calls of a tool have all failed, in at least two groups.

    Args:
        limit: How many, None for never.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._streaks: dict[str, _Streak] = {}

    def succeeded(self, name: str) -> None:
        """A call of a tool went well."""
        self._streaks.pop(name, None)

    def failed(self, name: str, error: BaseException, task: Task | None) -> None:
        """A call of a tool went wrong, for no fault of the model's.

        Raises:
            ToolBrokenError: So have all others of late.
        """
        if self._limit is None or isinstance(error, MODEL_MISTAKES):
            return
        streak = self._streaks.setdefault(name, _Streak())
        streak.add(error, task)
        # One group may have data that the tool cannot digest; two have little in common but the tool.
        if sum(streak.causes.values()) >= self._limit and len(streak.groups) > 1:
            raise ToolBrokenError(
                f"the last {sum(streak.causes.values())} calls of the tool {name!r} failed, in {len(streak.groups)} "
                f"groups; the model would learn to avoid it. {streak.report()}\nMend the tool; "
                "`tool_max_failures` sets how many calls in a row may fail (None: any number)."
            )


@dataclass(slots=True)
class _Streak:
    """Failures of one tool since its last success."""

    causes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    groups: set[str | None] = field(default_factory=set)

    def add(self, error: BaseException, task: Task | None) -> None:
        kind = type(error).__name__
        self.causes[kind] += 1
        self.groups.add(None if task is None else task.group)
        if kind not in self.examples:
            self.examples[kind] = describe(error, task)

    def report(self) -> str:
        [(kind, count)] = self.causes.most_common(1)
        return f"The most frequent cause, {count} times, was {kind}:\n{self.examples[kind]}"
