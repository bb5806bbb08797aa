"""What a verifier's reward files mean, and how the rewards of steps become one. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from agentrl.envs.harbor.errors import Fault, HarborFailure

Rewards = dict[str, float]
"""Rewards by name; the one that counts is mostly called "reward"."""

Gate = float | Mapping[str, float] | None
"""What a step must reach for the next one to be played: of the reward that counts, or of several by name."""

KEY = "reward"


def read_rewards(as_json: bytes | None, as_text: bytes | None) -> Rewards:
    """The rewards in `reward.json`, which wins, or in `reward.txt`; None for a file that is not there.

    Raises:
        HarborFailure: There is neither, it is empty, or it is not what it should be.
    """
    content, name = (as_json, "reward.json") if as_json is not None else (as_text, "reward.txt")
    if content is None:
        raise HarborFailure(Fault.REWARD_MISSING, "neither reward.json nor reward.txt is in /logs/verifier")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise HarborFailure(Fault.REWARD_UNREADABLE, f"{name} is not UTF-8") from error
    if not text.strip():
        raise HarborFailure(Fault.REWARD_EMPTY, name)
    try:
        found = json.loads(text) if as_json is not None else {KEY: float(text)}
    except (ValueError, RecursionError) as error:
        raise HarborFailure(Fault.REWARD_UNREADABLE, f"{name} holds {text[:100]!r}") from error
    if not isinstance(found, dict) or not found:
        raise HarborFailure(Fault.REWARD_UNREADABLE, f"{name} holds {text[:100]!r} in place of numbers by name")
    return {key: _number(value, f"{key!r} in {name}") for key, value in found.items()}


def score(rewards: Rewards, key: str = KEY) -> float:
    """The reward that counts: the one called `key`, or the only one.

    Raises:
        HarborFailure: There are several, of other names.
    """
    if key in rewards:
        return rewards[key]
    if len(rewards) == 1 and key == KEY:
        return next(iter(rewards.values()))
    raise HarborFailure(
        Fault.REWARD_UNREADABLE,
        f"the verifier's rewards are called {', '.join(sorted(rewards))}, none {key!r}; say which one counts with "
        "Harbor(reward_key=...)",
    )


def passes(rewards: Rewards, gate: Gate, key: str = KEY) -> bool:
    """Whether a step has earned what it must for the next one to be played; a reward that is missing has not."""
    if gate is None:
        return True
    if isinstance(gate, Mapping):
        return all(name in rewards and rewards[name] >= least for name, least in gate.items())
    return score(rewards, key) >= gate


def combine(steps: Sequence[Rewards], strategy: Literal["mean", "final"]) -> Rewards:
    """The rewards of a task from those of its verified steps: each one's mean, where a missing one is 0, or the last's.

    Args:
        steps: Rewards of the verified steps, at least one.
        strategy: What the task says.
    """
    if strategy == "final":
        return dict(steps[-1])
    names = dict.fromkeys(name for rewards in steps for name in rewards)
    return {name: sum(rewards.get(name, 0.0) for rewards in steps) / len(steps) for name in names}


def _number(value: object, what: str) -> float:
    if not isinstance(value, int | float) or not _finite(value):
        raise HarborFailure(Fault.REWARD_UNREADABLE, f"{what} is {str(value)[:100]}, not a finite number")
    return float(value)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
