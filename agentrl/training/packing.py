"""Sequences end to end, and what several of them begin with only once: a tree of segments. Pure.

Rows of a group begin with the same prompt and often go on alike, since the same call gets the same result; the
sequences of an episode that forked have all in common but their ends. What a causal model computes at a position
depends on nothing behind it, so it is the same for all sequences that are the same up to there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.generation.slots import common_prefix

_WORTH = 8
"""Fewest common tokens that get a segment of their own: however short one is, each layer has some calls for it."""


class Segment(NamedTuple):
    """A stretch of packed tokens.

    Attributes:
        start: Index of its first token.
        stop: Index behind its last one.
        before: Tokens of the sequence before it, which its tokens see too.
        parent: Number of the segment that ends with them; None where there are none.
    """

    start: int
    stop: int
    before: int = 0
    parent: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the sequence up to the segment's end."""
        return self.before + self.stop - self.start


class Packing(NamedTuple):
    """Sequences in one line.

    Attributes:
        ids: The tokens.
        segments: What they consist of, in order, a parent before those that go on from it.
        places: Of each sequence, where its tokens are in `ids`, in ascending order.
    """

    ids: list[int]
    segments: list[Segment]
    places: list[tuple[range, ...]]


def pack(sequences: Sequence[list[int]], *, share: bool) -> Packing:
    """Lay out sequences end to end, in the order in which they come, or in which a common beginning comes.

    Args:
        sequences: Token ids; one may be empty.
        share: Whether common beginnings stand once. Where not, each sequence is a segment.
    """
    ids: list[int] = []
    segments: list[Segment] = []
    places: list[tuple[range, ...]] = [()] * len(sequences)

    def lay(members: Sequence[int], before: int, parent: int | None) -> None:
        """Lay out what is left of sequences that are the same up to the end of their parent."""
        for part in _alike(sequences, members, before, share=share):
            left = [sequences[s][before:] for s in part]
            tokens = left[0][: min(common_prefix(left[0], other) for other in left)]
            number, place = len(segments), range(len(ids), len(ids) + len(tokens))
            segments.append(Segment(place.start, place.stop, before, parent))
            ids.extend(tokens)
            for s in part:
                places[s] += (place,)
            if len(part) > 1:
                lay(part, before + len(tokens), number)

    lay(range(len(sequences)), 0, None)
    return Packing(ids, segments, places)


def _alike(sequences: Sequence[list[int]], members: Sequence[int], before: int, *, share: bool) -> list[list[int]]:
    """Put sequences together that go on alike for long enough; those that are at their end are left out."""
    parts: dict[object, list[int]] = defaultdict(list)
    for s in members:
        if head := tuple(sequences[s][before : before + _WORTH]):
            parts[head if share and len(head) == _WORTH else s].append(s)
    return list(parts.values())
