"""The words of the project: what a task, a sample, a turn and a trajectory are.

Plain data without behaviour beyond derived properties; imports nothing of agentrl. Token ids are `int`,
logprobs are natural logarithms, times are seconds, lengths are tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Message = dict[str, Any]
"""A chat message: `role`, `content` (a string or a list of typed blocks), optional `tool_calls`, ..."""

Prompt = str | list[Message]
"""A dataset prompt: plain text ("standard") or messages ("conversational")."""


class FinishReason(StrEnum):
    """Why the generator stopped sampling a turn."""

    STOP = "stop"
    """A stop token was sampled; it is the last id of the sample."""
    LENGTH = "length"
    """`max_tokens` were sampled without a stop token."""


class Limit(StrEnum):
    """What can cut an episode short, in the order in which it is checked."""

    CANCELLED = "cancelled"
    ROLLOUT_TIME = "rollout_time"
    CONTEXT = "context"
    COMPLETION = "completion"
    TOOL_ITERATIONS = "tool_iterations"


class Outcome(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"
    """The model gave an answer without a tool call."""
    ENV_DONE = "env_done"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """A length or iteration limit cut it; see `Trajectory.limit`."""
    TIMEOUT = "timeout"
    """The rollout ran out of time."""
    ENV_FAILURE = "env_failure"
    """The environment broke; never a training signal."""
    CANCELLED = "cancelled"
    """The run was cancelled meanwhile; never a training signal."""

    @property
    def is_signal(self) -> bool:
        """Whether the episode may be rewarded: it was the model that played it to where it ended."""
        return self not in (Outcome.ENV_FAILURE, Outcome.CANCELLED)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Image:
    """A picture as a model reads it, processed once when it arrived.

    Attributes:
        digest: Names its pixels: pictures that look the same have the same one.
        text: What takes the place of its placeholder in a rendered conversation.
        placeholders: How many tokens of that text stand for features of the picture.
        inputs: What the vision tower reads, by the name of the forward's argument; tensors on the CPU.
    """

    digest: str
    text: str = field(repr=False)
    placeholders: int
    inputs: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image stands in a row: `ids[start:stop]`, from its first placeholder token to its last."""

    image: Image
    start: int
    stop: int

    def moved(self, offset: int) -> ImageSpan:
        """The same image in a row that has `offset` more tokens before it."""
        return ImageSpan(self.image, self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rendered text as ids, with the images among them."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled turn.

    Attributes:
        ids: The sampled ids, the stop token included when there is one.
        logprobs: The logprob of each id under the distribution it was drawn from, NaN where it is not known.
        finish: Why sampling stopped.
        weights_version: The version of the weights that drew its first id.
        updates: Where the weights changed meanwhile: index of the first id that newer ones drew, and their version.
        prefill: Seconds from the request to its first id, waiting for room included; None if the generator does not
            tell.
    """

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    weights_version: int = 0
    updates: tuple[tuple[int, int], ...] = ()
    prefill: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"a sample has {len(self.ids)} ids but {len(self.logprobs)} logprobs")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote.

    Attributes:
        id: Unique within the turn: the one that the model wrote (Mistral's do), else a number within the rollout. The
            tool message that answers carries it as `tool_call_id`.
        name: The tool's name, or "" when the call could not be read.
        arguments: The keyword arguments.
        error: Why the call cannot be run (broken JSON, no name, ...); such a call is answered with this
            text and counted as a failure, never run.
    """

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepReward:
    """What a tool returns (or ends an episode with) to give its turn a reward besides the answer to the model.

    Attributes:
        content: The result, anything that a tool may return; the model does not see the reward.
        reward: A finite number. It is credited to the turn that made the call and to the turns before.
    """

    content: Any
    reward: float


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call.

    Attributes:
        call: The call answered.
        content: What the model is told: a string, or content blocks when the tool returned images.
        failed: Unknown tool, unreadable call, bad arguments, or the tool raised.
        seconds: Time the tool took.
        done: The tool ended the episode.
        timed_out: The tool took longer than it may; it also counts as failed.
        reward: What the tool rewarded the turn with, None if it gave no `StepReward`.
    """

    call: ToolCall
    content: str | list[dict[str, Any]]
    failed: bool = False
    seconds: float = 0.0
    done: bool = False
    timed_out: bool = False
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What one rollout has to do.

    Attributes:
        group: Identity of the group; its members share prompt, columns and seed. Never derived from text.
        member: Index within the group, from 0.
        seed: The group's seed, given to `reset(seed=...)`.
        prompt: The dataset's prompt, or None when the environment supplies it.
        columns: The other dataset columns, as the author wrote them.
        environment: Name of the environment when several are routed by name.
    """

    group: str
    member: int
    seed: int
    prompt: Prompt | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn of a trajectory and what came of it.

    Attributes:
        start: Index of its first id in the `completion_ids` of its row.
        stop: Index after its last sampled id.
        finish: Why sampling stopped.
        results: The answers to its tool calls, in call order; empty for a final answer.
        seconds: Time spent sampling.
        row: Index of its row in `Trajectory.rows`.
        listed_reward: The turn's entry of a list from `get_reward`.
        weights_version: As of its `Sample`.
        updates: As of its `Sample`.
        prefill: As of its `Sample`; a part of `seconds`.
    """

    start: int
    stop: int
    finish: FinishReason
    results: tuple[ToolResult, ...] = ()
    seconds: float = 0.0
    row: int = 0
    listed_reward: float | None = None
    weights_version: int = 0
    updates: tuple[tuple[int, int], ...] = ()
    prefill: float | None = None

    @property
    def versions(self) -> list[int]:
        """The version of the weights that drew each sampled id."""
        changes = [(0, self.weights_version), *self.updates]
        ends = [index for index, _ in changes[1:]] + [self.stop - self.start]
        return [version for (index, version), end in zip(changes, ends, strict=True) for _ in range(index, end)]

    @property
    def reward(self) -> float | None:
        """What the environment gave for this turn alone, by its tools and `get_reward`; None if nothing."""
        given = [r for r in (self.listed_reward, *(result.reward for result in self.results)) if r is not None]
        return sum(given) if given else None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an environment broke: where (`reset`, `get_reward`, ...), the exception, its traceback, whether to retry."""

    where: str
    error: str
    traceback: str = ""
    retry: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """What the model read in one go: a prompt, then sampled ids and suffixes; see `Trajectory` for the fields."""

    prompt_ids: list[int]
    completion_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    images: tuple[ImageSpan, ...] = ()


@dataclass(slots=True)
class Trajectory:
    """A finished episode as a stream of tokens whose origin is known.

    `completion_ids`, `loss_mask` and `logprobs` have one entry a token. The mask is 1 exactly on sampled ids;
    `logprobs` is 0.0 elsewhere.

    An episode is one row, unless its chat template rewrote earlier turns (`reasoning="fork"`): then it went on in
    further rows, whose prompts are the rewritten contexts. Every sampled token is in exactly one row.

    Attributes:
        task: What the rollout had to do.
        prompt: The prompt as the model saw it (after `reset`), text or messages.
        prompt_ids: Its ids.
        completion: What followed: text for a standard prompt, else messages.
        completion_ids: Sampled ids and rendered suffixes, alternating.
        loss_mask: 1 on sampled ids, 0 on suffix ids.
        logprobs: Logprob of each sampled id.
        outcome: How it ended.
        limit: Which limit, when it was cut.
        turns: The sampled turns.
        environment: The instance that played it, until it is released.
        reward: What `get_reward` returned for the episode, None where the environment has none, it does not apply, or
            it was a list, whose entries are in `turn_rewards`.
        failure: The cause of `Outcome.ENV_FAILURE`.
        retries: Attempts before this one, whose environment failed.
        extra: Further fields for the reward functions (from `rollout_func`).
        forks: The rows after the first one, in order.
        images: The images of the first row, in order; their places are in prompt and completion together.
        record: Its number in the journal of its process, None where none was kept.
    """

    task: Task
    prompt: Prompt
    prompt_ids: list[int]
    completion: Prompt
    completion_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    outcome: Outcome
    limit: Limit | None = None
    turns: list[Turn] = field(default_factory=list)
    environment: Any = None
    reward: float | None = None
    failure: Failure | None = None
    retries: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    forks: list[Row] = field(default_factory=list)
    images: tuple[ImageSpan, ...] = ()
    record: int | None = field(default=None, compare=False)

    @property
    def rows(self) -> list[Row]:
        """All rows of the episode."""
        return [Row(self.prompt_ids, self.completion_ids, self.loss_mask, self.logprobs, self.images), *self.forks]

    @property
    def truncated(self) -> bool:
        """Whether a length, a deadline or a cancellation cut the episode before its natural end.

        An episode that stopped at `max_tool_calling_iterations` is not truncated: all its turns are whole, and
        having asked for too many tools is what the model did. `limit` tells it from a natural end.
        """
        cut = self.outcome in (Outcome.TRUNCATED, Outcome.TIMEOUT, Outcome.CANCELLED)
        return cut and self.limit is not Limit.TOOL_ITERATIONS

    @property
    def turn_rewards(self) -> list[float] | None:
        """One reward a turn, not counting `reward`; None when the environment gave none for any turn."""
        if all(turn.reward is None for turn in self.turns):
            return None
        return [turn.reward or 0.0 for turn in self.turns]

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens, over all rows."""
        return sum(sum(row.loss_mask) for row in self.rows)

    @property
    def tool_calls(self) -> int:
        """Number of tool calls that were answered: run, or told to be unreadable or unknown."""
        return sum(len(turn.results) for turn in self.turns)

    @property
    def tool_failures(self) -> int:
        """Number of tool calls that failed."""
        return sum(result.failed for turn in self.turns for result in turn.results)

    @property
    def tool_timeouts(self) -> int:
        """Number of tool calls that took longer than they may."""
        return sum(result.timed_out for turn in self.turns for result in turn.results)


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from parts, the same on every machine and in every process.

    Example:
        >>> derive_seed(42, "group", 3) == derive_seed(42, "group", 3)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
