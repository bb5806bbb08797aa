"""Recorded episodes: what the tiny agent reads before it is trained."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from agentrl import EpisodeDone

Message = dict[str, Any]
Habit = Callable[[list[Message], random.Random], dict[str, Any] | str]
"""Sees the conversation so far and returns a tool call (`name` and `arguments`) or a final answer."""


@dataclass(frozen=True)
class Transcript:
    """A whole conversation and the tools that were offered in it."""

    messages: list[Message]
    tools: list[dict[str, Any]]


def record(environment: Any, habit: Habit, seed: int) -> Transcript:
    """Let a habit play one episode of an environment."""
    rng = random.Random(f"habit {seed}")
    messages = [{"role": "user", "content": environment.reset(seed=seed)}]
    done = False
    while not done:
        move = habit(messages, rng)
        if isinstance(move, str):
            messages.append({"role": "assistant", "content": move})
            break
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": move}]}
        )
        answer, done = call_tool(environment, move)
        messages.append({"role": "tool", "name": move["name"], "content": answer})
    return Transcript(messages, tools_of(environment))


def tools_of(environment: Any) -> list[dict[str, Any]]:
    """Describe the tools of an environment: its public methods other than the reserved ones."""
    methods = inspect.getmembers(environment, inspect.ismethod)
    reserved = ("reset", "get_reward", "close")
    return [
        get_json_schema(method)
        for name, method in methods
        if not name.startswith("_") and name not in reserved
    ]


def call_tool(environment: Any, call: dict[str, Any]) -> tuple[str, bool]:
    """Run one tool call; returns the answer and whether it ended the episode."""
    offered = {tool["function"]["name"] for tool in tools_of(environment)}
    if call.get("name") not in offered:
        return f"error: no tool named {call.get('name')!r}", False
    try:
        return str(getattr(environment, call["name"])(**call["arguments"])), False
    except EpisodeDone as end:
        return str(end), True
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the agent
        return f"error: {error}", False
