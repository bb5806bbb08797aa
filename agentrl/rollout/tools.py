"""Tools: what the model may call, and running its calls.

A tool is a sync or async function with type hints and a Google-style docstring. The calls of one turn run
concurrently and are answered in the order in which the model wrote them. One exception: the sync methods of
one environment instance run one after the other, in that order, because they share plain Python state and two
runs with the same seed must give the same results; async methods overlap as their awaits allow.

What the model gets wrong goes back to it as text and counts as failed: an unreadable call, an unknown tool,
wrong arguments, any exception that the tool raises (`SystemExit` included), and a call that takes longer than its
policy allows. `EpisodeDone` ends the episode. `EnvironmentFailure`, `KeyboardInterrupt` and the cancellation of the
rollout pass through, and so does the word that a tool is broken altogether (`agentrl.rollout.policy`). A tool that
gives back (or ends the episode with) a `StepReward` rewards the turn that called it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from agentrl.errors import EnvironmentFailure, EpisodeDone, RewardError, ToolDefinitionError
from agentrl.rollout.calling import DeadlineExceeded, call, is_async
from agentrl.rollout.failures import backoff
from agentrl.rollout.mistakes import mistake_of
from agentrl.rollout.policy import MODEL_MISTAKES, Breaker, ToolPolicy, policy_of
from agentrl.rollout.results import render
from agentrl.rollout.schemas import explicit_schema, function_name, tool_schema
from agentrl.rollout.threads import Threads
from agentrl.types import StepReward, Task, ToolCall, ToolResult

RESERVED_NAMES = frozenset({"reset", "get_reward", "close", "call_tool", "tool_schemas"})
"""Methods of an environment that are never tools, and names that no tool may have."""

RETRY_DELAY = 0.2
"""Seconds before the first repetition of a call, doubled for each further one."""

_FREE: AbstractAsyncContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """Something the model may call.

    Attributes:
        name: What the model calls it.
        schema: Its JSON schema in OpenAI form, for the chat template.
        function: What runs.
        owner: Class name of the environment whose method it is, None for a standalone tool.
        policy: What its author said about its `ToolPolicy`.
        instance: The environment it acts on.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    owner: str | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
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
        return cls(name, tool_schema(function, where), function, owner, policy_of(function))

    @property
    def label(self) -> str:
        """Its name in messages, the same for all instances."""
        return self.name if self.owner is None else f"{self.owner}.{self.name}"

    @classmethod
    def from_schema(cls, description: Mapping[str, Any], function: Callable[..., Any]) -> Tool:
        """Make a tool from a description written by hand, or given by an MCP server.

        Args:
            description: JSON schema in OpenAI form, its `function` object alone, or a tool as MCP lists it
                (`name`, `description`, `inputSchema`).
            function: What runs, sync or async; called with keyword arguments. It needs no hints or docstring.

        Raises:
            ToolDefinitionError: Says what is missing or does not fit.

        Example:
            >>> tool = Tool.from_schema({"name": "now", "description": "Tell the time."}, lambda: "12:00")
            >>> tool.schema["function"]["parameters"]
            {'type': 'object', 'properties': {}}
        """
        schema = explicit_schema(description, function)
        return cls(schema["function"]["name"], schema, function, policy=policy_of(function))

    def bind(self, instance: Any) -> Tool:
        """The same tool acting on one environment instance."""
        return replace(self, function=getattr(instance, self.name), instance=instance)

    def renamed(self, name: str) -> Tool:
        """The same tool under another name."""
        return replace(self, name=name, schema=self.schema | {"function": self.schema["function"] | {"name": name}})


def make_tools(functions: Iterable[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Make the standalone tools, by name; a `Tool` is taken as it is.

    A partial or a callable object without a `__name__` of its own takes the name of its function or class; if
    that is taken it is numbered (`search`, `search_2`). Names that the user wrote must differ.

    Raises:
        ToolDefinitionError: A tool cannot be described, its name is reserved, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = function if isinstance(function, Tool) else Tool.from_function(function)
        if tool.name in RESERVED_NAMES:
            raise ToolDefinitionError(
                f"a tool cannot be called {tool.name!r}: {sorted(RESERVED_NAMES)} are methods of environments"
            )
        if tool.name in tools and (isinstance(function, Tool) or hasattr(function, "__name__")):
            raise ToolDefinitionError(
                f"two tools are called {tool.name!r}: {tools[tool.name].function!r} and {function!r}; rename one"
            )
        if tool.name in tools:
            numbered = (f"{tool.name}_{n}" for n in itertools.count(2))
            tool = tool.renamed(next(name for name in numbered if name not in tools))
        tools[tool.name] = tool
    return tools


class ToolRunner:
    """Runs the calls of a turn; one runner serves all rollouts.

    Args:
        threads: Where sync tools run.
        policy: The policy of tools whose author said nothing else.
        max_failures: Failures in a row that break a tool, see `Breaker`; None for never.
    """

    def __init__(self, threads: Threads, *, policy: ToolPolicy | None = None, max_failures: int | None = None) -> None:
        self._threads = threads
        self._policy = policy or ToolPolicy()
        self._breaker = Breaker(max_failures)
        self._slots: dict[str, asyncio.Semaphore] = {}

    async def run(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], task: Task | None = None
    ) -> list[ToolResult]:
        """Answer the calls of one turn, in call order.

        Args:
            calls: As the model wrote them.
            tools: What this rollout may call, environment methods bound to its instance.
            task: What the rollout has to do, for messages.

        Raises:
            EnvironmentFailure: A tool said that its environment broke.
            ToolBrokenError: A tool fails wherever it is called.
        """
        turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        answers = []
        for written in calls:
            tool = tools.get(written.name)
            turn: AbstractAsyncContextManager[Any] = _FREE
            if tool is not None and tool.instance is not None and not is_async(tool.function):
                turn = turns[id(tool.instance)]
            answers.append(self._answer(written, tool, tools, turn, task))
        if len(answers) == 1:
            return [await answers[0]]
        running = [asyncio.ensure_future(answer) for answer in answers]
        try:
            return await asyncio.gather(*running)
        finally:
            for answer in running:
                answer.cancel()  # when one ended the rollout, the others are for nobody

    def forget_loop(self) -> None:
        """Get ready for another event loop."""
        self._slots.clear()

    async def _answer(
        self,
        written: ToolCall,
        tool: Tool | None,
        tools: Mapping[str, Tool],
        turn: AbstractAsyncContextManager[Any],
        task: Task | None,
    ) -> ToolResult:
        mistake = mistake_of(written, None if tool is None else tool.schema, tools)
        if mistake is not None or tool is None:
            return ToolResult(written, render(f"Error: {mistake}"), failed=True)
        policy = replace(self._policy, **tool.policy) if tool.policy else self._policy
        async with turn if policy.max_concurrency is None else self._slot(tool, policy, turn):
            start = time.perf_counter()
            outcome = await self._attempts(tool, written.arguments, policy)
            seconds = time.perf_counter() - start
        if outcome.error is None:
            self._breaker.succeeded(tool.label)
            reward = _checked(outcome.reward, tool)
            return ToolResult(written, outcome.content, seconds=seconds, done=outcome.done, reward=reward)
        self._breaker.failed(tool.label, outcome.error, task)
        timed_out = isinstance(outcome.error, DeadlineExceeded)
        return ToolResult(written, outcome.content, failed=True, seconds=seconds, timed_out=timed_out)

    @asynccontextmanager
    async def _slot(
        self, tool: Tool, policy: ToolPolicy, turn: AbstractAsyncContextManager[Any]
    ) -> AsyncIterator[None]:
        assert policy.max_concurrency is not None
        async with turn, self._slots.setdefault(tool.label, asyncio.Semaphore(policy.max_concurrency)):
            yield

    async def _attempts(self, tool: Tool, arguments: Mapping[str, Any], policy: ToolPolicy) -> _Outcome:
        """Call a tool until it succeeds or may not be repeated."""
        for failures in itertools.count(1):
            outcome = await self._attempt(tool, arguments, policy.timeout)
            if failures > policy.retries or not _repeatable(outcome.error):
                return outcome
            await asyncio.sleep(backoff(failures, RETRY_DELAY))
        raise AssertionError("itertools.count ends")

    async def _attempt(self, tool: Tool, arguments: Mapping[str, Any], timeout: float | None) -> _Outcome:  # noqa: ASYNC109
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                value = await call(tool.function, self._threads, **arguments)
            return _told(value)
        except EpisodeDone as ending:
            return _told(ending.args[0] if ending.args else "")._replace(done=True)
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            return _failed(error)  # the tool cancelled something of its own
        except EnvironmentFailure:
            raise
        except TimeoutError as error:
            late = scope.expired()
            return _failed(DeadlineExceeded(f"{tool.name} did not end within {timeout:g} s") if late else error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it raises is for the model to read)
            return _failed(error)


class _Outcome(NamedTuple):
    """What came of a call."""

    content: str | list[dict[str, Any]]
    error: BaseException | None = None
    done: bool = False
    reward: Any = None


def _told(value: Any) -> _Outcome:
    """What a tool gave back, with the reward of its turn if it gave one."""
    if isinstance(value, StepReward):
        # None would mean that the tool gave no reward; here it is a wrong one.
        return _Outcome(render(value.content), reward=math.nan if value.reward is None else value.reward)
    return _Outcome(render(value))


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


def _failed(error: BaseException) -> _Outcome:
    """Tell the model class and text of an exception, also of one that cannot print itself."""
    if isinstance(error, DeadlineExceeded):
        return _Outcome(render(f"Error: {error}; it was given up"), error)
    return _Outcome(render("Error: " + "".join(traceback.format_exception_only(error)).strip()), error)


def _repeatable(error: BaseException | None) -> bool:
    """Whether an author who allows retries wants this one: not when the first call may still be running."""
    return isinstance(error, Exception) and not isinstance(error, (DeadlineExceeded, *MODEL_MISTAKES))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
