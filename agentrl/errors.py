"""The exceptions that a user can meet.

Each message says what was wrong, where, what was expected and which setting to change.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Base of all errors that agentrl raises on purpose."""


class ConfigurationError(AgentRLError, ValueError):
    """An argument, a dataset or a combination of them cannot work; raised at construction."""


class ToolDefinitionError(ConfigurationError):
    """A tool or an environment class does not meet the contract."""


class TemplateError(ConfigurationError):
    """A chat template cannot be used for token-exact training."""


class RewardError(AgentRLError, ValueError):
    """A reward function returned something that is not one reward per completion."""


class RolloutError(AgentRLError, RuntimeError):
    """Rollouts cannot go on (every environment fails, the generator broke)."""


class ToolBrokenError(RolloutError):
    """A tool fails wherever it is called, and the model would learn to avoid it."""


class EnvironmentFailure(AgentRLError, RuntimeError):  # noqa: N818 (a state of the world, not a mistake)
    """Raised by an environment's tool to say that the environment itself broke, not the model's call.

    The rollout is tried again on a fresh instance, then dropped from its group; it never becomes a reward.

    Attributes:
        retry: Whether it is tried again; an error that says no (it would be the same again) is dropped at once.
    """

    retry = True


class ImageError(EnvironmentFailure):
    """An image cannot be read, or cannot be placed among the tokens of its rollout; no other rollout is concerned."""


class EpisodeDone(Exception):  # noqa: N818 (an ending, not an error)
    """Raised by an environment's tool to end the episode; its text is the tool's result."""


class GenerationError(AgentRLError, RuntimeError):
    """The generator cannot serve a request."""


class ContextFull(GenerationError):  # noqa: N818 (a state of the world, not a mistake)
    """A conversation no longer fits the context of a server that counts it itself; its episode ends as truncated."""
