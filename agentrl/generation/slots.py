"""Which session holds which slot of the cache, and who has to go when there is no room.

The cache is one rectangle of slots × length, at most `budget` tokens. It begins with the size that the sessions before
came to, its length grows by doubling, and one side shrinks when the other one has to grow. Sessions between their turns
give way first, the least recently used before the others; what to do when only active sessions are left is the
scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from agentrl.generation.cache import SlotCache


@dataclass(eq=False, slots=True)
class Session:
    """A row and what the cache holds of it.

    Attributes:
        name: The caller's name for it.
        row: All ids so far.
        cached: The slot holds the keys and values of `row[:cached]`.
        slot: Its slot, None when it holds none.
        wanted: Positions that its slot must have room for.
        active: A turn of it is not answered yet.
        pinned: A turn of it is being run; its slot cannot be taken away.
        evicted: It lost its slot and has to be prefilled again.
        used: Serial number of its last turn.
    """

    name: str
    row: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int | None = None
    wanted: int = 0
    active: bool = False
    pinned: bool = False
    evicted: bool = False
    used: int = 0


class _Size(NamedTuple):
    """Slots, and positions of each."""

    slots: int
    length: int


_NOTHING = _Size(0, 0)


class SlotPool:
    """Hands out the slots of a cache within a budget of tokens."""

    def __init__(self, cache: SlotCache, budget: Callable[[], int]):
        self.cache = cache
        self._budget = budget
        self._owners: list[Session | None] = []
        # The slots that were held since the cache was last empty and the positions that each needed; and before that.
        self._needed, self._usual = _NOTHING, _NOTHING

    @cached_property
    def budget(self) -> int:
        """Most tokens that the cache may have room for; measured when first needed."""
        return self._budget()

    @property
    def holders(self) -> list[Session]:
        """Sessions that hold a slot, in the order of the slots."""
        return [owner for owner in self._owners if owner is not None]

    def hold(self, session: Session, wanted: int, expected: int = 1) -> bool:
        """Pin a session to a slot with room for `wanted` positions, evicting sessions that are not pinned.

        Args:
            session: Who asks; it may hold a slot already.
            wanted: Positions, at most the budget.
            expected: How many sessions will soon hold slots, so that the cache grows once for all of them.

        Returns:
            Whether there was room. If not, nothing has changed but the evictions.
        """
        if wanted <= self.cache.length and (session.slot is not None or None in self._owners):
            self._pin(session, wanted)  # most turns find room that is there already
            return True
        while True:
            others = [owner for owner in self.holders if owner is not session]
            length = max([wanted, *(owner.wanted for owner in others)])
            if (len(others) + 1) * length <= self.budget:
                break
            idle = [owner for owner in others if not owner.pinned]
            if not idle:
                return False
            self.drop(min(idle, key=lambda owner: owner.used), evicted=True)
        self._reshape(len(others) + 1, length, expected)
        self._pin(session, wanted)
        return True

    def _pin(self, session: Session, wanted: int) -> None:
        session.wanted, session.pinned = wanted, True
        if session.slot is None:
            session.slot = self._owners.index(None)
            session.cached = 0
            self._owners[session.slot] = session
        self._needed = _Size(max(self._needed.slots, session.slot + 1), max(self._needed.length, wanted))

    def drop(self, session: Session, *, evicted: bool = False) -> None:
        """Take a session's slot away; with the last slot the memory goes too."""
        session.pinned = False
        if session.slot is None:
            return
        self._owners[session.slot] = None
        session.slot, session.cached, session.evicted = None, 0, evicted
        if not self.holders:
            self.clear()

    def clear(self) -> None:
        """Take all slots away and free the memory."""
        for session in self.holders:
            session.slot, session.cached, session.pinned = None, 0, False
        self._owners.clear()
        self.cache.clear()
        if self._needed.slots:
            self._usual, self._needed = self._needed, _NOTHING

    def share(self, source: Session, target: Session, length: int) -> None:
        """Copy the first `length` positions of a session to another one; both hold slots."""
        assert source.slot is not None
        assert target.slot is not None
        self.cache.copy(source.slot, target.slot, length)
        target.cached = length

    def move(self, places: Iterable[tuple[Session, int]]) -> None:
        """Move sessions to slots; whoever holds such a slot takes the one that its new holder had.

        Args:
            places: The sessions, each with its new slot; no slot is concerned twice.
        """
        sources: list[int] = []
        targets: list[int] = []
        length = 0
        for session, target in places:
            source, other = session.slot, self._owners[target]
            assert source is not None
            if source == target:
                continue
            for moved, start, end in ((session, source, target), (other, target, source)):
                self._owners[end] = moved
                if moved is not None:
                    moved.slot = end
                    sources.append(start)
                    targets.append(end)
                    length = max(length, moved.cached)
        if sources:
            self.cache.rearrange(sources, targets, length)

    def _reshape(self, slots: int, length: int, expected: int) -> None:
        """Resize the cache where it has fewer than `slots` slots or less than `length` positions."""
        if slots <= self.cache.slots and length <= self.cache.length:
            return
        if length <= self.cache.length and slots * self.cache.length <= self.budget:
            length = self.cache.length
        else:
            length = min(max(length, 2 * self.cache.length or self._usual.length), self.budget // slots)
        slots = min(max(slots, expected, self.cache.slots or self._usual.slots), self.budget // length)
        holders = self.holders
        # The order stays, and with it the decoding rows at the front.
        self.cache.resize(slots, length, [(owner.slot or 0, owner.cached) for owner in holders])
        for slot, owner in enumerate(holders):
            owner.slot = slot
        self._owners = [*holders, *[None] * (slots - len(holders))]


def common_prefix(one: list[int], other: list[int]) -> int:
    """Count the tokens that two rows begin with in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:  # slices compare in C, and a binary search needs few of them
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
