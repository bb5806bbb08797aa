"""Tools: what the model may call, and running its calls.

A tool is a sync or async function with type hints and a Google-style docstring. The calls of one turn run
concurrently and are answered in the order in which the model wrote them. One exception: the sync methods of
one environment instance run one after the other, in that order, because they share plain Python state and two
runs with the same seed must give the same results; async methods overlap as their awaits allow.

What the model gets wrong goes back to it as text and counts as failed: an unreadable call, an unknown tool,
wrong arguments, any exception that the tool raises (`SystemExit` included). `EpisodeDone` ends the episode.
`EnvironmentFailure`, `KeyboardInterrupt` and the cancellation of the rollout pass through. A tool that gives back
(or ends the episode with) a `StepReward` rewards the turn that called it.

Arguments are checked against the schema, not converted: names, and the type of each value as JSON has it (an
integer may be written `3.0`; null is fine for what may be left out; the inside of lists and objects is the
tool's own affair).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import reprlib
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import EnvironmentFailure, EpisodeDone, RewardError, ToolDefinitionError
from agentrl.rollout.results import render
from agentrl.rollout.schemas import function_name, tool_schema
from agentrl.rollout.threads import Threads, call, is_async
from agentrl.types import Message, StepReward, ToolCall, ToolResult

RESERVED_NAMES = frozenset({"reset", "get_reward", "close"})
"""Methods of an environment that are never tools, and names that no tool may have."""


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """Something the model may call.

    Attributes:
        name: What the model calls it.
        schema: Its JSON schema in OpenAI form, for the chat template.
        function: What runs.
        instance: The environment it acts on, None for a standalone tool.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    instance: Any = None

    @classmethod
    def from_function(cls, function: Callable[..., Any], *, owner: str | None = None) -> Tool:
        """Make a tool from a function, partial, callable object or bound method, sync or async.

        Args:
            function: What runs.
            owner: The class whose method it is, for error messages.

        Raises:
            ToolDefinitionError: Says what is missing and what to write instead.
        """
        name = function_name(function)
        where = f"the tool {name!r}" if owner is None else f"the tool {name!r} of the environment {owner}"
        return cls(name, tool_schema(function, where), function)

    def bind(self, instance: Any) -> Tool:
        """The same tool acting on one environment instance."""
        return replace(self, function=getattr(instance, self.name), instance=instance)

    def renamed(self, name: str) -> Tool:
        """The same tool under another name."""
        return replace(self, name=name, schema=self.schema | {"function": self.schema["function"] | {"name": name}})


def make_tools(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Make the standalone tools, by name.

    A partial or a callable object without a `__name__` of its own takes the name of its function or class; if
    that is taken it is numbered (`search`, `search_2`). Names that the user wrote must differ.

    Raises:
        ToolDefinitionError: A tool cannot be described, its name is reserved, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = Tool.from_function(function)
        if tool.name in RESERVED_NAMES:
            raise ToolDefinitionError(
                f"a tool cannot be called {tool.name!r}: {sorted(RESERVED_NAMES)} are methods of environments"
            )
        if tool.name in tools and hasattr(function, "__name__"):
            raise ToolDefinitionError(
                f"two tools are called {tool.name!r}: {tools[tool.name].function!r} and {function!r}; rename one"
            )
        if tool.name in tools:
            numbered = (f"{tool.name}_{n}" for n in itertools.count(2))
            tool = tool.renamed(next(name for name in numbered if name not in tools))
        tools[tool.name] = tool
    return tools


class ToolRunner:
    """Runs the calls of a turn; one runner serves all rollouts."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def run(self, calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[ToolResult]:
        """Answer the calls of one turn, in call order.

        Args:
            calls: As the model wrote them.
            tools: What this rollout may call, environment methods bound to its instance.
        """
        turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        answers = []
        for written in calls:
            tool = tools.get(written.name)
            turn: AbstractAsyncContextManager[Any] = nullcontext()
            if tool is not None and tool.instance is not None and not is_async(tool.function):
                turn = turns[id(tool.instance)]
            answers.append(self._answer(written, tool, tools, turn))
        return await asyncio.gather(*answers) if len(answers) > 1 else [await answer for answer in answers]

    async def _answer(
        self,
        written: ToolCall,
        tool: Tool | None,
        tools: Mapping[str, Tool],
        turn: AbstractAsyncContextManager[Any],
    ) -> ToolResult:
        mistake = _mistake(written, tool, tools)
        if mistake is not None or tool is None:
            return ToolResult(written, render(f"Error: {mistake}"), failed=True)
        async with turn:
            start = time.perf_counter()
            result = await self._outcome(written, tool)
            return replace(result, seconds=time.perf_counter() - start, reward=_checked(result.reward, tool))

    async def _outcome(self, written: ToolCall, tool: Tool) -> ToolResult:
        try:
            return _result(written, await call(tool.function, self._threads, **written.arguments))
        except EpisodeDone as ending:
            return replace(_result(written, ending.args[0] if ending.args else ""), done=True)
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            return ToolResult(written, _failure(error), failed=True)  # the tool cancelled something of its own
        except EnvironmentFailure:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it raises is for the model to read)
            return ToolResult(written, _failure(error), failed=True)


def _result(written: ToolCall, value: Any) -> ToolResult:
    """What a tool gave back, with the reward of its turn if it gave one."""
    if isinstance(value, StepReward):
        # None would mean that the tool gave no reward; here it is a wrong one.
        return ToolResult(written, render(value.content), reward=math.nan if value.reward is None else value.reward)
    return ToolResult(written, render(value))


def _checked(reward: Any, tool: Tool) -> float | None:
    """The reward of a `StepReward` as a number."""
    if reward is None:
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"the tool {tool.name!r} gave back a StepReward of {reward!r}; it must be a finite number")
    return number


def tool_message(result: ToolResult) -> Message:
    """The chat message that answers a call."""
    call_id, name = result.call.id, result.call.name
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": result.content}


def _mistake(written: ToolCall, tool: Tool | None, tools: Mapping[str, Tool]) -> str | None:
    """What is wrong with a call, or None."""
    if written.error is not None:
        return written.error
    if tool is None:
        return f"there is no tool named {written.name!r}; the tools are: {', '.join(tools) or 'none'}"
    parameters = tool.schema["function"]["parameters"]
    properties, required = parameters["properties"], parameters.get("required", ())
    wrong = [f"the argument {name!r} is missing" for name in required if name not in written.arguments]
    for name, value in written.arguments.items():
        if name not in properties:
            wrong.append(f"there is no argument {name!r}")
        elif not (_fits(value, properties[name]) or (value is None and name not in required)):
            wrong.append(f"the argument {name!r} must be {_wanted(properties[name])}, not {reprlib.repr(value)}")
    if not wrong:
        return None
    takes = ", ".join(f"{name} ({_wanted(schema)})" for name, schema in properties.items())
    return f"{written.name}: {'; '.join(wrong)}. It takes: {takes or 'no arguments'}"


_JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _JSON_TYPES["number"](value) and value == value // 1,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is of the JSON type that its schema asks for; types unknown to JSON fit anything."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    names = schema.get("type", "any")
    return any(
        name not in _JSON_TYPES or _JSON_TYPES[name](value) for name in (names if isinstance(names, list) else [names])
    )


def _wanted(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_wanted(option) for option in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    names = schema.get("type", "any")
    return " or ".join(names) if isinstance(names, list) else str(names)


def _failure(error: BaseException) -> str | list[dict[str, Any]]:
    """Class and text of an exception for the model, also of one that cannot print itself."""
    return render("Error: " + "".join(traceback.format_exception_only(error)).strip())


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
