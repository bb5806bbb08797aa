"""The rollout engine: tasks in, trajectories out, no barrier between rollouts.

Each rollout is one coroutine on the engine's event loop; it waits for its own generator call, its own tools and its
own environment, never for another rollout's. The loop lives in a thread of its own, so `run` works from the main
thread, from any other thread and from inside a running loop (a notebook). It starts with the first `run` and ends
with `close`. `start` plays while the caller does something else.

A rollout whose environment fails (`agentrl.rollout.episode` says when) is tried again after a while on a fresh
instance with the same task and seed, then given up; its trajectory carries the failure and no reward. When too many
are given up, or a tool fails wherever it is called, or the generator breaks, all rollouts end and `run` raises.

An environment instance stays leased to its trajectory until `release`, so that reward functions see the instance
that played the episode, before any later reset.

Nothing that user code does can keep `run` or `close` from ending: all waits for it are bounded or can be left.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from agentrl.chat.renderer import Renderer
from agentrl.generation.base import Generator, SamplingParams
from agentrl.rollout.admission import Admission
from agentrl.rollout.busy import Busy
from agentrl.rollout.endpoint.programs import Agent
from agentrl.rollout.environments import merge_tools
from agentrl.rollout.episode import Episode
from agentrl.rollout.failures import FailurePolicy, FailureWindow, backoff, example_of
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.records import RolloutRecord, State
from agentrl.rollout.limits import Limits
from agentrl.rollout.loop import LoopThread
from agentrl.rollout.play import Play
from agentrl.rollout.policy import ToolPolicy
from agentrl.rollout.pool import EnvironmentPool, Factory
from agentrl.rollout.replay import Diverged
from agentrl.rollout.stage import Stage
from agentrl.rollout.threads import Threads
from agentrl.rollout.tools import Tool, ToolRunner, make_tools
from agentrl.types import Task, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 60.0
"""How long rollouts may take to end when they are cancelled, and all environments to close."""


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
        failures: What is done about environments that fail.
        environment_timeout: Seconds that making an instance, `reset` and `get_reward` may each take; None: no limit.
        tool_policy: The policy of tools whose author did not set one with `@tool`.
        tool_max_failures: Failed calls in a row, in at least two groups, that break a tool and end the run; None for
            any number.
        journal: Where every turn is kept before the next one is sampled. What its open window holds of a task is not
            played again: a finished rollout is given back, one that was cut off goes on. Its owner closes it.
        max_concurrency: Most episodes at once, over everything that is being played; None for any number.
        agent: A program that plays the episodes instead, with requests to an endpoint.

    Attributes:
        tools: The standalone tools, by name.
        hands_over_environments: Whether whoever gets the trajectories needs the environments that played them. Then
            what the journal holds of a rollout is used only where its environment is `replayable`.
        asking: How long the generator has had something to do.

    Raises:
        ToolDefinitionError: A tool or an environment does not meet the contract.
        ConfigurationError: A number is out of range.
    """

    def __init__(
        self,
        generator: Generator,
        renderer: Renderer,
        *,
        tools: Iterable[Callable[..., Any] | Tool] = (),
        environments: Factory | Mapping[str, Factory] | None = None,
        limits: Limits | None = None,
        sampling: SamplingParams | None = None,
        failures: FailurePolicy | None = None,
        environment_timeout: float | None = 600.0,
        tool_policy: ToolPolicy | None = None,
        tool_max_failures: int | None = 100,
        journal: Journal | None = None,
        max_concurrency: int | None = None,
        agent: Agent | None = None,
    ) -> None:
        self.generator = generator
        self.journal = journal
        self.hands_over_environments = True
        self.renderer = renderer
        self.limits = limits or Limits(max_context=generator.max_context)
        self.asking = Busy()
        self._max_concurrency = max_concurrency
        self._admission = Admission(max_concurrency)
        self._loop = LoopThread()
        self._threads = Threads()
        self._failures = failures or FailurePolicy()
        self._recent = FailureWindow(self._failures)
        self._playing: set[threading.Event] = set()
        self._runs = 0
        self._sampling = replace(
            sampling or SamplingParams(max_tokens=1),
            stop_ids=renderer.stop_ids,
            suppress_tokens=renderer.never_sampled,
        )
        self.tools = make_tools(tools)
        self.environments: EnvironmentPool | None = None
        if environments is not None:
            self.environments = EnvironmentPool(environments, self._threads, timeout=environment_timeout)
            for spec in self.environments.specs.values():
                merge_tools(self.tools, spec.tools, spec.class_name)
        self._runner = ToolRunner(self._threads, policy=tool_policy, max_failures=tool_max_failures)
        self._agent, self._endpoint = agent, None
        if agent is not None:
            from agentrl.rollout.endpoint.server import Endpoint

            self._endpoint = Endpoint(agent.host, agent.port, agent.url, agent.accept_sampling)

    def run(self, tasks: Sequence[Task]) -> list[Trajectory]:
        """Play one episode for each task; blocks until all have ended.

        Returns:
            The trajectories in task order.

        Raises:
            RolloutError: Too large a share of the last rollouts was lost to environment failures.
            ToolBrokenError: A tool fails wherever it is called.
            GenerationError: The generator cannot go on.
        """
        return self.wait(self.start(tasks, urgent=True))

    def start(self, tasks: Sequence[Task], *, urgent: bool = False) -> Play:
        """Begin to play one episode for each task, beside whatever is being played already; see `wait`.

        Args:
            tasks: What to play.
            urgent: Whether these episodes come before those that still wait for a place among `max_concurrency`.
        """
        self._runs += 1
        journal = None if self.journal is None else self.journal.with_this_window()
        play = Play(list(tasks))
        play.future = self._loop.start(self._run(play, self._runs, urgent, journal))
        return play

    def wait(self, play: Play, others: Iterable[Play] = ()) -> list[Trajectory]:
        """Wait until all episodes of a play have ended; as `run`.

        Args:
            play: What to wait for. `KeyboardInterrupt` here cancels it.
            others: An error of one of these is raised too, at once.
        """
        failing = [other.future for other in others if other is not play]
        try:
            self._loop.wait(play.future, _first_failure(failing))
            for future in failing:
                if future.done():
                    future.result()
            trajectories = play.future.result()
        except BaseException:
            play.future.cancel()
            raise
        try:
            self._recent.check()
        except BaseException:
            self.release(trajectories)
            raise
        return trajectories

    def play_on(self, record: RolloutRecord, turn: int) -> Trajectory:
        """Sample a recorded rollout anew from one of its turns; the turns before it stay, and are done again.

        Nothing of it is written to the journal.

        Args:
            record: The rollout.
            turn: Index of the first turn to sample.

        Raises:
            Diverged: The environment does not do again what the record says, or the prompt is rendered otherwise.
        """
        episode = Episode(
            self._stage(None, threading.Event()), record.task, f"on/{record.summary.id}", record=record.before(turn)
        )
        return self.await_(episode.play())

    def await_(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it, from any thread but the loop's own.

        Environments, tools and async reward functions all see this one loop, so clients that they keep between
        calls stay usable.
        """
        return self._loop.run(coroutine)

    @property
    def offers_tools(self) -> bool:
        """Whether episodes can call tools."""
        return bool(self.tools) or self.environments is not None

    @property
    def abandoned_calls(self) -> int:
        """Sync calls of tools and environments that were left behind while they ran."""
        return self._threads.abandoned

    def cancel(self) -> None:
        """End all rollouts that are being played at their next limit check, with what they have so far."""
        for cancelled in list(self._playing):
            cancelled.set()

    def release(self, trajectories: Sequence[Trajectory]) -> None:
        """Give the trajectories' environments back to the pool; call it when the rewards are known."""
        for trajectory in trajectories:
            instance, trajectory.environment = trajectory.environment, None
            if instance is None or self.environments is None:
                continue
            if self.environments.is_retired(instance):
                self._loop.start(self.environments.discard(instance))
            else:
                self.environments.release(instance)

    def close(self) -> None:
        """Close the environments and end the engine's threads; a later `run` starts them again.

        The generator is its owner's to close.
        """
        if self.environments is not None:
            self._loop.run_for(CLOSE_SECONDS, self.environments.close(), "closing the environments")
        if self._endpoint is not None:
            self._loop.run_for(CLOSE_SECONDS, self._endpoint.close(), "closing the endpoint")
        self._loop.close()
        self._runner.forget_loop()
        self._admission = Admission(self._max_concurrency)  # what was left behind keeps its place in the old one
        self._threads.close()

    async def _run(self, play: Play, run: int, urgent: bool, journal: Journal | None) -> list[Trajectory]:
        self._playing.add(cancelled := threading.Event())
        if self._endpoint is not None:
            await self._endpoint.start()
        stage = self._stage(journal, cancelled)
        rollouts: list[asyncio.Task[Trajectory]] = []
        try:
            for i in range(len(play.tasks)):
                rollouts.append(asyncio.create_task(self._rollout(stage, play, i, f"{run}/{i}", urgent)))
                # One at a time: else every rollout would render and parse before the first tool starts, and
                # all tools would end together too, so that nothing of our own work hides behind them.
                await asyncio.sleep(0)
            if rollouts:
                await asyncio.wait(rollouts, return_when=asyncio.FIRST_EXCEPTION)
            for rollout in rollouts:
                if rollout.done():
                    rollout.result()  # one error ends them all
            return [rollout.result() for rollout in rollouts]
        finally:
            self._playing.discard(cancelled)
            await _end(rollouts)

    def _stage(self, journal: Journal | None, cancelled: threading.Event) -> Stage:
        return Stage(
            generator=self.generator,
            renderer=self.renderer,
            limits=self.limits,
            sampling=self._sampling,
            runner=self._runner,
            tools=self.tools,
            environments=self.environments,
            cancelled=cancelled,
            asking=self.asking,
            journal=journal,
        )

    async def _rollout(self, stage: Stage, play: Play, index: int, name: str, urgent: bool) -> Trajectory:
        async with self._admission.place(urgent=urgent):
            trajectory = play.finished[index] = await self._attempts(stage, play.tasks[index], name)
        self._recent.add(trajectory)
        return trajectory

    async def _attempts(self, stage: Stage, task: Task, name: str) -> Trajectory:
        record = await self._usable_record(stage.journal, task)
        if record is not None and record.summary.state is State.ENDED and not self._needs_environment:
            # The task as the dataset gives it: of a date, say, the journal has the text.
            return replace(record.trajectory(self.renderer.locate_images), task=task)
        for attempt in range(0 if record is None else record.summary.attempt, self._failures.retries + 1):
            trajectory = await self._attempt(stage, task, f"{name}/{attempt + 1}", attempt, record)
            trajectory.retries, record = attempt, None
            failure = trajectory.failure
            if failure is None or not failure.retry:
                break
            if attempt == self._failures.retries or stage.cancelled.is_set():
                break
            delay = backoff(attempt + 1, self._failures.delay)
            logger.warning(
                "the environment of group %s failed in %s: %s; attempt %d of %d in %.1f s",
                task.group,
                failure.where,
                failure.error,
                attempt + 2,
                self._failures.retries + 1,
                delay,
            )
            await asyncio.sleep(delay)
        return trajectory

    @property
    def _needs_environment(self) -> bool:
        return self.environments is not None and self.hands_over_environments

    async def _usable_record(self, journal: Journal | None, task: Task) -> RolloutRecord | None:
        """What the journal holds of a task, if the rollout can be given back or go on."""
        if journal is None or (record := await journal.recorded(task)) is None:
            return None
        if self.environments is None or self.environments.spec(task.environment).replayable:
            return record
        if record.summary.state is State.ENDED and not self._needs_environment:
            return record
        journal.supersede(record)
        return None

    async def _attempt(
        self, stage: Stage, task: Task, session: str, attempt: int, record: RolloutRecord | None
    ) -> Trajectory:
        """Play one attempt, from where its record ends if there is one and the environment does again what it did."""
        if self._agent is not None and self._endpoint is not None:
            from agentrl.rollout.endpoint.episode import AgentEpisode

            return await AgentEpisode(stage, task, session, self._agent, self._endpoint, self._threads, attempt).play()
        if record is not None:
            try:
                return await Episode(stage, task, session, attempt, record).play()
            except Diverged as difference:
                logger.warning("%s is played again from its beginning: %s", example_of(task), difference)
                assert stage.journal is not None
                stage.journal.supersede(record)
        return await Episode(stage, task, session, attempt).play()


def _first_failure(futures: Sequence[Future[Any]]) -> Future[None]:
    """Done when one of several futures fails."""
    first: Future[None] = Future()

    def look(future: Future[Any]) -> None:
        if future.cancelled() or future.exception() is None:
            return
        with suppress(InvalidStateError):  # another one was quicker
            first.set_result(None)

    for future in futures:
        future.add_done_callback(look)
    return first


async def _end(rollouts: list[asyncio.Task[Trajectory]]) -> None:
    """Cancel those that still run and wait, not for ever, until they have given their environments up."""
    running = [rollout for rollout in rollouts if not rollout.done()]
    for rollout in running:
        rollout.cancel()
    if running:
        _, stuck = await asyncio.wait(running, timeout=CLOSE_SECONDS)
        for rollout in stuck:
            logger.warning("left behind, for it does not end when cancelled: %r", rollout)
    for rollout in rollouts:
        rollout.add_done_callback(_look)


def _look(rollout: asyncio.Task[Trajectory]) -> None:
    """Look at the error of a rollout that nobody asks any more: asyncio complains of those that nobody saw."""
    if not rollout.cancelled():
        rollout.exception()
