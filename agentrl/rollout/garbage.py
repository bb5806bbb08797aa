"""Full garbage collections that pass over what was there before the rollouts.

Python looks for garbage cycles among all container objects now and then. Imported torch and transformers are half a
million of them, and looking through them takes 0.2 s in which no rollout moves. They never become garbage while a run
goes on, so they are set aside, as the documentation of `gc.freeze` proposes for what outlives a fork.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def earlier_objects_set_aside() -> Iterator[None]:
    """Leave what exists now out of garbage collections until the end; what was garbage already is collected first."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
