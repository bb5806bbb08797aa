"""What becomes of rollouts whose environment fails: tried again, then dropped; and when too many are, the run stops.

A failed rollout is no signal, so a few of them cost only the time they took. Many of them mean that something is
broken, and training on the few that are left would hide it.
"""

from __future__ import annotations

import random
import reprlib
import traceback
from collections import Counter, deque
from dataclasses import dataclass

from agentrl.errors import ConfigurationError, RolloutError
from agentrl.rollout.limits import require_seconds
from agentrl.types import Failure, Outcome, Task, Trajectory

LONGEST_DELAY = 60.0
"""Most seconds between two attempts."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What is done about environments that fail.

    Attributes:
        retries: Further attempts at a rollout whose environment failed, each on a fresh instance.
        delay: Seconds before the first of them; doubled for each further one, up to `LONGEST_DELAY`.
        max_rate: Share of the last rollouts that may be lost to failures; above it the run stops.
        window: How many the last rollouts are.

    Raises:
        ConfigurationError: A number is out of range.
    """

    retries: int = 2
    delay: float = 1.0
    max_rate: float = 0.5
    window: int = 100

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigurationError(f"environment_retries={self.retries!r}: expected 0 or more")
        if self.delay != 0:
            require_seconds("environment_retry_delay", self.delay)
        if not 0 <= self.max_rate <= 1:
            raise ConfigurationError(f"max_failure_rate={self.max_rate!r}: expected a share from 0 to 1")
        if self.window < 1:
            raise ConfigurationError(f"failure_window={self.window!r}: expected at least 1")


def backoff(failures: int, delay: float) -> float:
    """Seconds to wait after so many failures in a row: exponential, and at random in the upper half of that.

    The randomness keeps rollouts that failed together (a server restarted, say) from coming back together.
    """
    longest = min(LONGEST_DELAY, delay * 2 ** (failures - 1))
    return longest * random.uniform(0.5, 1.0)


class FailureWindow:
    """The outcomes of the last rollouts, and whether too many of them failed."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._recent: deque[Trajectory | None] = deque(maxlen=policy.window)

    def add(self, trajectory: Trajectory) -> None:
        """Take a rollout that has ended; cancelled ones say nothing.

        Raises:
            RolloutError: The window is full and too much of it failed.
        """
        if trajectory.outcome is Outcome.CANCELLED:
            return
        failed = trajectory.outcome is Outcome.ENV_FAILURE
        self._recent.append(trajectory if failed else None)
        if failed and len(self._recent) == self._policy.window:
            self.check()

    def check(self) -> None:
        """Look at the window as it is, full or not.

        Raises:
            RolloutError: Too much of it failed.
        """
        lost = [trajectory for trajectory in self._recent if trajectory is not None]
        if not lost or len(lost) <= self._policy.max_rate * len(self._recent):
            return
        causes = Counter(_cause(trajectory) for trajectory in lost)
        [(cause, count)] = causes.most_common(1)
        example = next(trajectory for trajectory in reversed(lost) if _cause(trajectory) == cause)
        failure = example.failure
        assert failure is not None
        size, self._recent = len(self._recent), deque(maxlen=self._policy.window)
        raise RolloutError(
            f"{len(lost)} of the last {size} rollouts were lost to environment failures, after "
            f"{self._policy.retries + 1} attempts each; max_failure_rate={self._policy.max_rate:g} allows no more. "
            f"The most frequent cause, {count} times, was {failure.error!r} in {failure.where}, for example in "
            f"{example_of(example.task)}. Mend the environment; nothing was learned from these rollouts.\n"
            f"{failure.traceback}"
        )


def describe(error: BaseException, task: Task | None) -> str:
    """An error with its traceback, and where it happened."""
    where = "" if task is None else f"for example in {example_of(task)}:\n"
    return where + "".join(traceback.format_exception(error))


def example_of(task: Task) -> str:
    """Name a task so that a user finds the row."""
    return f"member {task.member} of group {task.group} (seed {task.seed}, columns {reprlib.repr(task.columns)})"


def failure_of(where: str, error: BaseException) -> Failure:
    """Keep an exception as plain text."""
    whole = "".join(traceback.format_exception(error))
    return Failure(where, f"{type(error).__name__}: {error}", whole, retry=getattr(error, "retry", True) is not False)


def _cause(trajectory: Trajectory) -> tuple[str, str]:
    """Place and class of the error: texts differ by addresses and numbers."""
    assert trajectory.failure is not None
    return trajectory.failure.where, trajectory.failure.error.partition(":")[0]
