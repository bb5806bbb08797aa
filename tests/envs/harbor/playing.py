"""Plays Harbor tasks without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.envs import Harbor
from agentrl.envs.harbor import Fault, HarborEnvironment, HarborFailure
from agentrl.errors import EpisodeDone


@dataclass
class Verdict:
    """What came of an episode; `heard` is what the agent was told."""

    reward: float | None = None
    rewards: dict[str, float] | None = None
    fault: Fault | None = None
    error: str = ""
    heard: str = ""
    late: bool = False


def play(harbor: Harbor, acts: Sequence[str], task: str | None = None) -> Verdict:
    """Play a task: run a command in each of its steps."""
    return asyncio.run(play_async(harbor, acts, task))


async def play_async(harbor: Harbor, acts: Sequence[str], task: str | None = None) -> Verdict:
    environment, verdict = harbor(), Verdict()
    try:
        verdict.heard = await environment.reset(harbor.tasks()["task"][0] if task is None else task)
        try:
            await _act(environment, acts, verdict)
        except EpisodeDone as done:
            verdict.heard += f"\n{done}"
            verdict.late = "time" in str(done)
        verdict.reward = await environment.get_reward()
    except HarborFailure as failure:
        verdict.fault, verdict.error = failure.fault, str(failure)
    finally:
        verdict.rewards = environment.rewards or None
        await environment.close()
    return verdict


async def _act(environment: HarborEnvironment, acts: Sequence[str], verdict: Verdict) -> None:
    for number, act in enumerate(acts):
        if number:
            verdict.heard += "\n" + await environment.call_tool("submit", {})
        verdict.heard += "\n" + await environment.call_tool("bash", {"command": act})
