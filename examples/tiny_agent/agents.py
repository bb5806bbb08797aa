"""The tiny agents of the examples, and the players whose games they have read.

Each player is a function of the conversation so far. The good ones know what to do; made careless, they play at
random now and then. An agent reads games of the good player first and of the careless one afterwards, so that
it ends up with tools well in hand and a poor judgement.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_agent.transcripts import Message, Player, Transcript, record
from tiny_agent.warm_start import Lesson, make_tiny_agent


def guessing_agent(environment: Callable[[], Any]) -> Path:
    """An agent for `GuessNumber` that knows how to halve and guesses at random three times out of ten."""
    highest = environment().highest

    def anything(messages: list[Message], rng: random.Random) -> dict[str, Any]:
        return _call("guess", number=rng.randint(1, highest))

    return make_tiny_agent(
        [
            Lesson(_games(environment, halve, 500), steps=100),
            Lesson(_games(environment, careless(halve, anything, 0.4), 1500), steps=100),
        ]
    )


def halve(messages: list[Message], rng: random.Random) -> dict[str, Any]:
    """Guess 8 first; after that move by half as much as the guess before did, up or down."""
    if len(messages) == 1:
        return _call("guess", number=8)
    number = messages[-2]["tool_calls"][0]["function"]["arguments"]["number"]
    # The numbers that are reached with a step of 4, 2 or 1 are odd multiples of it.
    last_step = number & -number
    step = max(last_step // 2, 1)
    higher = messages[-1]["content"].startswith("higher")
    return _call("guess", number=number + step if higher else max(number - step, 1))


def careless(player: Player, blunder: Player, how_often: float) -> Player:
    """A player who does something else now and then."""

    def play(messages: list[Message], rng: random.Random) -> dict[str, Any] | str:
        return (blunder if rng.random() < how_often else player)(messages, rng)

    return play


def _games(environment: Callable[[], Any], player: Player, count: int) -> list[Transcript]:
    return [record(environment(), player, seed) for seed in range(count)]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}
