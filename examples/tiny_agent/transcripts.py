"""Recorded episodes: what the tiny agent reads before it is trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl import EpisodeDone, Tool
from agentrl.rollout.environments import EnvironmentSpec

Message = dict[str, Any]
Player = Callable[[list[Message], random.Random], dict[str, Any] | str]
"""Sees the conversation so far and returns a tool call (`name` and `arguments`) or a final answer."""


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
        answer, done = call_tool(tools, move)
        messages.append({"role": "tool", "name": move["name"], "content": answer})
    return Transcript(messages, [tool.schema for tool in tools.values()])


def calling(call: dict[str, Any]) -> Message:
    """The message of an assistant that makes one call and says nothing."""
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def tools_of(environment: Any) -> dict[str, Tool]:
    """The tools of an environment, as the trainer finds them."""
    return EnvironmentSpec.of(environment).bind(environment)


def call_tool(tools: Mapping[str, Tool], call: dict[str, Any]) -> tuple[str, bool]:
    """Run a tool call; returns the answer and whether it ended the episode."""
    tool = tools.get(call.get("name", ""))
    if tool is None:
        return f"error: no tool named {call.get('name')!r}", False
    try:
        return str(tool.function(**call["arguments"])), False
    except EpisodeDone as end:
        return str(end), True
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the agent
        return f"error: {error}", False
