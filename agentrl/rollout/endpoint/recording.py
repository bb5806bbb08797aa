"""What the requests of one program make of its rows. Pure, no IO.

A program sends its whole conversation with every request. Where that begins with a recorded one, up to and including
a turn that was sampled, only what follows is rendered: it is appended to the row as a suffix, and sampled ids stay
what they were. Otherwise the request begins a row of its own:

- it goes on from an earlier turn of a row, or from one whose next turn is being sampled for another request (parallel
  sub-agents): the ids up to there are its prompt;
- it has a history that was rewritten or that no row has: the whole of it is rendered as its prompt;
- it follows a turn that was cut before its end, which no suffix can follow: likewise.

Every sampled token is trained in exactly one row, the one it was sampled in; in prompts of other rows it is context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.renderer import Renderer
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.endpoint.messages import common, normalise
from agentrl.types import Encoded, FinishReason, Message, Outcome, Row, Sample, Task, Trajectory, Turn

Tools = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A sampled turn that a request may follow.

    Attributes:
        messages: Messages of the conversation up to its end, itself included.
        ids: Ids of the row up to its end.
        sampled: The ids of the turn.
    """

    messages: int
    ids: int
    sampled: list[int]


@dataclass(slots=True, eq=False)
class RecordedRow:
    """A row and the conversation it is the ids of.

    Attributes:
        session: The generator's name for it.
        history: Its messages, in normal form, the sampled turns included.
        asked: How many of them were in the request that began it.
        tools: The tool schemas it was rendered with.
        conversation: Its ids, with their origin.
        marks: Where requests may go on.
        turns: Its sampled turns.
        busy: Whether its next turn is being sampled.
    """

    session: str
    history: list[Message]
    asked: int
    tools: Tools
    conversation: Conversation
    marks: list[Mark] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes.

    Attributes:
        session: The generator's name for the row.
        ids: What the model reads: the row so far and what the request adds.
        added: Tokens by which the episode grows before anything is sampled.
        messages: The request's messages, in normal form.
        tools: Its tool schemas.
        row: The row it extends, None where it begins one.
        suffix: What it appends to that row.
    """

    session: str
    ids: list[int]
    added: int
    messages: list[Message]
    tools: Tools
    row: RecordedRow | None = None
    suffix: list[int] = field(default_factory=list)


class Recording:
    """The rows of one program's requests.

    Args:
        renderer: Turns messages into ids.
        name: What the generator's sessions are named after.

    Attributes:
        rows: The rows, in the order in which their first turns were sampled.
        sessions: Every session that was named.
        spent: Tokens of the episode: sampled ones, and those that requests appended to recorded conversations.
        calls: Tool calls sampled so far.
    """

    def __init__(self, renderer: Renderer, name: str) -> None:
        self._renderer = renderer
        self._name = name
        self.rows: list[RecordedRow] = []
        self.sessions: list[str] = []
        self.spent = 0
        self.calls = 0

    def place(self, messages: list[Message], tools: Tools) -> Placement:
        """Find where a request goes, and keep its row for it until `commit` or `abandon`.

        Args:
            messages: In normal form.
            tools: Tool schemas.

        Raises:
            TemplateError: The chat template cannot render the messages.
        """
        if (best := self._longest(messages, tools)) is None:
            ids = self._renderer.prompt_ids(messages, tools)
            return Placement(self._session(), ids, 0, messages, tools)
        row, mark = best
        completion, rest = row.history[row.asked : mark.messages], messages[mark.messages :]
        following = self._renderer.continuation(row.history[: row.asked], completion, rest, mark.sampled, tools)
        if following.forks:
            return Placement(self._session(), following.ids, following.added, messages, tools)
        ids = [*row.conversation.ids[: mark.ids], *following.ids]
        if row.busy or mark is not row.marks[-1] or mark.ids != len(row.conversation.ids):
            return Placement(self._session(), ids, following.added, messages, tools)
        row.busy = True
        return Placement(row.session, ids, following.added, messages, tools, row, following.ids)

    def commit(self, place: Placement, sample: Sample, message: Message, seconds: float = 0.0) -> None:
        """Record the turn that was sampled for a request.

        Args:
            place: Where the request went.
            sample: The turn.
            message: What the program is given.
            seconds: Time spent sampling.
        """
        if (row := place.row) is None:
            row = RecordedRow(place.session, [], len(place.messages), place.tools, Conversation("", Encoded(place.ids)))
            self.rows.append(row)
        else:
            row.busy = False
            row.conversation.add_suffix(place.suffix, [])
        [answer] = normalise([message])
        start, stop = row.conversation.add_sample(sample, answer)
        # A program may have left reasoning out of what it sends: the row has it.
        row.history += [*place.messages[len(row.history) :], answer]
        row.turns.append(
            Turn(
                start,
                stop,
                sample.finish,
                seconds=seconds,
                row=self.rows.index(row),
                weights_version=sample.weights_version,
                updates=sample.updates,
                prefill=sample.prefill,
            )
        )
        if sample.finish is FinishReason.STOP:
            row.marks.append(Mark(len(row.history), len(row.conversation.ids), sample.ids))
        self.spent += place.added + len(sample.ids)
        self.calls += len(answer.get("tool_calls", ()))

    def abandon(self, place: Placement) -> None:
        """Forget a request whose turn was not sampled."""
        if place.row is not None:
            place.row.busy = False

    def trajectory(self, task: Task, outcome: Outcome, **fields: Any) -> Trajectory:
        """Make the rows a trajectory; its turns are in the order of the rows.

        Args:
            task: What the program had to do.
            outcome: How it ended.
            **fields: Further fields.
        """
        rows = [row.conversation.row for row in self.rows] or [Row([], [], [], [])]
        first, *forks = rows
        return Trajectory(
            task=task,
            prompt=self.rows[0].history[: self.rows[0].asked] if self.rows else task.prompt or "",
            prompt_ids=first.prompt_ids,
            completion=[message for row in self.rows for message in row.history[row.asked :]],
            completion_ids=first.completion_ids,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
            forks=forks,
            outcome=outcome,
            turns=[turn for row in self.rows for turn in row.turns],
            **fields,
        )

    def _longest(self, messages: list[Message], tools: Tools) -> tuple[RecordedRow, Mark] | None:
        """The sampled turn furthest on that the request follows; a row that can grow is preferred."""
        best: tuple[tuple[int, bool], RecordedRow, Mark] | None = None
        for row in self.rows:
            if row.tools != tools:
                continue
            shared = common(row.history, messages)
            for mark in row.marks:
                rest = messages[mark.messages :]
                if mark.messages > shared or not rest or any(m["role"] == "assistant" for m in rest):
                    continue
                rank = (mark.messages, not row.busy and mark is row.marks[-1])
                if best is None or rank > best[0]:
                    best = (rank, row, mark)
        return None if best is None else best[1:]

    def _session(self) -> str:
        self.sessions.append(f"{self._name}/{len(self.sessions)}")
        return self.sessions[-1]
