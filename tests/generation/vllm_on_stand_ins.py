"""vLLM's own weight transfer backends on the CPU, with stand-ins for what they need a GPU for: NCCL and a GPU's memory.

Imported by the server's worker (`--worker-extension-cls tests.generation.vllm_on_stand_ins.Extension`) and by the
trainer's side, which is this module as a script, run by the Python of `.venv-vllm`. Real are the server, its routes,
vLLM's engines, their protocol, the way by which the processes meet, and our channels. Layers keep their weights as they
are, as on a GPU; on the CPU vLLM would pack them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm.distributed.device_communicators.pynccl as pynccl
import vllm.distributed.weight_transfer.packed_tensor as packed_tensor
import vllm.model_executor.layers.utils as layer_utils
from torch.distributed import PrefixStore
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

import agentrl.generation.vllm_worker  # noqa: F401 - registers gloo, with which the server starts
from agentrl.generation.gloo import broadcast, join

SMALL_BYTES = 50_000
"""Of a part and of a buffer, so that an update has several."""


class Communicator:
    """In the place of vLLM's NCCL communicator: the same calls, by gloo."""

    def __init__(self, group: Any, device: Any) -> None:
        self.device = torch.device("cpu")
        self._group: Any = join(PrefixStore("stand-in", group.store), group.rank, group.world_size, 60.0)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        broadcast(self._group, tensor)

    def destroy(self) -> None:
        self._group = None


def mapped(path: str, size: int, *_: Any) -> torch.Tensor:
    """Memory that processes share."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def stand_in() -> None:
    """Put what needs no GPU in the place of what does."""
    stream = SimpleNamespace(synchronize=lambda: None)
    for module, name, value in [
        (pynccl, "PyNcclCommunicator", Communicator),
        (packed_tensor, "_get_streams", lambda _, count: (stream,) * count),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "device_index", lambda _: nullcontext()),
        (torch.accelerator, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_, **__: stream),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-stand-in")),
        (torch.multiprocessing.reductions, "rebuild_cuda_tensor", mapped),
        (layer_utils, "dispatch_cpu_unquantized_gemm", keep_as_it_is),
    ]:
        setattr(module, name, value)


def keep_as_it_is(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class Extension:
    """Becomes a part of the worker's class."""

    def use_backend(self: Any, backend: str) -> None:
        """Change the backend, which is else for life."""
        self.weight_transfer_engine.shutdown()
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), self.vllm_config, self.device, self.model_runner.get_model()
        )


stand_in()


def stand_in_for_the_trainer(folder: Path) -> None:
    """The same on the trainer's side; a file in the folder is a GPU's memory."""
    from agentrl.generation import gpu_channels

    path = str(folder / "shared")

    def buffers(size: int) -> dict[str, torch.Tensor]:
        Path(path).write_bytes(bytes(size))
        return {"GPU-stand-in": mapped(path, size)}

    def exported(buffer: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        return mapped, (path, buffer.numel(), *[None] * 5)  # the seventh is the device's index

    for module, name, value in [
        (gpu_channels, "PART_BYTES", SMALL_BYTES),
        (packed_tensor, "DEFAULT_PACKED_BUFFER_SIZE_BYTES", SMALL_BYTES),
        (gpu_channels, "buffers", buffers),
        (gpu_channels, "reduce_tensor", exported),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "set_device", lambda _: None),
        (torch.cuda, "synchronize", lambda _: None),
    ]:
        setattr(module, name, value)


class Updates:
    """Brings a model to a server, and notes what that took and how far the server's logprobs are off afterwards."""

    def __init__(self, replica: Any, transfer: Any, model: Any) -> None:
        from agentrl.generation.base import SamplingParams
        from agentrl.generation.vllm_server import VllmServerGenerator

        self.found: dict[str, Any] = {"off": [], "parts": [], "sent": []}
        self.params = SamplingParams(max_tokens=16, temperature=0.7, top_k=40, repetition_penalty=1.2, seed=3)
        self.generator = VllmServerGenerator([(replica, transfer)], sampling=self.params)
        self.model, self._call, self._parts = model, replica.call, []
        replica.call = self._noting

    def _noting(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        if path == "/update_weights":
            self._parts.append(body["update_info"])
        return self._call(method, path, body, **options)

    def make(self, version: int) -> None:
        from agentrl.training.sampler_check import differences

        self._parts.clear()
        self.generator.sync(version)
        self.found["parts"].append(len(self._parts))
        self.found["sent"].append(sum(sum(info.get("num_updates_list", [])) for info in self._parts))
        sample = asyncio.run(self.generator.sample("s", [140, 150, 160], self.params))
        assert sample.weights_version == version
        self.found["off"].append(float(differences(self.model, [140, 150, 160], sample, self.params).max()))


@torch.no_grad()
def nudge(model: torch.nn.Module) -> None:
    """Change every weight, so little that logits stay as small as they are."""
    for parameter in model.parameters():
        parameter.add_(0.03 * torch.randn_like(parameter))


def play(url: str, backend: str, model: Any, args: Any) -> dict[str, Any]:
    """Updates of everything, of everything again, of two rows, one that breaks off, and of everything."""
    from agentrl.errors import GenerationError
    from agentrl.generation.vllm_http import Replica
    from agentrl.generation.weight_transfer import WeightTransfer
    from agentrl.generation.weights import PolicyWeights
    from agentrl.training.vllm import _channel
    from tests.generation.test_vllm_server import Broken

    replica = Replica(url)
    replica.learn()
    replica.backend = backend
    replica.call("POST", "/collective_rpc", {"method": "use_backend", "args": [backend]})
    transfer = WeightTransfer(replica, PolicyWeights(model), _channel(args, replica, 0), 60.0)
    updates = Updates(replica, transfer, model)
    for version in (1, 2):
        nudge(model)
        updates.make(version)
    with torch.no_grad():
        model.get_input_embeddings().weight[5:7] += 0.5
    updates.make(3)
    good, transfer._weights = transfer._weights, Broken(model, "stops")
    nudge(model)
    try:
        updates.generator.sync(4)
    except (GenerationError, RuntimeError) as error:
        updates.found["failed"] = str(error)
    transfer._weights = good
    updates.make(5)
    updates.generator.close()
    return updates.found


def main(url: str, folder: Path) -> None:
    """Update the server by every backend, and print what was found."""
    from peft import LoraConfig, get_peft_model

    from agentrl.testing.vllm import free_port
    from tests.generation.test_vllm_real import backend_policy
    from tests.training.runs import make_config

    stand_in_for_the_trainer(folder)
    args = make_config("grpo", folder, use_vllm=True, vllm_mode="server", vllm_group_port=free_port())
    torch.manual_seed(0)
    answer = {backend: play(url, backend, backend_policy(), args) for backend in ("nccl", "sparse_nccl", "ipc")}
    adapters = LoraConfig(r=2, target_modules=["q_proj", "up_proj"])  # merged in place, and put back
    answer["nccl of adapters"] = play(url, "nccl", get_peft_model(backend_policy(), adapters), args)
    print("ANSWER " + json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
