"""What a row, or a new one in its place, goes on with after a turn; apart from what makes it, for reading journals."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.types import ImageSpan


@dataclass(frozen=True, slots=True)
class Continuation:
    """What comes after a sampled turn and its results.

    Attributes:
        ids: The suffix, or the whole context of the next turn.
        added: Tokens of the round's glue and results, by which the episode grows.
        forks: Whether it is the whole context, the prompt of a new row.
        images: The images among the ids.
    """

    ids: list[int]
    added: int
    forks: bool = False
    images: tuple[ImageSpan, ...] = ()
