"""A gloo group beside the world's own, for weights on their way to vLLM's workers; used on both sides."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store


def join(store: Store, rank: int, world_size: int, timeout: float) -> ProcessGroupGloo:
    """Form a group of the trainer, which is rank 0, and workers. Blocks until all have come.

    Args:
        store: Where they find each other.
        rank: Of this process.
        world_size: Of the group.
        timeout: Seconds that the meeting, and later each broadcast, may take.
    """
    return ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Send a contiguous tensor from rank 0, or receive it in place; as bytes, for gloo does not know every dtype."""
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()
