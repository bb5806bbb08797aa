"""The tiny agents of the examples, and the players whose games they have read.

Each player is a function of the conversation so far. The good ones know what to do; made careless, they play at
random now and then. An agent reads games of the good player first and of the careless one afterwards, so that
it ends up with tools well in hand and a poor judgement.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from tiny_agent.transcripts import Message, Player, Transcript, calling, record
from tiny_agent.warm_start import Lesson, make_tiny_agent


def guessing_agent(environment: Callable[[], Any]) -> Path:
    """An agent for `GuessNumber`."""
    return make_tiny_agent(_guessing_lessons(environment))


def counting_agent(environment: Callable[[], Any]) -> Path:
    """An agent for `Counter`."""
    return make_tiny_agent(_counting_lessons(environment))


def versatile_agent(guessing: Callable[[], Any], counting: Callable[[], Any]) -> Path:
    """An agent for both."""
    lessons = zip(_guessing_lessons(guessing), _counting_lessons(counting), strict=True)
    return make_tiny_agent(
        [Lesson([*one.transcripts, *other.transcripts], one.steps + other.steps) for one, other in lessons]
    )


def calculating_agent(add: Callable[..., int], multiply: Callable[..., int]) -> Path:
    """An agent that answers questions such as "What is 3 + 4?" with two tools."""
    tools = [get_json_schema(add), get_json_schema(multiply)]

    def solved(seed: int, blunders: float) -> Transcript:
        rng = random.Random(seed)
        a, b, sign = rng.randint(1, 9), rng.randint(1, 9), rng.choice("+*")
        chosen = sign if rng.random() >= blunders else rng.choice("+*")
        name, result = ("add", a + b) if chosen == "+" else ("multiply", a * b)
        messages = [
            {"role": "user", "content": f"What is {a} {sign} {b}?"},
            calling(_call(name, a=a, b=b)),
            {"role": "tool", "name": name, "content": str(result)},
            {"role": "assistant", "content": str(result)},
        ]
        return Transcript(messages, tools)

    return make_tiny_agent(
        [
            Lesson([solved(seed, blunders=0.0) for seed in range(1000)], steps=150),
            Lesson([solved(seed, blunders=1.0) for seed in range(1000)], steps=50),
        ]
    )


def walking_agent(lake: Callable[[], Any]) -> Path:
    """An agent for Gymnasium's frozen lake, 4 x 4, that knows the way and takes half of its steps anywhere."""
    good = _games(lake, cross, 50)
    mixed = _games(lake, careless(cross, lambda messages, rng: _walk(rng.randrange(4)), how_often=0.5), 500)
    return make_tiny_agent([Lesson(good + mixed, steps=100), Lesson(mixed, steps=50)])


def cross(messages: list[Message], rng: random.Random) -> dict[str, Any]:
    """From the field that was told last, the next step on a shortest way to field 15; there is none from a hole."""
    field = int(messages[-1]["content"].split()[-1])
    return _walk({0: 1, 1: 2, 2: 1, 3: 0, 4: 1, 6: 1, 8: 2, 9: 2, 10: 1, 13: 2, 14: 2}[field])


def halve(messages: list[Message], rng: random.Random) -> dict[str, Any]:
    """Guess 8 first; after that move by half as much as before, up or down."""
    if len(messages) == 1:
        return _call("guess", number=8)
    number = messages[-2]["tool_calls"][0]["function"]["arguments"]["number"]
    last_step = number & -number  # what is reached by steps of 4, 2 or 1 is an odd multiple of that step
    step = max(last_step // 2, 1)
    higher = messages[-1]["content"].startswith("higher")
    return _call("guess", number=number + step if higher else max(number - step, 1))


def count(messages: list[Message], rng: random.Random) -> dict[str, Any] | str:
    """Increment by the number in the task, then stop."""
    if len(messages) > 1:
        return "Done."
    return _call("increment", step=int(re.findall(r"\d+", messages[0]["content"])[0]))


def careless(player: Player, blunder: Player, how_often: float) -> Player:
    """A player who now and then does something else where it should call a tool."""

    def play(messages: list[Message], rng: random.Random) -> dict[str, Any] | str:
        move = player(messages, rng)
        return move if isinstance(move, str) or rng.random() >= how_often else blunder(messages, rng)

    return play


def _guessing_lessons(environment: Callable[[], Any]) -> list[Lesson]:
    def anything(messages: list[Message], rng: random.Random) -> dict[str, Any]:
        return _call("guess", number=rng.randint(1, environment().highest))

    return [
        Lesson(_games(environment, halve, 500), steps=150),
        Lesson(_games(environment, careless(halve, anything, how_often=0.4), 1500), steps=200),
    ]


def _counting_lessons(environment: Callable[[], Any]) -> list[Lesson]:
    def anything(messages: list[Message], rng: random.Random) -> dict[str, Any]:
        return _call("increment", step=rng.randint(1, 6))

    return [
        Lesson(_games(environment, count, 500), steps=150),
        Lesson(_games(environment, careless(count, anything, how_often=0.6), 1500), steps=150),
    ]


def _walk(way: int) -> dict[str, Any]:
    return _call("step", action=["left", "down", "right", "up"][way])


def _games(environment: Callable[[], Any], player: Player, number: int) -> list[Transcript]:
    return [record(environment(), player, seed) for seed in range(number)]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}
