"""One attempt at one task, from `reset` to the reward, as a coroutine.

What the model gets wrong goes back to the model as text. What the environment gets wrong (`reset`, `get_reward` or the
factory raises or takes too long, a tool raises `EnvironmentFailure`) ends the attempt as `Outcome.ENV_FAILURE`. So
does a rollout time that runs out before the first turn: nothing in such an episode is the model's. Anything else that
is raised (a broken generator, a broken tool, a reward that is no number) ends the run.

With a journal, each finished turn is durable before the next one is sampled. An attempt that was cut off goes on from
its record: first the environment does again what it did, then the model goes on.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from agentrl.chat.continuation import Continuation
from agentrl.chat.pictures import column_pictures, place_pictures, read_pictures
from agentrl.errors import ConfigurationError, ContextFull, EnvironmentFailure, ImageError, RewardError
from agentrl.rollout.calling import DeadlineExceeded
from agentrl.rollout.conversation import Conversation, trajectory_of
from agentrl.rollout.environments import episode_done, merge_tools
from agentrl.rollout.failures import failure_of
from agentrl.rollout.journal.entry import Entry
from agentrl.rollout.journal.records import RolloutRecord, TurnRecord
from agentrl.rollout.journal.values import dumps
from agentrl.rollout.limits import Progress, binding_limit, outcome_of, reached
from agentrl.rollout.replay import Difference, Diverged, reenact
from agentrl.rollout.results import tool_message
from agentrl.rollout.stage import Stage
from agentrl.types import (
    Encoded,
    FinishReason,
    Limit,
    Message,
    Outcome,
    Sample,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

Ending = tuple[Outcome, Limit | None]
"""How an episode ended, and which limit cut it if one did."""


class Episode:
    """Plays once.

    Args:
        stage: What all episodes share.
        task: What to do.
        session: The generator's name for this attempt.
        attempt: Attempts before it.
        record: The record of this attempt, if it was cut off and is to go on.
    """

    def __init__(
        self, stage: Stage, task: Task, session: str, attempt: int = 0, record: RolloutRecord | None = None
    ) -> None:
        self.stage = stage
        self.task = task
        self.session = session
        self.record = record
        self.entry: Entry | None = None
        if stage.journal is not None:
            self.entry = stage.journal.enter(task, attempt) if record is None else stage.journal.enter_again(record)
        self.tools = stage.tools
        self.environment: Any = None
        self.conversation = Conversation(task.prompt or "", Encoded([]))
        self.turns: list[Turn] = []
        self.sampled: tuple[Turn, Sample] | None = None  # the turn whose calls are running
        self.phase = "reset"
        self.started = time.monotonic()

    async def play(self) -> Trajectory:
        """Play to the end; an environment failure becomes a trajectory, anything else raises.

        Raises:
            Diverged: The environment does not do again what it did in the record.
        """
        try:
            trajectory = await self._play()
            if self.entry is not None:
                await self.entry.end(trajectory)
        except BaseException:
            await self._discard()
            raise
        finally:
            self.stage.generator.release(self.session)
        return trajectory

    async def _play(self) -> Trajectory:
        try:
            outcome, limit = await self._play_in_time()
            reward = await self._score(outcome) if outcome.is_signal else None
        except _EnvironmentError as failure:
            return await self._failed(failure.error)
        except EnvironmentFailure as error:
            return await self._failed(error)
        return self._trajectory(outcome, limit=limit, reward=reward, environment=self.environment)

    async def _play_in_time(self) -> Ending:
        """Play until the episode ends or its time has run out, in the midst of whatever it is at."""
        seconds = self.stage.limits.rollout_timeout
        self.clock = asyncio.timeout(seconds)
        try:
            async with self.clock:
                await self._begin()
                ending = await self._reenact() or await self._converse()
        except TimeoutError:
            if not self.clock.expired():
                raise
            await self._interrupted()
            ending = Outcome.TIMEOUT, Limit.ROLLOUT_TIME
        if ending[0] is Outcome.TIMEOUT and not self.turns:
            late = f"the rollout's time ran out before its first turn was sampled (rollout_timeout={seconds:g})"
            raise _EnvironmentError(DeadlineExceeded(late))
        return ending

    async def _interrupted(self) -> None:
        """Close the books on what was going on: its turn is whole, the answers to its calls are not."""
        if self.sampled is not None:
            turn, sample = self.sampled
            self._finish_turn(turn, [])
            self._retire()
            if self.entry is not None:
                await self.entry.turn(len(self.turns) - 1, TurnRecord(turn, sample, self.conversation.messages[-1]))

    async def _begin(self) -> None:
        """Lease and reset the environment, and put the prompt together."""
        began = time.monotonic()
        task = self._illustrated()
        prompt = task.prompt
        pool = self.stage.environments
        if pool is not None:
            try:
                self.environment = await pool.acquire(task.environment)
                prompt = await pool.reset(self.environment, task)
            except ConfigurationError:
                raise
            except Exception as error:
                raise _EnvironmentError(error) from error
            self.tools = merge_tools(self.tools, pool.bound_tools(self.environment), type(self.environment).__name__)
        assert prompt is not None, "a task without a prompt needs an environment; the trainer checks it"
        self.schemas = [tool.schema for tool in self.tools.values()]
        if not isinstance(prompt, str):
            prompt = read_pictures(prompt)
        self.conversation = Conversation(prompt, self.stage.renderer.encode_prompt(prompt, self.schemas))
        self.phase = "sampling"
        if self.entry is not None and self.record is None:
            self.entry.begin(prompt, self.conversation.ids, resetting=time.monotonic() - began)

    def _illustrated(self) -> Task:
        """The task with the images of its row in its prompt, where the model sees images."""
        task = self.task
        pictures = column_pictures(task.columns)
        if not pictures or not self.stage.renderer.sees_images:
            return task
        if isinstance(task.prompt, str):
            raise ImageError("the row has images but a plain-text prompt; give messages")
        return replace(task, prompt=place_pictures(task.prompt or [{"role": "user", "content": ""}], pictures))

    async def _reenact(self) -> Ending | None:
        """Go to where the recorded attempt was cut off; gives back how it ended if its last turn had ended it."""
        if (record := self.record) is None:
            return None
        if dumps(self.conversation.prompt) != dumps(record.prompt):
            raise Diverged(Difference("reset", record.prompt, self.conversation.prompt))
        if self.conversation.ids != record.prompt_ids:
            place = "the prompt's rendering (by tokenizer, chat template and tools)"
            raise Diverged(Difference(place, record.prompt_ids, self.conversation.ids))
        self.phase = "a tool"
        if (difference := await reenact(record.turns, self.tools, self.stage.runner, self.task)) is not None:
            raise Diverged(difference)
        self.phase = "sampling"
        for turn in record.turns:
            turn.extend(self.conversation, self.stage.renderer.locate_images)
            self.turns.append(turn.turn)
        return None if record.summary.outcome is None else (record.summary.outcome, record.summary.limit)

    async def _converse(self) -> Ending:
        """Sample turns and run tools until the episode ends."""
        conversation = self.conversation
        while True:
            progress = self._progress()
            if (limit := reached(self.stage.limits, progress)) is not None:
                return outcome_of(limit), limit
            began = time.monotonic()
            images = {"images": tuple(conversation.images)} if conversation.images else {}
            params = self.stage.turn_params(self.task, len(self.turns), progress)
            try:
                with self.stage.asking:
                    sample = await self.stage.generator.sample(self.session, conversation.ids, params, **images)
            except ContextFull:  # of a server that alone knows how long the conversation is
                return outcome_of(Limit.CONTEXT), Limit.CONTEXT
            message, calls = self._read(sample.ids)
            start, stop = conversation.add_sample(sample, message)
            seconds = time.monotonic() - began
            turn = Turn(
                start,
                stop,
                sample.finish,
                seconds=seconds,
                row=len(conversation.rows),
                weights_version=sample.weights_version,
                updates=sample.updates,
                prefill=sample.prefill,
            )
            self.sampled = turn, sample
            ending = self._ending(turn, calls)
            results = [] if ending else await self._run_tools(calls)
            self._finish_turn(turn, results)
            shown, following = False, None
            if ending is None:
                ending, shown, following = self._answer(sample, results)
            await self._keep(TurnRecord(self.turns[-1], sample, message, shown, following), ending)
            if ending is not None:
                return ending

    def _answer(self, sample: Sample, results: list[ToolResult]) -> tuple[Ending | None, bool, Continuation | None]:
        """Give the conversation the answers to a turn's calls.

        Returns:
            How the episode ends, if it does; whether the answers are part of the conversation; what follows the turn.
        """
        conversation, renderer = self.conversation, self.stage.renderer
        messages = [tool_message(result) for result in results]
        if self._episode_done(results):
            # Nothing is sampled after this, so the row ends with the call; the transcript keeps the answer.
            conversation.go_on(messages, None)
            return (Outcome.ENV_DONE, None), True, None
        going_on = renderer.continuation(conversation.prompt, conversation.messages, messages, sample.ids, self.schemas)
        if (limit := reached(self.stage.limits, self._progress(going_on))) is not None:
            # No room for another turn: half a tool result would teach nothing, so the round is dropped whole.
            return (outcome_of(limit), limit), False, None
        conversation.go_on(messages, going_on)
        return None, True, going_on

    async def _keep(self, record: TurnRecord, ending: Ending | None) -> None:
        """Wait until a finished turn is durable; the time that takes is not the rollout's."""
        if self.entry is None:
            return
        began, deadline = time.monotonic(), None if self.clock.expired() else self.clock.when()
        if deadline is not None:
            self.clock.reschedule(None)
        await self.entry.turn(len(self.turns) - 1, record, ending)
        waited = time.monotonic() - began
        self.started += waited
        if deadline is not None:
            self.clock.reschedule(deadline + waited)

    def _ending(self, turn: Turn, calls: list[ToolCall]) -> Ending | None:
        """How the episode ends with a turn that was just sampled, None if its calls are to be run."""
        limits = self.stage.limits
        if turn.finish is FinishReason.LENGTH:
            # Also when a whole call was written before the cut: what the model meant is not known.
            return Outcome.TRUNCATED, binding_limit(limits, self._progress())
        if not calls:
            return Outcome.FINISHED, None
        if (limit := reached(limits, self._progress(), wants_tools=True)) is not None:
            return outcome_of(limit), limit
        return None

    async def _run_tools(self, calls: list[ToolCall]) -> list[ToolResult]:
        self.phase = "a tool"
        results = await self.stage.runner.run(calls, self.tools, self.task)
        self.phase = "sampling"
        return results

    def _finish_turn(self, turn: Turn, results: list[ToolResult]) -> None:
        """Take a turn into the books, with the answers to its calls: from here on it is part of the trajectory."""
        self.turns.append(replace(turn, results=tuple(results)))
        self.sampled = None
        late = [self.tools[result.call.name] for result in results if result.timed_out]
        if any(tool.instance is not None for tool in late):
            self._retire()

    def _retire(self) -> None:
        """A call on the instance was given up and may be acting on it still: nobody else is to have it."""
        if self.environment is not None and self.stage.environments is not None:
            self.stage.environments.retire(self.environment)

    async def _score(self, outcome: Outcome) -> float | None:
        pool, self.phase = self.stage.environments, "get_reward"
        if pool is None:
            return None
        # Sampled content is text.
        answer = self.conversation.messages[-1].get("content") or "" if outcome is Outcome.FINISHED else None
        began = time.monotonic()
        try:
            reward = await pool.get_reward(self.environment, turns=len(self.turns), answer=answer)
        except RewardError:
            raise
        except Exception as error:
            raise _EnvironmentError(error) from error
        if self.entry is not None:
            self.entry.rewarding = time.monotonic() - began
        if not isinstance(reward, list):
            return reward
        self.turns = [replace(turn, listed_reward=value) for turn, value in zip(self.turns, reward, strict=True)]
        return None

    def _read(self, ids: list[int]) -> tuple[Message, list[ToolCall]]:
        if not self.tools:
            return {"role": "assistant", "content": self.stage.renderer.text(ids)}, []
        parsed = self.stage.renderer.parse(ids, self.schemas, first_call=sum(len(t.results) for t in self.turns))
        return parsed.message, parsed.calls

    def _progress(self, going_on: Continuation | None = None) -> Progress:
        """Where the episode stands, or would stand with what comes next."""
        row, spent = len(self.conversation.ids), self.conversation.spent
        if going_on is not None:
            row = len(going_on.ids) + (0 if going_on.forks else row)
            spent += going_on.added
        return Progress(
            prompt_length=row - spent,  # after a fork, whatever of the row is no part of the episode's budget
            completion_length=spent,
            tool_iterations=len(self.turns),  # every turn that did not end the episode had its calls run
            seconds=time.monotonic() - self.started,
            cancelled=self.stage.cancelled.is_set(),
        )

    def _episode_done(self, results: list[ToolResult]) -> bool:
        return any(result.done for result in results) or episode_done(self.environment)

    async def _failed(self, error: BaseException) -> Trajectory:
        await self._interrupted()
        name = type(self.environment).__name__ if self.environment is not None else self.task.environment
        await self._discard()
        failure = failure_of(f"{name or 'the environment'}.{self.phase}", error)
        return self._trajectory(Outcome.ENV_FAILURE, failure=failure)

    async def _discard(self) -> None:
        if self.environment is not None and self.stage.environments is not None:
            await self.stage.environments.discard(self.environment)
            self.environment = None

    def _trajectory(self, outcome: Outcome, **fields: Any) -> Trajectory:
        return trajectory_of(self.conversation, self.task, self.turns, outcome, **fields)


class _EnvironmentError(Exception):
    """Marks an error as the environment's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
