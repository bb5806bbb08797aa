"""The token-exact state of one episode: a row of ids whose origin is known. Pure, no IO.

The row is the prompt ids, then sampled ids and rendered suffix ids in turn. It only ever grows at its end, so the
ids handed to the (k+1)-th sample call are the row so far, and a sampled id is never decoded and encoded again. Where a
chat template rewrites earlier turns, the row is set aside and a new one begins with the rewritten context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.chat.continuation import Continuation
from agentrl.types import Encoded, ImageSpan, Message, Outcome, Prompt, Row, Sample, Task, Trajectory, Turn


class Conversation:
    """A growing row, and those that it took over from.

    Attributes:
        rows: The rows before the current one.
        spent: Tokens of the episode after its prompt: sampled tokens, and suffixes whether or not a fork made them
            part of a prompt.
        prompt: The prompt as the model sees it.
        prompt_length: Number of the current row's prompt ids.
        ids: The whole row, prompt included. Callers read it and never change it.
        loss_mask: 1 for sampled ids, 0 for suffix ids; completion only.
        logprobs: Logprob of each sampled id, 0.0 for suffix ids; completion only.
        images: The images of the row, in order.
        messages: What followed the prompt: assistant and tool messages.
    """

    def __init__(self, prompt: Prompt, encoded: Encoded) -> None:
        self.rows: list[Row] = []
        self.spent = 0
        self.prompt = prompt
        self.prompt_length = len(encoded.ids)
        self.ids = list(encoded.ids)
        self.images = list(encoded.images)
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.messages: list[Message] = []

    @property
    def context(self) -> list[Message]:
        """Prompt and what followed it; a prompt of text is no message."""
        return self.messages if isinstance(self.prompt, str) else [*self.prompt, *self.messages]

    @property
    def completion_length(self) -> int:
        """Number of the row's ids after its prompt."""
        return len(self.loss_mask)

    @property
    def completion_ids(self) -> list[int]:
        """The ids after the prompt."""
        return self.ids[self.prompt_length :]

    def add_sample(self, sample: Sample, message: Message) -> tuple[int, int]:
        """Append a sampled turn; returns its span in the completion."""
        start = self.completion_length
        self.ids += sample.ids
        self.loss_mask += [1] * len(sample.ids)
        self.logprobs += sample.logprobs
        self.messages.append(message)
        self.spent += len(sample.ids)
        return start, self.completion_length

    def add_suffix(self, ids: list[int], messages: list[Message], images: Sequence[ImageSpan] = ()) -> None:
        """Append what the template puts between two sampled turns, and the messages and images it shows."""
        self.images += [span.moved(len(self.ids)) for span in images]
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages += messages
        self.spent += len(ids)

    def fork(self, ids: list[int], messages: list[Message], added: int, images: Sequence[ImageSpan] = ()) -> None:
        """Go on in a new row.

        Args:
            ids: The context that the model reads next: the new row's prompt.
            messages: What the template shows after the last turn.
            added: Their tokens, as part of an episode's length.
            images: The images of the context.
        """
        self.rows.append(self.row)
        self.images = list(images)
        self.ids, self.prompt_length = list(ids), len(ids)
        self.loss_mask, self.logprobs = [], []
        self.messages += messages
        self.spent += added

    def go_on(self, messages: list[Message], following: Continuation | None) -> None:
        """Append the answers to a sampled turn's calls.

        Args:
            messages: The answers.
            following: What the template makes of them; None where no further turn is sampled: then the row ends with
                the calls, and only the transcript has the answers.
        """
        if following is None:
            self.messages += messages
        elif following.forks:
            self.fork(following.ids, messages, following.added, following.images)
        else:
            self.add_suffix(following.ids, messages, following.images)

    @property
    def row(self) -> Row:
        """The current row."""
        prompt_ids = self.ids[: self.prompt_length]
        return Row(prompt_ids, self.completion_ids, self.loss_mask, self.logprobs, tuple(self.images))

    def rows_up_to(self, stop: int) -> list[Row]:
        """All rows, the current one up to an index in its completion; without it if that is 0 and there are others.

        An image stays only if all of it does.
        """
        if self.rows and not stop:
            return self.rows
        row = self.row
        images = tuple(span for span in row.images if span.stop <= self.prompt_length + stop)
        cut = Row(row.prompt_ids, row.completion_ids[:stop], row.loss_mask[:stop], row.logprobs[:stop], images)
        return [*self.rows, cut]


def trajectory_of(
    conversation: Conversation, task: Task, turns: Sequence[Turn], outcome: Outcome, **fields: Any
) -> Trajectory:
    """Make the trajectory of an episode that has ended.

    An episode that was interrupted may have more in its row than its whole turns; nothing there is trained, so the row
    is cut back to its last sampled token.

    Args:
        conversation: Its state.
        task: What the rollout had to do.
        turns: Its turns.
        outcome: How it ended.
        **fields: Further fields of the trajectory.
    """
    text = isinstance(conversation.prompt, str)
    whole = [turn.stop for turn in turns[-1:] if turn.row == len(conversation.rows)]
    first, *forks = conversation.rows_up_to(whole[0] if whole else 0)
    return Trajectory(
        task=task,
        prompt=conversation.prompt,
        prompt_ids=first.prompt_ids,
        completion="".join(m["content"] for m in conversation.messages) if text else conversation.messages,
        completion_ids=first.completion_ids,
        loss_mask=first.loss_mask,
        logprobs=first.logprobs,
        images=first.images,
        forks=forks,
        outcome=outcome,
        turns=list(turns),
        **fields,
    )
