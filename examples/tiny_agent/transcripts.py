"""Recorded episodes: what the tiny agent reads before it is trained."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from agentrl import EpisodeDone

Message = dict[str, Any]
Player = Callable[[list[Message], random.Random], dict[str, Any] | str]
"""Sees the conversation so far and returns a tool call (`name` and `arguments`) or a final answer."""

NOT_TOOLS = ("reset", "get_reward", "close")


@dataclass(frozen=True)
class Transcript:
    """A whole conversation and the tools that were offered in it."""

    messages: list[Message]
    tools: list[dict[str, Any]]


def record(environment: Any, player: Player, seed: int) -> Transcript:
    """Let a player play one episode of an environment."""
    rng = random.Random(f"player {seed}")  # not the environment's own numbers over again
    tools = tools_of(environment)
    messages = [{"role": "user", "content": environment.reset(seed=seed)}]
    done = False
    while not done:
        move = player(messages, rng)
        if isinstance(move, str):
            messages.append({"role": "assistant", "content": move})
            break
        messages.append(calling(move))
        answer, done = call_tool(environment, move)
        messages.append({"role": "tool", "name": move["name"], "content": answer})
    return Transcript(messages, tools)


def calling(call: dict[str, Any]) -> Message:
    """The message of an assistant that makes one call and says nothing."""
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def tools_of(environment: Any) -> list[dict[str, Any]]:
    """Describe the tools of an environment, as the trainer would."""
    return [get_json_schema(getattr(environment, name)) for name in _tool_names(type(environment))]


def call_tool(environment: Any, call: dict[str, Any]) -> tuple[str, bool]:
    """Run a tool call; returns the answer and whether it ended the episode."""
    if call.get("name") not in _tool_names(type(environment)):
        return f"error: no tool named {call.get('name')!r}", False
    try:
        return str(getattr(environment, call["name"])(**call["arguments"])), False
    except EpisodeDone as end:
        return str(end), True
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the agent
        return f"error: {error}", False


@functools.cache
def _tool_names(environment: type) -> list[str]:
    methods = inspect.getmembers(environment, inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in NOT_TOOLS]
