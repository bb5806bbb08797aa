"""Gymnasium environments: one tool, `step`, whose argument is an action.

    GRPOTrainer(model=..., environment_factory=Gymnasium("FrozenLake-v1", is_slippery=False), ...)

`reset(seed)` starts an episode with the group's seed and tells the model the observation; `step(action)` takes an
action and tells what came of it. `terminated` and `truncated` end the episode. The reward of the episode is the sum of
the rewards of its steps, or the last one. See https://gymnasium.farama.org/api/env/ for the interface.

What the model writes as an action is checked against the action space and, if wrong, answered with what was expected;
it takes no step. Whatever `reset` or `step` of the environment raises is a failure of the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gym_spaces

from agentrl.envs import spaces
from agentrl.errors import ConfigurationError, EnvironmentFailure, EpisodeDone

DESCRIPTION = "Take one step in the environment."


class Gymnasium:
    """An `environment_factory` of one Gymnasium environment.

    Args:
        env: The name it is registered with, or a function that makes one.
        prompt: What the model is told before the first observation; None if the dataset's prompt says it.
        description: What the tool `step` is said to do.
        actions: Names for the actions of a `Discrete` space, in order. The model writes a name instead of a number.
        images: Show the model the environment as an image after each step: pixels where the observation is pixels,
            else what `render` draws (`render_mode="rgb_array"`). Needs a vision model.
        reward: "sum" of the rewards of all steps, or the "last" one.
        **options: For `gymnasium.make`, or for the function.

    Raises:
        ConfigurationError: There is no such environment, or its actions cannot be written by a model.
    """

    def __init__(
        self,
        env: str | Callable[..., gym.Env[Any, Any]],
        *,
        prompt: str | None = None,
        description: str = DESCRIPTION,
        actions: Sequence[str] | None = None,
        images: bool = False,
        reward: Literal["sum", "last"] = "sum",
        **options: Any,
    ) -> None:
        if reward not in ("sum", "last"):
            raise ConfigurationError(f'reward={reward!r}: expected "sum" or "last"')
        if images and isinstance(env, str):
            options = {"render_mode": "rgb_array"} | options
        self.name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        self.prompt, self.description, self.images, self.reward = prompt, description, images, reward
        self.actions = None if actions is None else list(actions)
        self._make = (lambda: gym.make(env, **options)) if isinstance(env, str) else (lambda: env(**options))
        try:
            made = self._make()
        except gym.error.Error as error:
            raise ConfigurationError(f"gymnasium cannot make {self.name!r}: {error}") from error
        try:
            self.tool_schemas = [self._step_schema(made.action_space)]
        finally:
            made.close()

    def __call__(self) -> GymnasiumEpisode:
        """Make an instance."""
        return GymnasiumEpisode(self, self._make())

    def _step_schema(self, space: gym.Space[Any]) -> dict[str, Any]:
        action = spaces.schema(space, f"the action space of {self.name!r}")
        if self.actions is not None:
            if not isinstance(space, gym_spaces.Discrete) or len(self.actions) != space.n:
                raise ConfigurationError(
                    f"actions={self.actions!r} names {len(self.actions)} actions, but the action space of "
                    f"{self.name!r} is {space}"
                )
            action = {"type": "string", "enum": self.actions}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        return {"name": "step", "description": self.description, "parameters": parameters}


class GymnasiumEpisode:
    """One instance: see the module. Made by `Gymnasium`, which says what it looks like to the model.

    Attributes:
        env: The Gymnasium environment, for reward functions that want to look into it.
        rewards: The rewards of the steps so far.
    """

    def __init__(self, factory: Gymnasium, env: gym.Env[Any, Any]) -> None:
        self._factory = factory
        self.env = env
        self.tool_schemas = factory.tool_schemas
        self.rewards: list[float] = []

    def reset(self, seed: int, options: dict[str, Any] | None = None) -> str | list[dict[str, Any]]:
        """Start an episode.

        Args:
            seed: The group's seed, of which Gymnasium takes 32 bits.
            options: The dataset's column of that name, for environments that take it.
        """
        self.rewards = []
        try:
            observation, _ = self.env.reset(seed=seed % 2**32, options=options)
        except Exception as error:
            raise EnvironmentFailure(f"{self._factory.name}.reset: {error!r}") from error
        shown = self._shown(observation)
        if self._factory.prompt is None:
            return shown
        if isinstance(shown, str):
            return f"{self._factory.prompt}\n{shown}"
        return [{"type": "text", "text": self._factory.prompt}, *shown]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str | list[dict[str, Any]]:
        """Take a step; `step` is the only tool."""
        written = arguments["action"]
        names = self._factory.actions
        if names is not None:
            action = int(self.env.action_space.start) + names.index(written)  # type: ignore[attr-defined]
        else:
            action = spaces.element(self.env.action_space, written)
        try:
            observation, reward, terminated, truncated, _ = self.env.step(action)
        except Exception as error:
            raise EnvironmentFailure(f"{self._factory.name}.step({written!r}): {error!r}") from error
        self.rewards.append(self._checked(reward))
        shown = self._shown(observation)
        if terminated or truncated:
            raise EpisodeDone(shown)
        return shown

    def get_reward(self) -> float:
        """The reward of the episode; 0 if it took no step."""
        rewards = self.rewards or [0.0]
        return math.fsum(rewards) if self._factory.reward == "sum" else rewards[-1]

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _checked(self, reward: Any) -> float:
        number = float(reward) if isinstance(reward, int | float | np.number | np.bool_) else math.nan
        if not math.isfinite(number):
            raise EnvironmentFailure(f"{self._factory.name}.step gave the reward {reward!r}; expected a finite number")
        return number

    def _shown(self, observation: Any) -> str | list[dict[str, Any]]:
        image = spaces.picture(observation)
        if not self._factory.images:
            if image is not None:
                raise ConfigurationError(f"{self._factory.name} shows pixels: set images=True, with a vision model")
            return spaces.text(observation)
        if image is not None:
            return [{"type": "image", "image": image}]
        drawn = spaces.picture(self.env.render())
        if drawn is None:
            raise ConfigurationError(f"{self._factory.name} draws nothing: images=True needs render_mode='rgb_array'")
        return [{"type": "text", "text": spaces.text(observation)}, {"type": "image", "image": drawn}]
