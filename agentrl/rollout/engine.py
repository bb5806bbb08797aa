"""The rollout engine: tasks in, trajectories out, no barrier between rollouts.

Each rollout is one coroutine on the engine's event loop; it waits for its own generator call, its own tools and its
own environment, never for another rollout's. The loop lives in a thread of its own, so `run` works from the main
thread, from any other thread and from inside a running loop (a notebook). It starts with the first `run` and ends
with `close`.

What the model gets wrong goes back to the model as text. What the environment gets wrong (`reset`, `get_reward` or
the factory raises, a tool raises `EnvironmentFailure`) is `Outcome.ENV_FAILURE`: the rollout is tried again on a
fresh instance with the same task and seed, then given up, and its trajectory carries the failure and no reward.
A broken generator is neither: it ends the run with the generator's error.

An environment instance stays leased to its trajectory until `release`, so that reward functions see the instance
that played the episode, before any later reset.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from agentrl.chat.renderer import Renderer
from agentrl.errors import ConfigurationError, EnvironmentFailure, RewardError, RolloutError
from agentrl.generation.base import Generator, SamplingParams
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.environments import episode_done, merge_tools
from agentrl.rollout.limits import Limits, Progress, binding_limit, reached, room
from agentrl.rollout.pool import EnvironmentPool, Factory
from agentrl.rollout.threads import Threads
from agentrl.rollout.tools import ToolRunner, make_tools, tool_message
from agentrl.types import (
    Failure,
    FinishReason,
    Limit,
    Message,
    Outcome,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    derive_seed,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNBOUNDED_TURN = 2**31 - 1
"""`max_tokens` of a turn when neither a budget nor a known context length bounds it."""


class RolloutEngine:
    """Plays episodes.

    Args:
        generator: Samples turns.
        renderer: Turns messages into ids and sampled ids into messages.
        tools: Standalone tools, offered in every episode.
        environments: Makes the environments to play in, or several factories by name; None for tools or plain
            prompts only.
        limits: The limits of every episode.
        sampling: How to draw; `max_tokens`, `stop_ids` and `seed` are set for each turn.
        attempts: Tries of a rollout whose environment fails, the first included.
        max_failure_rate: Share of the rollouts of one `run` that may end in an environment failure; above it `run`
            raises instead of returning what is mostly noise.

    Raises:
        ToolDefinitionError: A tool or an environment does not meet the contract.
    """

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        *,
        tools: Iterable[Callable[..., Any]] = (),
        environments: Factory | Mapping[str, Factory] | None = None,
        limits: Limits | None = None,
        sampling: SamplingParams | None = None,
        attempts: int = 2,
        max_failure_rate: float = 0.5,
    ) -> None:
        self.generator = generator
        self.renderer = renderer
        self.limits = limits or Limits(max_context=generator.max_context)
        self._sampling = replace(sampling or SamplingParams(max_tokens=1), stop_ids=renderer.stop_ids)
        self._attempts = attempts
        self._max_failure_rate = max_failure_rate
        self._threads = Threads()
        self._runner = ToolRunner(self._threads)
        self._tools = make_tools(tools)
        self.environments: EnvironmentPool | None = None
        if environments is not None:
            self.environments = EnvironmentPool(environments, self._threads)
            for spec in self.environments.specs.values():
                merge_tools(self._tools, spec.tools, spec.class_name)
        self._cancelled = threading.Event()
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._runs = 0

    def run(self, tasks: Sequence[Task], *, part_of: int = 0) -> list[Trajectory]:
        """Play one episode for each task; blocks until all have ended.

        Args:
            tasks: What to play.
            part_of: Size of the batch that these are a part of; failures are judged as a share of it.

        Returns:
            The trajectories in task order.

        Raises:
            RolloutError: Too large a share of the rollouts ended in an environment failure.
            GenerationError: The generator cannot go on.
        """
        self._runs += 1
        trajectories = self.await_(self._run(list(tasks), self._runs))
        self._check_failures(trajectories, max(part_of, len(trajectories)))
        return trajectories

    def await_(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it, from any thread but the loop's own.

        Environments, tools and async reward functions all see this one loop, so clients that they keep between
        calls stay usable.
        """
        if self._portal is None:
            self._portal = self._stack.enter_context(start_blocking_portal("asyncio"))
        future = self._portal.start_task_soon(_awaited, coroutine)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the waiting thread must not leave rollouts (and sessions on servers) running behind it.
            future.cancel()
            raise

    @property
    def offers_tools(self) -> bool:
        """Whether episodes can call tools."""
        return bool(self._tools) or self.environments is not None

    def cancel(self) -> None:
        """End all rollouts of the current `run` at their next limit check, with what they have so far."""
        self._cancelled.set()

    def release(self, trajectories: Sequence[Trajectory]) -> None:
        """Give the trajectories' environments back to the pool; call it when the rewards are known."""
        for trajectory in trajectories:
            if trajectory.environment is not None and self.environments is not None:
                self.environments.release(trajectory.environment)
                trajectory.environment = None

    def close(self) -> None:
        """Close the environments and end the engine's threads; a later `run` starts them again.

        The generator is its owner's to close.
        """
        if self.environments is not None:
            self.await_(self.environments.close())
        self._stack.close()
        self._portal = None
        self._threads.close()

    async def _run(self, tasks: list[Task], run: int) -> list[Trajectory]:
        self._cancelled.clear()
        try:
            async with asyncio.TaskGroup() as group:
                rollouts = []
                for i, task in enumerate(tasks):
                    rollouts.append(group.create_task(self._rollout(task, f"{run}/{i}")))
                    # One at a time: else every rollout would render and parse before the first tool starts, and
                    # all tools would end together too, so that nothing of our own work hides behind them.
                    await asyncio.sleep(0)
        except BaseExceptionGroup as errors:
            # One error ends them all; the others are mostly echoes of it.
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        return [rollout.result() for rollout in rollouts]

    async def _rollout(self, task: Task, name: str) -> Trajectory:
        for attempt in range(1, self._attempts + 1):
            episode = _Episode(self, task, f"{name}/{attempt}")
            trajectory = await episode.play()
            if trajectory.outcome is not Outcome.ENV_FAILURE or self._cancelled.is_set():
                break
            assert trajectory.failure is not None
            logger.warning(
                "environment of group %s failed in %s (attempt %d of %d): %s",
                task.group,
                trajectory.failure.where,
                attempt,
                self._attempts,
                trajectory.failure.error,
            )
        return trajectory

    def _check_failures(self, trajectories: list[Trajectory], count: int) -> None:
        failures = [t.failure for t in trajectories if t.failure is not None]
        if len(failures) <= self._max_failure_rate * count:
            return
        self.release(trajectories)
        (where, error), times = Counter((f.where, f.error) for f in failures).most_common(1)[0]
        example = next(f for f in failures if (f.where, f.error) == (where, error))
        raise RolloutError(
            f"{len(failures)} of {count} rollouts ended in an environment failure, after "
            f"{self._attempts} attempts each. The most frequent cause, {times} times, was {error!r} in {where}. "
            f"Mend the environment; nothing was learned from these rollouts.\n{example.traceback}"
        )


class _Episode:
    """One attempt at one task."""

    def __init__(self, engine: RolloutEngine, task: Task, session: str) -> None:
        self.engine = engine
        self.task = task
        self.session = session
        self.environment: Any = None
        self.tools = engine._tools
        self.conversation = Conversation(task.prompt or "", [])
        self.turns: list[Turn] = []
        self.iterations = 0
        self.started = time.monotonic()

    async def play(self) -> Trajectory:
        """Play to the end; an environment failure becomes a trajectory, anything else raises."""
        where = "reset"
        try:
            await self._begin()
            where = "a tool"
            outcome, limit = await self._converse()
            where = "get_reward"
            reward = await self._score()
        except _EnvironmentError as failure:
            return await self._failed(where, failure.error)
        except EnvironmentFailure as error:
            return await self._failed(where, error)
        except BaseException:
            await self._discard()
            raise
        finally:
            self.engine.generator.release(self.session)
        return self._trajectory(outcome, limit=limit, reward=reward, environment=self.environment)

    async def _begin(self) -> None:
        """Lease and reset the environment, and put the prompt together."""
        prompt = self.task.prompt
        pool = self.engine.environments
        if pool is not None:
            try:
                self.environment = await pool.acquire(self.task.environment)
                prompt = await pool.reset(self.environment, self.task)
            except ConfigurationError:
                raise
            except Exception as error:
                raise _EnvironmentError(error) from error
            self.tools = self.engine._tools | pool.bound_tools(self.environment)
        assert prompt is not None, "a task without a prompt needs an environment; the trainer checks it"
        self.schemas = [tool.schema for tool in self.tools.values()]
        self.conversation = Conversation(prompt, self.engine.renderer.prompt_ids(prompt, self.schemas))

    async def _converse(self) -> tuple[Outcome, Limit | None]:
        """Sample turns and run tools until the episode ends."""
        engine, conversation, renderer = self.engine, self.conversation, self.engine.renderer
        while True:
            if (limit := reached(engine.limits, self._progress())) is not None:
                return _outcome_of(limit), limit
            began = time.monotonic()
            sample = await engine.generator.sample(self.session, conversation.ids, self._params())
            message, calls = self._read(sample.ids)
            start, stop = conversation.add_sample(sample, message)
            turn = Turn(start, stop, sample.finish, seconds=time.monotonic() - began)
            self.turns.append(turn)
            if sample.finish is FinishReason.LENGTH:
                # Also when a whole call was written before the cut: what the model meant is not known.
                return Outcome.TRUNCATED, binding_limit(engine.limits, self._progress())
            if not calls:
                return Outcome.FINISHED, None
            if (limit := reached(engine.limits, self._progress(), wants_tools=True)) is not None:
                return _outcome_of(limit), limit
            results = await engine._runner.run(calls, self.tools)
            self.iterations += 1
            self.turns[-1] = replace(turn, results=tuple(results))
            messages = [tool_message(result) for result in results]
            if self._episode_done(results):
                # Nothing is sampled after this, so the row ends with the call; the transcript keeps the answer.
                conversation.messages += messages
                return Outcome.ENV_DONE, None
            suffix = renderer.suffix_ids(sample.ids[-1], message, messages, self.schemas)
            if (limit := reached(engine.limits, self._progress(extra=len(suffix)))) is not None:
                # No room for another turn: half a tool result would teach nothing, so the round is dropped whole.
                return _outcome_of(limit), limit
            conversation.add_suffix(suffix, messages)

    async def _score(self) -> float | None:
        pool = self.engine.environments
        if pool is None:
            return None
        try:
            reward = await pool.get_reward(self.environment, turns=len(self.turns))
        except RewardError:
            raise
        except Exception as error:
            raise _EnvironmentError(error) from error
        if not isinstance(reward, list):
            return reward
        self.turns = [replace(turn, listed_reward=value) for turn, value in zip(self.turns, reward, strict=True)]
        return None

    def _read(self, ids: list[int]) -> tuple[Message, list[ToolCall]]:
        if not self.tools:
            return {"role": "assistant", "content": self.engine.renderer.text(ids)}, []
        parsed = self.engine.renderer.parse(ids, self.schemas, first_call=sum(len(t.results) for t in self.turns))
        return parsed.message, parsed.calls

    def _params(self) -> SamplingParams:
        budget = room(self.engine.limits, self._progress())
        return replace(
            self.engine._sampling,
            max_tokens=UNBOUNDED_TURN if budget is None else budget,
            seed=derive_seed(self.task.seed, self.task.member, len(self.turns)),
        )

    def _progress(self, extra: int = 0) -> Progress:
        return Progress(
            prompt_length=self.conversation.prompt_length,
            completion_length=self.conversation.completion_length + extra,
            tool_iterations=self.iterations,
            seconds=time.monotonic() - self.started,
            cancelled=self.engine._cancelled.is_set(),
        )

    def _episode_done(self, results: list[ToolResult]) -> bool:
        return any(result.done for result in results) or episode_done(self.environment)

    async def _failed(self, where: str, error: BaseException) -> Trajectory:
        name = type(self.environment).__name__ if self.environment is not None else self.task.environment
        await self._discard()
        failure = Failure(
            where=f"{name or 'the environment'}.{where}",
            error=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )
        return self._trajectory(Outcome.ENV_FAILURE, failure=failure)

    async def _discard(self) -> None:
        if self.environment is not None and self.engine.environments is not None:
            await self.engine.environments.discard(self.environment)
            self.environment = None

    def _trajectory(self, outcome: Outcome, **fields: Any) -> Trajectory:
        conversation = self.conversation
        text = isinstance(conversation.prompt, str)
        return Trajectory(
            task=self.task,
            prompt=conversation.prompt,
            prompt_ids=conversation.ids[: conversation.prompt_length],
            completion="".join(m["content"] for m in conversation.messages) if text else conversation.messages,
            completion_ids=conversation.completion_ids,
            loss_mask=conversation.loss_mask,
            logprobs=conversation.logprobs,
            outcome=outcome,
            turns=self.turns,
            **fields,
        )


class _EnvironmentError(Exception):
    """Marks an error as the environment's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def _awaited(coroutine: Coroutine[Any, Any, T]) -> T:
    return await coroutine


def _outcome_of(limit: Limit) -> Outcome:
    if limit is Limit.CANCELLED:
        return Outcome.CANCELLED
    return Outcome.TIMEOUT if limit is Limit.ROLLOUT_TIME else Outcome.TRUNCATED
