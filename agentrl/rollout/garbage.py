"""Garbage collections that are rare, and pass over what was there before the rollouts.

Python looks for garbage cycles after every 700 container objects that were made and not freed, and now and then among
all of them. Two things about that are wrong for an event loop that plays thousands of conversations:

- Imported torch and transformers are half a million such objects, and looking through them takes 0.2 s in which no
  rollout moves. They never become garbage while a run goes on, so they are set aside, as the documentation of
  `gc.freeze` proposes for what outlives a fork.
- A tool round makes far more than 700 objects, nearly all of them freed as soon as nobody holds them. Looking for
  cycles among them every other turn was a fifth of the loop's time (`benchmarks/tool_overlap.py`, async tools).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 20_000
"""Container objects that are made, net of those freed, before the youngest are looked through."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely, and leave what exists now out of it, until the end.

    What was garbage already is collected first. A threshold that somebody has set higher, or to 0 for never, stays.
    """
    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()
