"""Sequences end to end, and what several of them begin with only once: a tree of segments. Pure.

Rows of a group begin with the same prompt and often go on alike, since the same call gets the same result; the
sequences of an episode that forked have all in common but their ends. What a causal model computes at a position
depends on nothing behind it, so it is the same for all sequences that are the same up to there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agentrl.generation.slots import common_prefix

_WORTH = 16
"""Fewest tokens that a common beginning must save to get a segment of its own: each layer has some calls for it."""


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
        for part, stop in _parts(sequences, members, before, before, share=share):
            number, place = len(segments), range(len(ids), len(ids) + stop - before)
            segments.append(Segment(place.start, place.stop, before, parent))
            ids.extend(sequences[part[0]][before:stop])
            for s in part:
                places[s] += (place,)
            if len(part) > 1:
                lay(part, stop, number)

    lay(range(len(sequences)), 0, None)
    return Packing(ids, segments, places)


def _parts(
    sequences: Sequence[list[int]], members: Sequence[int], before: int, same: int, *, share: bool
) -> Iterator[tuple[list[int], int]]:
    """Put sequences together whose next segment is the same, and say where it ends.

    Args:
        sequences: All of them.
        members: Those in question, which are the same up to `same`. One that has nothing left is left out.
        before: Where their next segments begin.
        same: Not before that.
        share: Whether they may have segments together.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for s in members:
        if before < len(sequences[s]):
            alike[sequences[s][same] if share and same < len(sequences[s]) else ("alone", s)].append(s)
    for part in alike.values():
        first = sequences[part[0]]
        stop = min((same + common_prefix(first[same:], sequences[s][same:]) for s in part[1:]), default=len(first))
        if len(part) == 1 or (len(part) - 1) * (stop - before) >= _WORTH:
            yield part, stop
        else:  # too little for all of them, but some may go on together
            yield from _parts(sequences, part, before, stop, share=share)
