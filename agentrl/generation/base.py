"""The contract between the rollout engine and whatever samples tokens.

A generator takes token ids and gives back sampled ids with their logprobs; it knows nothing of messages, tools
or rewards. Requests are independent of each other: none waits for another one to finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentrl.errors import GenerationError
from agentrl.types import ImageSpan, Sample

UNBOUNDED_TURN = 2**31 - 1
"""`max_tokens` of a turn when neither a budget nor a known context length bounds it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw a turn.

    Attributes:
        max_tokens: Most tokens to sample, at least 1.
        stop_ids: Sampling stops after any of these ids; the id is kept.
        temperature: Divides the logits, > 0.
        top_p: Keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: Keep the k likeliest tokens; 0 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest; None keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of ids already in the row
            (Keskar et al. 2019, CTRL, https://arxiv.org/abs/1909.05858, section 4.1); 1.0 does nothing.
        suppress_tokens: Ids that are never drawn, such as the one that stands for an image; None for none.
        seed: Seed of this one turn; the same ids, weights and seed draw the same tokens.
    """

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] | None = None
    seed: int = 0


@dataclass(slots=True)
class GenerationStats:
    """Counters since construction, for metrics and benchmarks.

    Attributes:
        prefilled_tokens: Tokens run through the model that were not sampled in the same run (prompts, suffixes).
        decoded_tokens: Tokens sampled.
        forward_passes: Calls of the model.
        evictions: Sessions whose KV was dropped for lack of room and had to be prefilled again.
        images_encoded: Images that went through the vision tower.
    """

    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    forward_passes: int = 0
    evictions: int = 0
    images_encoded: int = 0


@runtime_checkable
class Generator(Protocol):
    """Samples turns. `sample` is awaited on the engine's event loop; the other methods may be called anywhere."""

    stats: GenerationStats

    @property
    def owns_weights(self) -> bool:
        """Whether it samples from weights of its own, which only `sync` renews.

        Then the policy may be trained while turns are being sampled. A generator that shares the policy's weights
        must be at rest whenever they change.
        """

    @property
    def max_context(self) -> int | None:
        """Most tokens a row may have, prompt and completion; None if unknown."""

    async def sample(
        self, session: str, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Sample:
        """Sample one turn.

        Args:
            session: Names the rollout. A generator may keep its KV between turns.
            ids: The whole row so far. It extends the row of the session's previous turn, unless the chat template
                rewrote that (`reasoning="fork"`): then it has only its beginning in common with it.
            params: How to draw.
            images: The images of the row, in order; only given where there are some.

        Raises:
            GenerationError: The request cannot be served.
        """

    def release(self, session: str) -> None:
        """Forget a session; unknown sessions are ignored."""

    def sync(self, weights_version: int) -> None:
        """Take notice of new weights: what was cached under older ones is stale.

        A generator that owns its weights takes the policy's over before this returns, and goes on with the turns that
        are being sampled: `Sample.updates` says from which id on newer weights drew. In a world of several processes
        all of them call this, at the same place.

        Args:
            weights_version: The number of optimizer steps behind the weights.

        Raises:
            GenerationError: The weights could not be handed over.
        """

    def close(self) -> None:
        """Free threads and memory; idempotent."""


@runtime_checkable
class Phased(Protocol):
    """A generator that wants to know when turns are sampled and when the policy is trained.

    Every process calls both, at the same places.
    """

    def wake(self) -> None:
        """The policy stays as it is, and turns are sampled; those that were asked for before go on meanwhile."""

    def rest(self) -> None:
        """The policy may change from here on, until the next `wake`."""


@runtime_checkable
class Probed(Protocol):
    """A generator whose weights are copies that may turn out to be wrong."""

    @property
    def exact(self) -> bool:
        """Whether it computes in float32, so that its logprobs are to equal the trainer's."""

    async def probe(
        self, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> dict[str, Sample]:
        """Sample the same turn from every copy, by its name."""


def require_room(session: str, ids: Sequence[int], params: SamplingParams, limit: int | None) -> None:
    """Check that a turn fits.

    Raises:
        GenerationError: The row is empty, or the turn could outgrow the context of `limit` tokens.
    """
    if not ids:
        raise GenerationError(f"session {session!r}: the row is empty; a prompt needs at least one token")
    if limit is not None and len(ids) + params.max_tokens > limit:
        raise GenerationError(
            f"session {session!r}: {len(ids)} tokens and up to {params.max_tokens} new ones exceed the "
            f"model's context of {limit}; shorten the prompt or lower the completion length"
        )
