"""Channels to vLLM's own weight transfer backends, all of which are for GPUs: `nccl`, `sparse_nccl` and `ipc`.

What they say is vLLM's protocol, read by vLLM's own classes (0.32). NOT RUN ON A GPU: there was none. Tests run them
against a real server on the CPU, with stand-ins for NCCL and for a GPU's memory.
"""

from __future__ import annotations

import base64
import functools
import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.weight_transfer import Part, listed
from agentrl.generation.weights import PolicyWeights

PART_BYTES = 256 * 2**20
"""Size of a part of an update, unless one tensor alone is larger."""
MOST_INDICES = 2**31 - 1
"""`sparse_nccl` tells places as int32."""


class NcclChannel:
    """Broadcasts by NCCL, through vLLM's own communicator, from the current GPU; needs vllm in the trainer too.

    Args:
        address: Where the server's workers reach this process.
        port: Where they meet.

    Raises:
        ConfigurationError: There is no GPU here, or no vllm.
    """

    backend = "nccl"

    def __init__(self, address: str, port: int) -> None:
        require_gpu(self.backend)
        try:
            from vllm.distributed.weight_transfer import nccl_common, packed_tensor
        except ImportError as error:
            raise ConfigurationError(
                f"weights go to the vLLM server by {self.backend}, which needs vllm in the trainer's environment too; "
                f"for a server on this machine the backend 'ipc' does not: {error}"
            ) from error
        self._nccl, self._packing = nccl_common, packed_tensor
        self._meeting = {"master_address": address, "master_port": port}
        self._device = torch.cuda.current_device()
        self._group: Any = None

    def invitation(self, world_size: int) -> dict[str, Any]:
        """See `Channel`."""
        return {
            **self._meeting,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self._packing.DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            "packed_num_buffers": self._packing.DEFAULT_PACKED_NUM_BUFFERS,
        }

    def open(self, world_size: int) -> None:
        """See `Channel`."""
        torch.cuda.set_device(self._device)  # it is each thread's own
        self._group = self._nccl.trainer_init({**self._meeting, "world_size": world_size})

    def parts(self, weights: PolicyWeights) -> Iterator[Part]:
        """See `Channel`."""
        yield Part(listed(weights.described()), functools.partial(self._send, weights))

    def _send(self, weights: PolicyWeights) -> None:
        torch.cuda.set_device(self._device)
        self._packing.packed_nccl_broadcast_producer(
            iterator=iter(weights),
            group=self._group,
            src=0,
            # Many wait to be packed at once, and what adapters were merged into is put back meanwhile: copies.
            post_iter_func=lambda item: item[1].to(self._device, copy=True),
            buffer_size_bytes=self._packing.DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            num_buffers=self._packing.DEFAULT_PACKED_NUM_BUFFERS,
        )
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """See `Channel`."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                group.destroy()


class Patch(NamedTuple):
    """What changed of a tensor of `shape`: at `indices_N` of it laid flat are `values_N` now."""

    name: str
    shape: torch.Size
    indices_N: Tensor
    values_N: Tensor


class SparseNcclChannel(NcclChannel):
    """Broadcasts by NCCL what has changed since the last update; the first one, or one after an error, has everything.

    A changed weight costs its size and 4 bytes for its place, so it pays where few change: small steps in bfloat16. A
    copy of the weights, to compare with, is kept in the memory of this machine.
    """

    backend = "sparse_nccl"

    def __init__(self, address: str, port: int) -> None:
        super().__init__(address, port)
        self._sent: dict[str, Tensor] = {}

    def invitation(self, world_size: int) -> dict[str, Any]:
        """See `Channel`."""
        return {**self._meeting, "rank_offset": 1, "world_size": world_size}

    def open(self, world_size: int) -> None:
        """See `Channel`."""
        self._sent = {}
        super().open(world_size)

    def parts(self, weights: PolicyWeights) -> Iterator[Part]:
        """See `Channel`."""
        patches: list[Patch] = []
        size = 0
        for name, value in weights:
            patch = self._changes(name, value)
            if len(patch.indices_N):
                patches.append(patch)
                size += patch.indices_N.nbytes + patch.values_N.nbytes
            if size >= PART_BYTES:
                yield self._part(patches)
                patches, size = [], 0
        if patches:
            yield self._part(patches)

    def _changes(self, name: str, value: Tensor) -> Patch:
        if value.numel() > MOST_INDICES:
            raise GenerationError(
                f"{name} has {value.numel()} elements, and vLLM's backend 'sparse_nccl' takes {MOST_INDICES}; start "
                "the server with the backend 'nccl'."
            )
        value_N = value.to(self._device).reshape(-1)
        before_N = self._sent.get(name)
        changed_N = torch.ones_like(value_N, dtype=torch.bool) if before_N is None else value_N != before_N.to(value_N)
        indices_N = changed_N.nonzero()[:, 0]
        self._sent[name] = value_N.to("cpu", copy=True)
        return Patch(name, value.shape, indices_N.to(torch.int32), value_N[indices_N])

    def _part(self, patches: list[Patch]) -> Part:
        described = listed([(patch.name, patch.values_N.dtype, patch.shape) for patch in patches])
        info = {**described, "num_updates_list": [len(patch.indices_N) for patch in patches]}
        return Part(info, functools.partial(self._send_patches, patches))

    def _send_patches(self, patches: list[Patch]) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.current_stream()
        for patch in patches:
            self._group.broadcast(patch.indices_N, src=0, stream=stream)
            self._group.broadcast(patch.values_N, src=0, stream=stream)
        stream.synchronize()


class IpcChannel:
    """Lets the workers of a server on this machine open memory of the GPUs; needs no vllm here.

    A worker reads from the GPU that it computes on, which may be one that the trainer uses. So every GPU that this
    process sees (CUDA_VISIBLE_DEVICES) has a buffer, as large as a part. They are kept from update to update, for torch
    never frees memory that was offered and that nobody has opened.

    Raises:
        ConfigurationError: There is no GPU here.
    """

    backend = "ipc"

    def __init__(self) -> None:
        require_gpu(self.backend)
        self._buffers: dict[str, Tensor] = {}

    def invitation(self, world_size: int) -> dict[str, Any]:
        """See `Channel`."""
        return {"packed": True}

    def open(self, world_size: int) -> None:
        """See `Channel`; there is nobody to meet."""

    def parts(self, weights: PolicyWeights) -> Iterator[Part]:
        """See `Channel`; a part is of one dtype, so that each tensor is aligned."""
        if not self._buffers:
            largest = max(dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in weights.described())
            self._buffers = buffers(max(PART_BYTES, largest))
        room = next(iter(self._buffers.values())).numel()
        handles = {gpu: reduce_tensor(buffer)[1] for gpu, buffer in self._buffers.items()}  # of this update alone
        shared = base64.b64encode(pickle.dumps(handles)).decode()
        inside: list[tuple[str, torch.dtype, torch.Size]] = []
        sizes: list[int] = []
        end = 0
        for name, value in weights:
            if inside and (value.dtype != inside[0][1] or end + value.nbytes > room):
                yield self._part(inside, sizes, shared)
                inside, sizes, end = [], [], 0
            start, end = end, end + value.nbytes
            for buffer in self._buffers.values():
                buffer[start:end].copy_(value.reshape(-1).view(torch.uint8))
            inside.append((name, value.dtype, value.shape))
            sizes.append(value.nbytes)
        if inside:
            yield self._part(inside, sizes, shared)

    def _part(self, inside: list[tuple[str, torch.dtype, torch.Size]], sizes: list[int], shared: str) -> Part:
        for buffer in self._buffers.values():
            torch.cuda.synchronize(buffer.device)
        return Part({**listed(inside), "tensor_sizes": sizes, "ipc_handles_pickled": shared})

    def close(self) -> None:
        """See `Channel`."""
        self._buffers = {}


def buffers(size: int) -> dict[str, Tensor]:
    """Make a buffer of so many bytes on every GPU; the keys are the names by which vLLM tells GPUs."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        str(torch.cuda.get_device_properties(gpu).uuid): torch.empty(size, dtype=torch.uint8, device=gpu)
        for gpu in gpus
    }


def require_gpu(backend: str) -> None:
    """Refuse a backend for GPUs where there is none.

    Raises:
        ConfigurationError: There is none.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"the vLLM server's weight transfer backend {backend!r} is for GPUs, and the trainer has none; "
            'start the server with --weight-transfer-config \'{"backend": "gloo"}\' (docs/vllm.md).'
        )
