"""What runs inside vLLM's workers; nothing of the trainer is imported here.

    vllm serve MODEL --worker-extension-cls agentrl.generation.vllm_worker.Extension \
        --weight-transfer-config '{"backend": "gloo"}'

registers a weight transfer engine for machines without a GPU, where none of vLLM's own runs. It speaks vLLM's native
protocol, so only the transport differs from `nccl`. Weights are received whole before the model is touched: a transfer
that breaks off leaves the old ones in place.

On the CPU vLLM keeps linear layers in a packed form. Its layerwise reload packs them anew, but not the head of a model
whose embeddings are tied, which would answer with old weights for ever (vLLM 0.32, a warning is all it says);
`load_weights` sees to that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.generation.gloo import broadcast, join


def load_weights(model: Any, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights of a checkpoint's format into a running vLLM model.

    Args:
        model: vLLM's model.
        model_config: Its configuration.
        weights: Names and tensors.
    """
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
    finally:  # also after an error: layers that got nothing take their old weights back
        finalize_layerwise_reload(model, model_config)
    head: Any = getattr(model, "lm_head", None)
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    if tied and isinstance(getattr(head, "weight", None), torch.Tensor) and head.weight.device.type == "cpu":
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the trainer waits.

    Attributes:
        master_address: Of its store.
        master_port: Of its store.
        meeting: Names this meeting; each one of a store has another name.
        rank_offset: Rank of the first worker.
        world_size: Trainer and workers together.
        timeout: Seconds that the meeting and each tensor may take.
    """

    master_address: str
    master_port: int
    meeting: str
    rank_offset: int
    world_size: int
    timeout: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """What the trainer is about to send, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    """Receives weights by gloo broadcasts; see `vllm.distributed.weight_transfer.base` for the contract."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    _group: ProcessGroupGloo | None = None
    _received: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Meet the trainer; an earlier trainer is forgotten."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit = timedelta(seconds=init_info.timeout)
        store = TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=limit)
        self._group = join(
            PrefixStore(init_info.meeting, store),
            init_info.rank_offset + worker,
            init_info.world_size,
            init_info.timeout,
        )

    def start_weight_update(self) -> None:
        """Make ready to receive."""
        self._received = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a part of the weights; there is no accelerator to wait for, as the base class does."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Receive a part of the weights and keep it for `finish_weight_update`."""
        if self._group is None:
            raise RuntimeError("no trainer is connected: call init_weight_transfer_engine first")
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self._group, tensor)
            self._received.append((name, tensor))

    def finish_weight_update(self) -> None:
        """Load what was received; nothing received changes nothing."""
        received, self._received = self._received, []
        if received:
            load_weights(self.model, self.model_config, received)

    def shutdown(self) -> None:
        """Forget the trainer."""
        self._group = None


class Extension:
    """Nothing: naming it makes vLLM import this module, which registers the engine."""


WeightTransferEngineFactory.register_engine("gloo", __name__, GlooEngine.__name__)
