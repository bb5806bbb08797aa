"""The token-exact state of one episode: a row of ids whose origin is known. Pure, no IO.

The row is the prompt ids, then sampled ids and rendered suffix ids in turn. It only ever grows at its end, so the
ids handed to the (k+1)-th sample call are the row so far, and a sampled id is never decoded and encoded again.
"""

from __future__ import annotations

from agentrl.types import Message, Prompt, Sample


class Conversation:
    """One growing row.

    Attributes:
        prompt: The prompt as the model sees it.
        prompt_length: Number of its ids.
        ids: The whole row, prompt included. Callers read it and never change it.
        loss_mask: 1 for sampled ids, 0 for suffix ids; completion only.
        logprobs: Logprob of each sampled id, 0.0 for suffix ids; completion only.
        messages: What followed the prompt: assistant and tool messages.
    """

    def __init__(self, prompt: Prompt, prompt_ids: list[int]) -> None:
        self.prompt = prompt
        self.prompt_length = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.messages: list[Message] = []

    @property
    def completion_length(self) -> int:
        """Number of ids after the prompt."""
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
        return start, self.completion_length

    def add_suffix(self, ids: list[int], messages: list[Message]) -> None:
        """Append what the template puts between two sampled turns, and the messages it shows."""
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages += messages
