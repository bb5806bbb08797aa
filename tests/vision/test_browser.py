"""A vision-language model in front of a real Chromium: what it sees there is what it is trained on."""

import asyncio
import json
import os
import shutil

import pytest

from agentrl.chat.images import ImageReader
from agentrl.chat.pictures import take_pictures
from agentrl.envs.browser import Browser
from agentrl.envs.browser.chromium import PROGRAMS
from agentrl.rollout.limits import Limits
from agentrl.testing.browsing import solve
from agentrl.types import Outcome
from tests.envs.test_browser import descendants, left
from tests.vision.helpers import family, play, worst_difference

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

FAMILY, SEED = "qwen3_vl", 7
"""The seed is that of the tasks that `play` makes."""


class Recorder:
    """Notes the calls that are made to an environment."""

    def __init__(self, env):
        self._env = env
        self.calls = []

    def __getattr__(self, name):
        attribute = getattr(self._env, name)
        if not asyncio.iscoroutinefunction(attribute):
            return attribute

        async def call(*args):
            names = attribute.__code__.co_varnames[1:]
            self.calls.append({"name": name, "arguments": dict(zip(names, args, strict=False))})
            return await attribute(*args)

        return call


async def calls_that_solve(task):
    """What a scripted policy does, which knows where things are on the page."""
    env = Browser()()
    text, _ = await env.reset(task=task, seed=SEED)
    recorder = Recorder(env)
    await solve(recorder, task, text["text"])
    await env.close()
    return recorder.calls


def test_a_model_that_sees_screenshots_solves_a_task_and_is_scored_as_it_sampled():
    if not any(map(shutil.which, PROGRAMS)):
        if os.environ.get("AGENTRL_REQUIRE_SERVICES") == "1":
            pytest.fail("Chromium is not installed")
        pytest.skip("Chromium is not installed")
    before = {process.pid for process in descendants()}
    tasks = ["menu", "popup", "menu"]
    calls = [asyncio.run(calls_that_solve(task)) for task in tasks[:2]] + [[]]
    scripts = [[f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in episode] + ["Done."] for episode in calls]

    trajectories, generator = play(
        FAMILY,
        [None] * 3,
        scripts,
        columns=[{"task": task} for task in tasks],
        environments=Browser(),
        tools=[],
        limits=Limits(max_context=8192),
    )
    assert left(before) == set()
    assert [trajectory.outcome for trajectory in trajectories] == [Outcome.FINISHED] * 3
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 1.0, 0.0]
    reader = ImageReader(family(FAMILY)[1])
    for trajectory, episode in zip(trajectories, calls, strict=True):
        _, screenshots = take_pictures([*trajectory.prompt, *trajectory.completion])
        assert len(screenshots) == 1 + len(episode), "of reset, and of each action"
        assert {screenshot.size for screenshot in screenshots} == {(640, 480)}
        shown = [reader.process(screenshot).digest for screenshot in screenshots]
        assert [span.image.digest for span in trajectory.images] == shown
        assert worst_difference(FAMILY, [trajectory]) < 1e-4
    different = {span.image.digest for trajectory in trajectories for span in trajectory.images}
    assert len(different) > 4
    assert generator.stats.images_encoded == len(different)
