"""What tells whether rollouts that were played before are those that would be played now.

Given their tasks, rollouts are a function of weights and settings. Both are put into one digest, which the journal
keeps with each window; a single other weight makes it another one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def policy_digest(model: torch.nn.Module, settings: Any) -> str:
    """Digest this process's part of a model's weights, and settings.

    Args:
        model: The policy.
        settings: Whatever else decides what is sampled; its `repr` counts.
    """
    return settings_digest(settings) + weights_digest(model)


def settings_digest(settings: Any) -> str:
    """Digest settings by their `repr`."""
    return hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Digest this process's part of a model's weights."""
    parameters = list(model.named_parameters())
    names = repr([(name, p.shape, p.dtype) for name, p in parameters])
    digest = hashlib.blake2b(names.encode(), digest_size=16)
    sums = [bit_sum(parameter) for _, parameter in parameters]
    digest.update(repr([int(value) for value in torch.stack(sums).tolist()] if sums else "").encode())
    return digest.hexdigest()


@torch.no_grad()
def bit_sum(parameter: Tensor) -> Tensor:
    """Sum of a tensor's bits read as integers, int64 on the CPU: exact, and about as fast as reading the memory.

    Of a sharded tensor it is the sum of what this process holds.
    """
    held = getattr(parameter, "ds_tensor", parameter)  # under ZeRO-3 the parameter itself is empty
    local = held.to_local() if hasattr(held, "to_local") else held
    bits = local.detach().contiguous().view(_INTEGERS[local.element_size()])
    return bits.sum(dtype=torch.int64).cpu()
