"""Processes that each have a shard of one engine, in step with one another.

vLLM's tensor parallelism inside a training world has one engine in each process, which all have to be given the same
requests in the same order and stepped together. Each process has rollouts of its own, so before every step they tell
each other what has come up. Nobody waits for anybody's rollouts, only for the step that they run together.

A round lasts from `begin` to when all have said `end` and nothing is left to do. Outside of
rounds nothing is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import distributed


@dataclass(slots=True)
class News:
    """What has come up in one process since the last step.

    Attributes:
        added: New requests, each a name and what the engine is to be told.
        dropped: Names of requests that nobody waits for any more.
        ending: No more will come in this round.
    """

    added: list[tuple[str, Any]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    ending: bool = False


class Lockstep:
    """One process's end of the exchange.

    Args:
        size: Processes that share an engine; consecutive ranks do. Every process of the world makes one of these, at
            the same place.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._group: Any = None
        if size > 1:
            self._group, _ = distributed.new_subgroups(group_size=size, backend="gloo")
        self._news = News()
        self.running = False

    @property
    def prefix(self) -> str:
        """Makes names of this process's requests different from those of the others."""
        return "" if self._group is None else f"{distributed.get_rank(self._group)}:"

    def begin(self) -> None:
        """Start a round; every process does, with or without requests."""
        self._news.ending = False
        self.running = self._group is not None

    def end(self) -> None:
        """Say that this process will have no more requests in this round."""
        self._news.ending = True

    def add(self, name: str, request: Any) -> None:
        """Tell all of a request with the next exchange."""
        self._news.added.append((name, request))

    def drop(self, name: str) -> None:
        """Tell all that a request is not wanted any more."""
        self._news.dropped.append(name)

    def exchange(self, *, idle: bool) -> News:
        """Tell the others the news and hear theirs; the same on all processes.

        Args:
            idle: The engine has nothing to do; so the round ends if all are ending and there are no news.
        """
        if self._group is None:
            news, self._news = self._news, News(ending=self._news.ending)
            return news
        parts: list[News] = [News()] * self._size
        distributed.all_gather_object(parts, self._news, group=self._group)
        self._news = News(ending=self._news.ending)
        together = News(
            added=[request for part in parts for request in part.added],
            dropped=[name for part in parts for name in part.dropped],
            ending=all(part.ending for part in parts),
        )
        if idle and together.ending and not together.added:
            self.running = False
        return together
