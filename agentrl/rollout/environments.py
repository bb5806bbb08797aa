"""Environments: the contract, and a pool of instances that rollouts lease.

An environment is a class (or any factory) whose instances have

- `reset(**columns)`, required, called at the start of each rollout. It gets the dataset columns that its
  signature takes, and `seed`, the same for every member of a group. It may give back None, text (added to
  the last user message, or the user message itself when the dataset has no prompt), content blocks (the
  same, with images) or whole messages (appended);
- `get_reward()`, optional: the reward of the episode just played, a finite number, or None where it does
  not apply; or a list with one number for each sampled turn. It is given what its signature takes of `turns`, the
  number of turns, and `answer`, the text of the model's final answer (None if the episode ended otherwise);
- `close()`, optional: frees what the instance holds, called once;
- tools: every other public method written in the class or a parent. Static and class methods, properties,
  attributes and names that begin with an underscore are not offered to the model;
- `tool_schemas` and `call_tool(name, arguments)`, optional, both or neither: tools that are known at run time only,
  from a server say. The first is an attribute (or property), a list of descriptions as `Tool.from_schema` takes
  them; it is read when the environment is made and again after each `reset`, so a task may have tools of its own.
  The second runs one.
- `replayable = True`, optional: the author's word that an instance, given the same seed, columns and calls, does the
  same again. Then a rollout that was cut off with its process goes on after its calls were repeated
  (`agentrl.rollout.journal`); without it, it is played again from its beginning.

All methods may be async. An environment ends an episode in one of two ways: a tool raises
`EpisodeDone(text)`, or the instance has an attribute (or property) `done` that is true after a tool round. A
method called `done` is a tool and ends nothing.

Instances are reused: one rollout at a time holds an instance, and `reset` must clear what the last one left.
"""

from __future__ import annotations

import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigurationError, EpisodeDone, RewardError, ToolDefinitionError
from agentrl.rollout.calling import is_async
from agentrl.rollout.tools import RESERVED_NAMES, Tool
from agentrl.types import Prompt, Task

__all__ = [
    "EnvironmentSpec",
    "EpisodeDone",
    "apply_observation",
    "as_number",
    "check_columns",
    "described_tools",
    "environment_tools",
    "episode_done",
    "merge_tools",
    "read_reward",
    "reset_arguments",
]

NOT_FOR_RESET = frozenset({"prompt", "environment"})
"""Dataset columns that agentrl itself consumes."""

REWARD_PARAMETERS = frozenset({"turns", "answer"})
"""What `get_reward` may ask for."""


@dataclass(frozen=True, slots=True, eq=False)
class EnvironmentSpec:
    """What an instance tells about its environment, learnt once.

    Attributes:
        name: The key in `environment_factory`, None for a single environment.
        class_name: Name of the instances' class; messages and metrics use it.
        tools: Its methods as tools, not bound to an instance, and what `tool_schemas` said at first.
        described: Whether it has `tool_schemas`.
        reset_parameters: The parameters of `reset`.
        has_reward: Whether it owns a reward.
        reward_parameters: What its `get_reward` takes of `REWARD_PARAMETERS`.
        replayable: Whether an instance, given the same seed and the same calls, does the same again.
    """

    name: str | None
    class_name: str
    tools: Mapping[str, Tool]
    reset_parameters: Mapping[str, inspect.Parameter]
    has_reward: bool
    reward_parameters: frozenset[str] = frozenset()
    described: bool = False
    replayable: bool = False

    @classmethod
    def of(cls, instance: Any, name: str | None = None) -> EnvironmentSpec:
        """Check an instance against the contract.

        Raises:
            ToolDefinitionError: It is not an environment, or one of its methods cannot be a tool.
        """
        class_name = type(instance).__name__
        if not callable(getattr(instance, "reset", None)):
            raise ToolDefinitionError(
                f"the environment {class_name} has no method `reset`; define `def reset(self, **kwargs)`, "
                "which is called at the start of each rollout"
            )
        get_reward = getattr(instance, "get_reward", None)
        parameters = inspect.signature(get_reward).parameters if callable(get_reward) else {}
        if wanted := [name for name in _required(parameters) if name not in REWARD_PARAMETERS]:
            raise ToolDefinitionError(
                f"{class_name}.get_reward is called without arguments (but for `turns` and `answer`) and needs {wanted}"
            )
        described = _has_described_tools(instance)
        tools = environment_tools(instance)
        return cls(
            name=name,
            class_name=class_name,
            tools=tools | described_tools(instance) if described else tools,
            described=described,
            reset_parameters=inspect.signature(instance.reset).parameters,
            has_reward=callable(get_reward),
            reward_parameters=REWARD_PARAMETERS & parameters.keys(),
            replayable=getattr(instance, "replayable", False) is True,
        )

    def bind(self, instance: Any) -> dict[str, Tool]:
        """The tools of one instance, as they are after a `reset`."""
        methods = {name: tool.bind(instance) for name, tool in self.tools.items() if tool.instance is None}
        return methods | described_tools(instance) if self.described else methods


def environment_tools(instance: Any) -> dict[str, Tool]:
    """The public methods of an instance as tools, by name, not bound to it.

    Raises:
        ToolDefinitionError: A public method lacks hints or documentation; names class, method and what.
    """
    cls = type(instance)
    tools = {}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in RESERVED_NAMES or not inspect.isfunction(method):
            continue
        tool = Tool.from_function(getattr(instance, name), owner=cls.__name__)
        tools[name] = replace(tool.renamed(name), function=method)  # the attribute's name, also for an alias
    return tools


def described_tools(instance: Any) -> dict[str, Tool]:
    """The tools that an instance lists in `tool_schemas`, bound to it.

    Raises:
        ToolDefinitionError: A description is not one, or two have the same name or that of a method.
    """
    owner = type(instance).__name__
    tools: dict[str, Tool] = {}
    for description in instance.tool_schemas:
        tool = Tool.from_schema(description, _caller(instance))
        method = tool.name not in RESERVED_NAMES and callable(getattr(type(instance), tool.name, None))
        if tool.name in tools or method:
            raise ToolDefinitionError(f"{owner}.tool_schemas has a second tool called {tool.name!r}")
        tools[tool.name] = replace(tool, function=_caller(instance, tool.name), owner=owner, instance=instance)
    return tools


def _has_described_tools(instance: Any) -> bool:
    has = [hasattr(instance, "tool_schemas"), callable(getattr(instance, "call_tool", None))]
    if any(has) and not all(has):
        raise ToolDefinitionError(
            f"{type(instance).__name__} has only one of `tool_schemas` and `call_tool(name, arguments)`; "
            "the first describes tools, the second runs them"
        )
    return all(has)


def _caller(instance: Any, name: str = "") -> Callable[..., Any]:
    """A function of a described tool's arguments, async if `call_tool` is."""
    if is_async(instance.call_tool):

        async def ask(**arguments: Any) -> Any:
            return await instance.call_tool(name, arguments)

        return ask
    return lambda **arguments: instance.call_tool(name, arguments)


def merge_tools(standalone: Mapping[str, Tool], environment: Mapping[str, Tool], owner: str) -> dict[str, Tool]:
    """Standalone tools and those of one environment together.

    Raises:
        ToolDefinitionError: A name is in both.
    """
    if both := sorted(standalone.keys() & environment.keys()):
        raise ToolDefinitionError(
            f"{both} are names of `tools` and of methods of the environment {owner}; rename one of each pair"
        )
    return {**standalone, **environment}


def check_columns(spec: EnvironmentSpec, columns: Iterable[str]) -> None:
    """Check that the dataset has every column that `reset` cannot do without.

    Raises:
        ConfigurationError: Names class, parameter and the columns that there are.
    """
    passed = sorted(set(columns) - NOT_FOR_RESET)
    missing = [name for name in _required(spec.reset_parameters) if name not in {*passed, "seed"}]
    if missing:
        raise ConfigurationError(
            f"{spec.class_name}.reset needs {missing}, but the dataset only offers it the columns {passed} "
            "(and `seed`); add the column, or give the parameter a default"
        )


def reset_arguments(parameters: Mapping[str, inspect.Parameter], task: Task) -> dict[str, Any]:
    """The keyword arguments for `reset`: the row's columns and the group's seed, as far as it takes them.

    `prompt` and `environment` are never passed. A column called `seed` wins over the group's seed.
    """
    offered = {"seed": task.seed} | {k: v for k, v in task.columns.items() if k not in NOT_FOR_RESET}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def apply_observation(prompt: Prompt | None, observation: Any, class_name: str) -> Prompt:
    """The prompt that the model sees: the dataset's, with what `reset` gave back; neither is changed.

    Args:
        prompt: The dataset's prompt, None when it has none.
        observation: What `reset` gave back: None, text, content blocks or messages.
        class_name: The environment's class, for error messages.

    Raises:
        ToolDefinitionError: `reset` gave back something else, or there is no prompt at all.
    """
    if observation is None or observation == []:
        if not prompt:
            raise ToolDefinitionError(
                f"there is no prompt: the dataset has none and {class_name}.reset gave back {observation!r}; "
                "give back the task as text or messages, or add a `prompt` column"
            )
        return prompt
    kind = _observation_kind(observation)
    if kind is None:
        raise ToolDefinitionError(
            f"{class_name}.reset gave back {reprlib.repr(observation)}; it may give back None, a string, a "
            'list of content blocks such as {"type": "text", "text": ...} or a list of messages with a "role"'
        )
    if isinstance(prompt, str):
        if kind != "text":
            raise ToolDefinitionError(
                f"{class_name}.reset gave back {kind}, which cannot be added to the plain-text prompt "
                f"{reprlib.repr(prompt)}; make the dataset's prompts lists of messages"
            )
        return prompt + observation
    messages = list(prompt or [])
    if kind == "messages":
        return messages + observation
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return [*messages, {"role": "user", "content": observation}]
    last = messages[users[-1]]
    messages[users[-1]] = last | {"content": _joined(last.get("content"), observation)}
    return messages


def episode_done(instance: Any) -> bool:
    """Whether the instance says that its episode is over."""
    done = getattr(instance, "done", False)
    return not callable(done) and bool(done)


def read_reward(value: Any, class_name: str, turns: int = 0) -> float | list[float] | None:
    """Read what `get_reward` gave back.

    Args:
        value: The value.
        class_name: The environment's class, for error messages.
        turns: Sampled turns of the episode: the length that a list must have.

    Returns:
        None, one number for the episode, or one for each turn.

    Raises:
        RewardError: It is neither None nor a finite number nor a list of as many as there were turns.
    """
    if isinstance(value, list | tuple):
        if len(value) != turns:
            raise RewardError(
                f"{class_name}.get_reward gave back {len(value)} reward(s) for {turns} sampled turns; it must give "
                "back one for each, also for turns without a valid tool call and for the final answer (take `turns` as "
                "a parameter to know their number). Tools can reward their turn themselves: return StepReward(...)"
            )
        return [_finite(entry, class_name) for entry in value] or None
    return None if value is None else _finite(value, class_name)


def _finite(value: Any, class_name: str) -> float:
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise RewardError(
            f"{class_name}.get_reward gave back {reprlib.repr(value)}; it must give back a finite number, "
            "or None where the reward does not apply"
        )
    return number


def as_number(value: Any) -> float | None:
    """A Python, NumPy or torch scalar as a float, None if it is no number."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    named = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [name for name, p in parameters.items() if p.kind in named and p.default is p.empty]


def _observation_kind(observation: Any) -> str | None:
    if isinstance(observation, str):
        return "text"
    if not isinstance(observation, list) or not all(isinstance(item, dict) for item in observation):
        return None
    if all(isinstance(item.get("role"), str) for item in observation):
        return "messages"
    if all(isinstance(item.get("type"), str) and "role" not in item for item in observation):
        return "content blocks"
    return None


def _joined(content: Any, observation: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content followed by an observation; text stays text as long as it can."""
    if isinstance(observation, str) and (content is None or isinstance(content, str)):
        return (content or "") + observation
    return _blocks(content) + _blocks(observation)


def _blocks(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or [])
