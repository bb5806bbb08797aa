"""Gymnasium environments as environments of a rollout."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gymnasium as gym
import jsonschema
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from agentrl.envs import spaces
from agentrl.envs.gymnasium import Gymnasium
from agentrl.errors import ConfigurationError
from agentrl.types import Message, Outcome
from tests.envs.scripts import play
from tests.envs.training import calling, rewards_of_training, tiny_agent
from tests.rollout.helpers import call, tasks, turn

WAYS = ["left", "down", "right", "up"]
LAKE = {"is_slippery": False, "actions": WAYS, "prompt": "Cross the lake."}


def step(action: str) -> list[int]:
    return turn(call("step", f'{{"action": {action}}}'))


class Odd(gym.Env):
    """Does what a test tells it."""

    action_space = gym_spaces.Box(-1, 1, (2,), np.float32)
    observation_space = gym_spaces.Discrete(3)

    def __init__(self, reward: Any = 0.5, fails: bool = False) -> None:
        self.reward, self.fails = reward, fails

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        return int(self.np_random.integers(3)), {}

    def step(self, action: Any) -> tuple[int, Any, bool, bool, dict]:
        if self.fails:
            raise RuntimeError("the physics exploded")
        assert action.dtype == np.float32
        return 1, self.reward, False, False, {}


def test_an_episode_is_played_to_the_goal_and_rewarded():
    way = [step(f'"{WAYS[a]}"') for a in (1, 1, 2, 1, 2, 2)]
    (trajectory,) = play(Gymnasium("FrozenLake-v1", **LAKE), way)
    assert trajectory.outcome is Outcome.ENV_DONE
    assert trajectory.reward == 1.0
    assert [turn.results[0].content for turn in trajectory.turns] == ["4", "8", "9", "13", "14", "15"]
    assert trajectory.prompt[-1]["content"].endswith("Cross the lake.\n0")


def test_truncation_ends_the_episode_too():
    (trajectory,) = play(Gymnasium("FrozenLake-v1", max_episode_steps=2, **LAKE), [step('"up"')] * 3)
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.ENV_DONE, 0.0, 2)


@pytest.mark.parametrize(("reward", "expected"), [("sum", 1.0), ("last", 0.5)])
def test_the_reward_is_the_sum_of_the_steps_or_the_last(reward, expected):
    (trajectory,) = play(Gymnasium(Odd, reward=reward), [step("[0.5, -1]"), step("[0, 0]"), turn("ok")])
    assert trajectory.reward == expected


def test_members_of_a_group_start_alike():
    """The seed of the group reaches the environment's own generator."""
    starts = [t.prompt[-1]["content"] for t in play(Gymnasium(Odd), [turn("ok")], rollouts=8)]
    groups = [task.group for task in tasks(8)]
    for group in set(groups):
        assert len({start for start, owner in zip(starts, groups, strict=True) if owner == group}) == 1


@pytest.mark.parametrize("action", ['"sideways"', "7", "null"])
def test_a_wrong_action_is_told_to_the_model_and_takes_no_step(action):
    (trajectory,) = play(Gymnasium("FrozenLake-v1", **LAKE), [step(action), step('"down"'), turn("ok")])
    assert trajectory.turns[0].results[0].failed
    assert trajectory.turns[1].results[0].content == "4"


@pytest.mark.parametrize("action", ["[0.5]", "[2, 0]", '["a", "b"]', '{"x": 1}', "[[0, 0]]"])
def test_an_action_outside_of_the_space_is_told_to_the_model(action):
    (trajectory,) = play(Gymnasium(Odd), [step(action), turn("ok")])
    assert trajectory.turns[0].results[0].failed
    assert trajectory.reward == 0.0


@pytest.mark.parametrize("broken", [{"fails": True}, {"reward": float("nan")}, {"reward": "much"}])
def test_what_breaks_in_the_environment_is_its_failure(broken):
    (trajectory,) = play(Gymnasium(Odd) if not broken else Gymnasium(lambda: Odd(**broken)), [step("[0, 0]")])
    assert trajectory.outcome is Outcome.ENV_FAILURE


def test_images_are_drawn_after_each_step():
    class Drawn(Odd):
        def render(self) -> np.ndarray:
            return np.full((4, 6, 3), 9, np.uint8)

    episode = Gymnasium(Drawn, images=True, prompt="Look.")()
    prompt, text, image = episode.reset(seed=0)
    assert (prompt["text"], image["type"], image["image"].size) == ("Look.", "image", (6, 4))
    assert text["type"] == "text"
    assert episode.call_tool("step", {"action": [0, 0]})[1]["image"].size == (6, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gymnasium("NoSuchThing-v0"), "NoSuchThing"),
        (lambda: Gymnasium("FrozenLake-v1", actions=["left"]), "names 1 actions"),
        (lambda: Gymnasium("FrozenLake-v1", reward="mean"), "sum"),
    ],
)
def test_a_wrong_description_is_an_error_at_construction(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    "space",
    [
        gym_spaces.Discrete(5, start=-2),
        gym_spaces.MultiDiscrete([2, 5]),
        gym_spaces.MultiBinary(4),
        gym_spaces.Box(-1.0, 1.0, (2, 3), np.float32),
        gym_spaces.Box(0, 9, (3,), np.int64),
        gym_spaces.Text(8),
        gym_spaces.Tuple([gym_spaces.Discrete(2), gym_spaces.Text(3)]),
        gym_spaces.Dict(where=gym_spaces.Box(0, 1, (2,), np.float64), what=gym_spaces.Discrete(3)),
    ],
    ids=str,
)
def test_any_action_survives_being_written_as_json(space):
    """What a model would write for an action is read as that action, and the schema allows it."""
    space.seed(0)
    for _ in range(20):
        action = space.sample()
        written = json.loads(json.dumps(_jsonable(action)))
        jsonschema.validate(written, spaces.schema(space, "here"))
        read = spaces.element(space, written)
        assert space.contains(read)
        assert _jsonable(read) == written


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_jsonable(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize(
    "space", [gym_spaces.Box(0, 255, (64, 64, 3), np.uint8), gym_spaces.Graph(gym_spaces.Discrete(2), None)]
)
def test_an_action_that_no_model_can_write_is_refused(space):
    with pytest.raises(ConfigurationError, match=r"(?i)wrap the environment"):
        spaces.schema(space, "the action space of X")


class Levers(gym.Env):
    """One of four levers pays."""

    action_space = gym_spaces.Discrete(4)
    observation_space = gym_spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict]:
        return 0, float(action == 2), True, False, {}


@pytest.mark.slow
def test_training_raises_the_reward(tmp_path: Path) -> None:
    levers = Gymnasium(Levers, prompt="Pull a lever.", actions=["a", "b", "c", "d"])
    rng = random.Random(0)

    def game() -> list[Message]:
        return [
            {"role": "user", "content": levers().reset(seed=0)},
            calling({"name": "step", "arguments": {"action": rng.choice("abcd")}}),
            {"role": "tool", "name": "step", "content": "0"},
        ]

    agent = tiny_agent(game, levers().tool_schemas, tmp_path / "agents", games=100)
    rewards = rewards_of_training(agent, levers, None, tmp_path, steps=8, rollouts=24)
    assert len(rewards) == 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
