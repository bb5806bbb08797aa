"""Reading a run's journals: runs, rollouts in short, and whole rollouts, as they are while the run goes on too.

A rollout that was read back gives the trajectory that was played, bit for bit: ids, masks, logprobs, messages, images,
forks. The viewer, `agentrl replay`, `agentrl export` and resuming all read through this module.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from agentrl.chat.forks import Continuation
from agentrl.errors import ConfigurationError
from agentrl.rollout.conversation import Conversation, trajectory_of
from agentrl.rollout.journal.schema import open_for_reading, rank_of
from agentrl.rollout.journal.values import from_png, loads, unpack_ids, unpack_logprobs
from agentrl.rollout.tools import tool_message
from agentrl.types import (
    Encoded,
    Failure,
    FinishReason,
    ImageSpan,
    Limit,
    Message,
    Outcome,
    Prompt,
    Sample,
    Task,
    ToolCall,
    ToolResult,
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
        at: When it was finished, in seconds since 1970.
    """

    turn: Turn
    sample: Sample
    message: Message
    shown: bool = False
    following: Continuation | None = None
    at: float = 0.0

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
class RolloutRecord:
    """A whole rollout.

    Attributes:
        summary: Everything but the conversation.
        task: What it had to do.
        prompt: The prompt as the model saw it.
        prompt_ids: Its ids.
        turns: The turns that are finished.
        extra: Further fields for the reward functions.
    """

    summary: RolloutSummary
    task: Task
    prompt: Prompt
    prompt_ids: list[int]
    turns: list[TurnRecord]
    extra: dict[str, Any] = field(default_factory=dict)

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
            ConfigurationError: There is no such turn.
        """
        if not 0 <= turn <= len(self.turns):
            raise ConfigurationError(f"turn {turn}: the rollout has {len(self.turns)} turns")
        summary = replace(self.summary, state=State.PLAYING, ended=None, outcome=None, limit=None, reward=None)
        turns = [replace(t, turn=replace(t.turn, listed_reward=None)) for t in self.turns[:turn]]
        return replace(self, summary=summary, turns=turns)

    def trajectory(self, locate: Locate = _no_images) -> Trajectory:
        """The trajectory as it was played; of a rollout that was cut off, as if it had been cancelled there.

        Args:
            locate: Finds images among ids that were rendered, as `Renderer.locate_images`; without it the messages have
                their images and the rows have none, so that they cannot be trained on.
        """
        summary = self.summary
        return trajectory_of(
            self.conversation(locate),
            self.task,
            [record.turn for record in self.turns],
            Outcome.CANCELLED if summary.outcome is None else summary.outcome,
            limit=Limit.CANCELLED if summary.outcome is None else summary.limit,
            reward=summary.reward,
            failure=summary.failure,
            retries=summary.attempt,
            extra=self.extra,
            record=summary.id,
        )


class RolloutKey(NamedTuple):
    """Names a rollout within a run's folder."""

    rank: int
    id: int

    @classmethod
    def parse(cls, text: str) -> RolloutKey:
        """Read "57" (of process 0) or "1:57" (of process 1).

        Raises:
            ConfigurationError: It is neither.
        """
        rank, _, number = text.rpartition(":")
        if not number.isdigit() or not (rank or "0").isdigit():
            raise ConfigurationError(f"{text!r} names no rollout; expected its number, or PROCESS:NUMBER")
        return cls(int(rank or 0), int(number))


class Records:
    """The journals of a run.

    Args:
        path: The run's folder, or one journal.

    Attributes:
        journals: The open journal of each process.

    Raises:
        ConfigurationError: There is no journal, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = sorted(path.glob("_rollouts*.db"), key=rank_of) if path.is_dir() else [path]
        if not files:
            raise ConfigurationError(f"there is no journal (_rollouts.db) in {path}")
        self.journals = {rank_of(file): open_for_reading(file) for file in files}

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for connection in self.journals.values():
            connection.close()

    @property
    def ranks(self) -> list[int]:
        """The processes that there are journals of."""
        return list(self.journals)

    def runs(self) -> list[RunRecord]:
        """The runs, oldest first, as the first process recorded them."""
        rows = next(iter(self.journals.values())).execute("SELECT * FROM runs ORDER BY id")
        return [RunRecord(row["id"], row["started"], json.loads(row["info"])) for row in rows]

    def summaries(
        self,
        *,
        run: int | None = None,
        kind: str | None = None,
        steps: tuple[int, int] | None = None,
        group: str | None = None,
        environment: str | None = None,
        outcome: Outcome | None = None,
        superseded: bool = False,
        after: int = 0,
        limit: int | None = None,
    ) -> list[RolloutSummary]:
        """Rollouts in short, in the order in which each process began them; what is None does not select.

        Args:
            run: Of this run.
            kind: Of this kind.
            steps: Played from the first of these steps to the last one, both included.
            group: Of this group.
            environment: In the environment of this name.
            outcome: That ended so.
            superseded: Those too that were cut off and played again.
            after: With a higher number, for reading on.
            limit: So many at most, of each process.
        """
        conditions = {"w.run = ?": run, "w.kind = ?": kind, 'r."group" = ?': group, "r.environment = ?": environment}
        conditions |= {"r.outcome = ?": outcome, "r.id > ?": after or None}
        conditions |= {"r.state != ?": None if superseded else State.SUPERSEDED}
        if steps is not None:
            conditions |= {"w.step >= ?": steps[0], "w.step <= ?": steps[1]}
        chosen = {text: value for text, value in conditions.items() if value is not None}
        return [
            summary
            for rank, connection in self.journals.items()
            for summary in read_summaries(connection, chosen, rank=rank, limit=limit)
        ]

    def rollout(self, key: RolloutKey | int) -> RolloutRecord:
        """One rollout with all its turns.

        Args:
            key: Which one; a number alone is one of the first process.

        Raises:
            ConfigurationError: There is none.
        """
        rank, number = (0, key) if isinstance(key, int) else key
        connection = self.journals.get(rank)
        record = None if connection is None else read_rollout(connection, number, rank=rank)
        if record is None:
            raise ConfigurationError(f"there is no rollout {number} of process {rank}; processes: {self.ranks}")
        return record

    def rollouts(self, summaries: Sequence[RolloutSummary]) -> Iterator[RolloutRecord]:
        """The whole rollouts of summaries, one after the other."""
        for summary in summaries:
            yield self.rollout(RolloutKey(summary.rank, summary.id))

    def image(self, digest: str) -> bytes | None:
        """The PNG file of an image."""
        for connection in self.journals.values():
            if (row := connection.execute("SELECT png FROM images WHERE digest = ?", [digest]).fetchone()) is not None:
                return bytes(row["png"])
        return None


def read_summaries(
    connection: sqlite3.Connection, conditions: dict[str, Any], *, rank: int = 0, limit: int | None = None
) -> list[RolloutSummary]:
    """Read the rollouts that meet all conditions, in order of their numbers."""
    where = " AND ".join(conditions) or "TRUE"
    rows = connection.execute(
        f"""
        SELECT r.*, w.run, w.kind, w.step, w.weights_version,
               (SELECT count(*) FROM turns t WHERE t.rollout = r.id) AS turns,
               (SELECT coalesce(sum(t.stop - t.start), 0) FROM turns t WHERE t.rollout = r.id) AS sampled
        FROM rollouts r JOIN windows w ON w.id = r.window WHERE {where} ORDER BY r.id LIMIT ?
        """,
        [*conditions.values(), -1 if limit is None else limit],
    )
    return [_summary(row, rank) for row in rows]


def read_rollout(
    connection: sqlite3.Connection, number: int, *, rank: int = 0, image: Callable[[str], Any] | None = None
) -> RolloutRecord | None:
    """Read one rollout with its turns, None if there is none of that number; `image` stands in for images."""
    summaries = read_summaries(connection, {"r.id = ?": number}, rank=rank)
    if not summaries:
        return None
    [summary] = summaries

    def from_journal(digest: str) -> Image.Image:
        [blob] = connection.execute("SELECT png FROM images WHERE digest = ?", [digest]).fetchone()
        return from_png(blob)

    image = from_journal if image is None else image
    row = connection.execute("SELECT * FROM rollouts WHERE id = ?", [number]).fetchone()
    turns = connection.execute("SELECT * FROM turns WHERE rollout = ? ORDER BY number", [number])
    given = loads(row["task"], image)
    return RolloutRecord(
        summary=summary,
        task=Task(summary.group, summary.member, row["seed"], given["prompt"], given["columns"], summary.environment),
        prompt=loads(row["prompt"], image),
        prompt_ids=unpack_ids(row["prompt_ids"]),
        turns=[_turn(turn, image) for turn in turns],
        extra=loads(row["extra"], image),
    )


def _summary(row: sqlite3.Row, rank: int) -> RolloutSummary:
    plain = ("id", "run", "kind", "step", "weights_version", "group", "member", "environment", "attempt")
    times = ("started", "ended", "resetting", "rewarding")
    return RolloutSummary(
        **{name: row[name] for name in (*plain, *times, "reward", "turns", "sampled")},
        rank=rank,
        state=State(row["state"]),
        outcome=None if row["outcome"] is None else Outcome(row["outcome"]),
        limit=None if row["limit"] is None else Limit(row["limit"]),
        failure=None if row["failure"] is None else Failure(**json.loads(row["failure"])),
        rewards=json.loads(row["rewards"] or "{}"),
        advantages=json.loads(row["advantages"] or "[]"),
    )


def _turn(row: sqlite3.Row, image: Any) -> TurnRecord:
    results = tuple(ToolResult(ToolCall(**answer.pop("call")), **answer) for answer in loads(row["results"], image))
    finish = FinishReason(row["finish"])
    following = None
    if row["next_ids"] is not None:
        following = Continuation(unpack_ids(row["next_ids"]), row["added"], bool(row["forks"]))
    version, updates = row["weights_version"], tuple((index, later) for index, later in json.loads(row["updates"]))
    span = row["start"], row["stop"], finish, results, row["seconds"], row["row"], row["listed_reward"]
    return TurnRecord(
        turn=Turn(*span, weights_version=version, updates=updates, prefill=row["prefill"]),
        sample=Sample(
            unpack_ids(row["ids"]), unpack_logprobs(row["logprobs"]), finish, version, updates, row["prefill"]
        ),
        message=loads(row["message"], image),
        shown=bool(row["shown"]),
        following=following,
        at=row["at"],
    )
