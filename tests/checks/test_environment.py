"""Environments that break their contract, each in one way: what is said of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from agentrl.checks.environment import check_environment
from agentrl.checks.findings import Finding, Status
from agentrl.errors import EnvironmentFailure
from agentrl.types import Task

TASKS = [Task(str(group), member, seed=group + 1) for group in range(3) for member in range(4)]


class Good:
    """Keeps the contract; the broken ones differ from it in one thing."""

    replayable = True

    def reset(self, seed: int) -> str:
        self.random = random.Random(seed)
        self.count = 0
        return f"Count to {self.random.randint(1, 9)}."

    def add(self, n: int) -> int:
        """Add.

        Args:
            n: How much.
        """
        self.count += n
        return self.count

    def get_reward(self) -> float:
        return float(self.count % 3)

    def close(self) -> None:
        pass


def problems(factory: Any) -> dict[str, Finding]:
    return {f.check: f for f in check_environment(factory, TASKS) if f.status is not Status.PASS}


def test_a_good_environment_passes_every_check():
    findings = check_environment(Good, TASKS)
    assert {f.status for f in findings} == {Status.PASS}, findings
    assert {"tools", "reward", "variance", "seed", "determinism", "leaks", "close"} <= {f.check for f in findings}


class IgnoresTheSeed(Good):
    def reset(self, seed: int) -> str:
        super().reset(seed)
        return f"Count to {random.random()}."


class SameTaskAlways(Good):
    def reset(self, seed: int) -> str:
        super().reset(seed)
        return "Count."


class Leaks(Good):
    def __init__(self) -> None:
        self.log: list[int] = []

    def add(self, n: int) -> str:
        """Add.

        Args:
            n: How much.
        """
        self.log.append(n)
        return f"{super().add(n)} after {len(self.log)} calls"


class NotReplayable(Good):
    def add(self, n: int) -> float:
        """Add.

        Args:
            n: How much.
        """
        return super().add(n) + random.random()


class NotANumber(Good):
    def get_reward(self) -> float:
        return float("nan")


class Constant(Good):
    def get_reward(self) -> float:
        return 0.0


class NoReward(Good):
    get_reward = None


class NoHints(Good):
    def guess(self, number):
        return number


class CannotClose(Good):
    def close(self) -> None:
        self.connection.close()


class NeedsACall(Good):
    def reset(self, seed: int) -> str:
        self.last = None
        return super().reset(seed)

    def add(self, n: int) -> int:
        """Add.

        Args:
            n: How much.
        """
        self.last = n
        return super().add(n)

    def get_reward(self) -> float:
        return 0.0 if self.last is None and self.count else self.last / 10


class ToolNeverWorks(Good):
    def search(self, query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        raise ConnectionError("no route to host")


class CannotReset(Good):
    def reset(self, seed: int) -> str:
        raise FileNotFoundError("levels.json")


class RewardChanges(Good):
    def get_reward(self) -> float:
        self.count += 1
        return float(self.count)


class RewardOnce(Good):
    failure: type[Exception] = RuntimeError

    def get_reward(self) -> float:
        if self.count is None:
            raise self.failure("the session has ended")
        reward, self.count = super().get_reward(), None
        return reward


@pytest.mark.parametrize(
    ("broken", "check", "status", "seen", "advice"),
    [
        (IgnoresTheSeed, "seed", Status.FAIL, "two resets with one seed gave different tasks", "random.Random(seed)"),
        (SameTaskAlways, "seed", Status.WARN, "3 seeds gave one and the same", "take `seed`"),
        (Leaks, "leaks", Status.FAIL, "calls', then", "set in `reset`"),
        (NotReplayable, "replay", Status.FAIL, "the same calls on a fresh instance differ: add told", "drop `replay"),
        (NotANumber, "definition", Status.FAIL, "NotANumber.get_reward gave back nan", "as the message says"),
        (Constant, "variance", Status.WARN, "all rewards within each of 3 groups are equal", "learns nothing"),
        (NoReward, "reward", Status.FAIL, "gives no reward", "--reward"),
        (NoHints, "definition", Status.FAIL, "guess", "as the message says"),
        (CannotClose, "close", Status.FAIL, "CannotClose.close raised AttributeError", "never reset"),
        (
            NeedsACall,
            "no calls",
            Status.FAIL,
            "without any call, NeedsACall.get_reward raised TypeError",
            "set in `reset`",
        ),
        (ToolNeverWorks, "tools", Status.WARN, "valid calls of search failed: 'Error: ConnectionError", "mend it"),
        (CannotReset, "reset", Status.FAIL, "reset raised FileNotFoundError", "is lost"),
        (RewardChanges, "get_reward", Status.WARN, "when asked again", "without changing it"),
        (RewardOnce, "get_reward", Status.WARN, "raised RuntimeError: the session has ended", "without changing it"),
    ],
)
def test_what_is_broken_is_found_and_what_to_do_is_said(broken, check, status, seen, advice):
    found = problems(broken)
    assert check in found, found
    assert found[check].status is status
    assert seen in found[check].seen
    assert advice in found[check].advice


def test_chance_that_was_never_denied_is_a_warning_only():
    class Random(NotReplayable):
        replayable = False

    found = problems(Random)
    assert found["determinism"].status is Status.WARN
    assert "leaks" not in found


def test_a_session_that_ends_with_its_reward_is_no_fault():
    class Served(RewardOnce):
        failure = EnvironmentFailure

    assert problems(Served) == {}


def test_several_environments_are_told_apart():
    """Random calls are of an episode's own tools; an environment without tasks is not passed over in silence."""
    tasks = [replace(task, environment="good") for task in TASKS]
    found = check_environment(
        {"good": Good, "leaking": Leaks, "idle": Good},
        tasks + [replace(task, environment="leaking") for task in TASKS],
    )
    bad = [(finding.check, finding.seen.split(":")[0]) for finding in found if finding.status is not Status.PASS]
    assert bad == [("leaks", "leaking"), ("episodes", "idle")]
