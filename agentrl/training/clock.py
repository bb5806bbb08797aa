"""Where the time of an optimizer step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("rollouts", "rewards", "sync")
"""What is measured by itself: playing or waiting for it, scoring, handing the weights to the generator."""


class StepClock:
    """Measures one optimizer step after the other; parts never lie within one another."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside is one of `PARTS`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] += time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`step_time`, in seconds, and the parts of it, of which `training` is the rest."""
        whole = time.perf_counter() - self._began
        parts = self._spent | {"training": whole - sum(self._spent.values())}
        return {"step_time": whole, **{f"step_time/{name}": seconds for name, seconds in parts.items()}}
