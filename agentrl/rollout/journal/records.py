"""What a journal holds of runs, rollouts and turns.

A rollout that was read back gives the trajectory that was played, bit for bit: ids, masks, logprobs, messages, images,
forks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agentrl.chat.continuation import Continuation
from agentrl.errors import ConfigurationError
from agentrl.rollout.conversation import Conversation, trajectory_of
from agentrl.rollout.results import tool_message
from agentrl.types import (
    Encoded,
    Failure,
    ImageSpan,
    Limit,
    Message,
    Outcome,
    Prompt,
    Row,
    Sample,
    Task,
    Trajectory,
    Turn,
)

Locate = Callable[[Sequence[Message], Sequence[int]], tuple[ImageSpan, ...]]
"""From messages, and ids that show the last images of them, to where these stand."""


def _no_images(messages: Sequence[Message], ids: Sequence[int]) -> tuple[ImageSpan, ...]:
    return ()


class State(StrEnum):
    """How far a recorded rollout is."""

    PLAYING = "playing"
    """Its last turn did not end it. In the journal of a run that is gone: it was cut off there."""
    PLAYED = "played"
    """Its last turn ended it, and its environment has not given the reward yet."""
    ENDED = "ended"
    SUPERSEDED = "superseded"
    """It was cut off, could not be continued, and was played again under another number."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn and what the conversation got from it.

    Attributes:
        turn: Its place, the answers to its calls, and its times.
        sample: The sampled ids, their logprobs, and the version of the weights that drew them.
        message: The sampled message as it was read.
        shown: Whether the answers became part of the conversation; a round for which there was no room is dropped.
        following: What the row got after it, None where the episode ended.
        at: When it was finished, in seconds since 1970; None where only a program of the user's could tell.
        replies: What a program of the user's said next; the engine's answers to calls are those of the turn.
    """

    turn: Turn
    sample: Sample
    message: Message
    shown: bool = False
    following: Continuation | None = None
    at: float | None = None
    replies: tuple[Message, ...] = ()

    def extend(self, conversation: Conversation, locate: Locate = _no_images) -> None:
        """Give a conversation the turn and what followed it.

        Args:
            conversation: The conversation before the turn.
            locate: Finds the images of what followed.
        """
        conversation.add_sample(self.sample, self.message)
        answers = [tool_message(result) for result in self.turn.results] if self.shown else []
        following = self.following
        if following is not None:
            messages = [*conversation.context, *answers] if following.forks else answers
            following = replace(following, images=locate(messages, following.ids))
        conversation.go_on(answers, following)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One training from its beginning, resumed or not.

    Attributes:
        id: Its number.
        started: When it began, in seconds since 1970.
        info: Algorithm, model and configuration, as far as whoever began it told.
    """

    id: int
    started: float
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A rollout without its turns, for lists.

    Attributes:
        id: Its number in the journal of its process.
        rank: The process that played it.
        run: Number of its run.
        kind: "train", "eval", or what the caller called it.
        step: Optimizer steps before it.
        weights_version: Version of the weights when its window began.
        group: Identity of its group.
        member: Index in the group.
        environment: Name of the environment, None where there is one only.
        attempt: Attempts before it, whose environment failed.
        state: How far it is.
        started: When it began, in seconds since 1970.
        ended: When it ended.
        resetting: Seconds before it began: an instance of the environment, `reset`, rendering.
        rewarding: Seconds that the environment took for the reward.
        outcome: How it ended.
        limit: Which limit cut it.
        failure: What broke its environment.
        reward: What `get_reward` gave for the whole of it.
        rewards: The value of each reward source by name; empty as long as they are not known.
        advantages: One number, or one a turn; empty as long as they are not known.
        turns: Number of turns.
        sampled: Number of sampled tokens.
    """

    id: int
    rank: int
    run: int
    kind: str
    step: int
    weights_version: int
    group: str
    member: int
    environment: str | None
    attempt: int
    state: State
    started: float
    ended: float | None
    resetting: float | None
    rewarding: float | None
    outcome: Outcome | None
    limit: Limit | None
    failure: Failure | None
    reward: float | None
    rewards: dict[str, float | None]
    advantages: list[float]
    turns: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Whole:
    """What the turns of a rollout do not tell that a program of the user's played, see `journal.whole`.

    Attributes:
        completion: What followed the prompt.
        rows: The rows of the trajectory.
        exact: Whether the trajectory can be given back as it was; else some extra field is only there to be shown.
    """

    completion: Prompt
    rows: list[Row]
    exact: bool


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A whole rollout.

    Attributes:
        summary: Everything but the conversation.
        task: What it had to do.
        prompt: The prompt as the model saw it.
        prompt_ids: Its ids.
        turns: The turns that are finished.
        extra: Further fields for the reward functions.
        whole: The rest of what a program of the user's played; None where the engine played it.
    """

    summary: RolloutSummary
    task: Task
    prompt: Prompt
    prompt_ids: list[int]
    turns: list[TurnRecord]
    extra: dict[str, Any] = field(default_factory=dict)
    whole: Whole | None = None

    def conversation(self, locate: Locate = _no_images) -> Conversation:
        """The state of the conversation after the recorded turns."""
        images = () if isinstance(self.prompt, str) else locate(self.prompt, self.prompt_ids)
        conversation = Conversation(self.prompt, Encoded(self.prompt_ids, images))
        for turn in self.turns:
            turn.extend(conversation, locate)
        return conversation

    def before(self, turn: int) -> RolloutRecord:
        """The record as it was before a turn was sampled.

        Raises:
            ConfigurationError: There is no such turn, or a program played it that cannot be brought back there.
        """
        self.check_replayable()
        if not 0 <= turn <= len(self.turns):
            raise ConfigurationError(f"turn {turn}: the rollout has {len(self.turns)} turns")
        summary = replace(self.summary, state=State.PLAYING, ended=None, outcome=None, limit=None, reward=None)
        turns = [replace(t, turn=replace(t.turn, listed_reward=None)) for t in self.turns[:turn]]
        return replace(self, summary=summary, turns=turns)

    def check_replayable(self) -> None:
        """Check that the engine played it, which alone can do so again.

        Raises:
            ConfigurationError: A program of the user's did.
        """
        if self.whole is not None:
            raise ConfigurationError(
                f"rollout {self.summary.id} was played by a rollout_func or an agent: what such a program does between "
                "its turns is not in the journal, so it cannot be played again"
            )

    def trajectory(self, locate: Locate = _no_images) -> Trajectory:
        """The trajectory as it was played; of a rollout that was cut off, as if it had been cancelled there.

        Args:
            locate: Finds images among ids that were rendered, as `Renderer.locate_images`; without it the messages have
                their images and the rows have none, so that they cannot be trained on.
        """
        summary = self.summary
        fields: dict[str, Any] = {
            "outcome": Outcome.CANCELLED if summary.outcome is None else summary.outcome,
            "limit": Limit.CANCELLED if summary.outcome is None else summary.limit,
            "reward": summary.reward,
            "failure": summary.failure,
            "retries": summary.attempt,
            "extra": self.extra,
            "record": summary.id,
        }
        turns = [record.turn for record in self.turns]
        if self.whole is None:
            return trajectory_of(self.conversation(locate), self.task, turns, **fields)
        first, *forks = self.whole.rows
        return Trajectory(
            task=self.task,
            prompt=self.prompt,
            prompt_ids=first.prompt_ids,
            completion=self.whole.completion,
            completion_ids=first.completion_ids,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
            forks=forks,
            turns=turns,
            **fields,
        )
