"""What the channels for GPUs say and send, read as vLLM reads it; `test_vllm_real.py` has vLLM itself."""

from __future__ import annotations

import base64
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation import gpu_channels
from agentrl.generation.gpu_channels import IpcChannel, NcclChannel, SparseNcclChannel
from agentrl.generation.weights import PolicyWeights
from agentrl.testing.models import tiny_model


@pytest.fixture
def gpu(monkeypatch):
    """As if there were one."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


@pytest.fixture
def broadcasts(monkeypatch, gpu):
    """vLLM's communicator, which notes what it is given."""
    sent = []
    group = SimpleNamespace(broadcast=lambda tensor, src, stream: sent.append(tensor), destroy=lambda: None)
    package = ModuleType("vllm.distributed.weight_transfer")
    package.nccl_common = SimpleNamespace(trainer_init=lambda info: group)
    package.packed_tensor = SimpleNamespace()
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return sent


@pytest.mark.parametrize("make", [lambda: NcclChannel("a", 1), lambda: SparseNcclChannel("a", 1), IpcChannel])
def test_backends_for_gpus_are_refused_where_there_is_none(make, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=r"is for GPUs, and the trainer has none.*gloo"):
        make()


def test_nccl_needs_vllm_beside_the_trainer(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigurationError, match=r"needs vllm in the trainer's environment too.*'ipc' does not"):
        NcclChannel("a", 1)


def mixed_policy():
    """Of an odd number of bfloat16 between float32, so that one buffer for both would be misaligned."""
    policy = tiny_model("qwen3")
    policy.model.norm.register_parameter("odd", torch.nn.Parameter(torch.randn(7).bfloat16()))
    return policy


def test_ipc_shares_every_weight_in_buffers_that_are_filled_again_and_again(gpu, monkeypatch):
    """The worker has read a part when the next one is made."""
    policy = mixed_policy()
    monkeypatch.setattr(gpu_channels, "PART_BYTES", 10_000)
    made = {}

    def buffers(size):
        made.update({gpu: torch.empty(size, dtype=torch.uint8) for gpu in ("GPU-1", "GPU-2")})
        return dict(made)

    monkeypatch.setattr(gpu_channels, "buffers", buffers)
    monkeypatch.setattr(gpu_channels, "reduce_tensor", lambda buffer: (None, ("handle", buffer.numel())))
    channel = IpcChannel()
    assert channel.invitation(3) == {"packed": True}
    received, parts = {}, 0
    for part in channel.parts(PolicyWeights(policy)):
        parts, info = parts + 1, part.info
        assert part.send is None
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        assert handles == {gpu: ("handle", buffer.numel()) for gpu, buffer in made.items()}
        for buffer in made.values():
            pieces = buffer[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
            for name, dtype, shape, piece in zip(
                info["names"], info["dtype_names"], info["shapes"], pieces, strict=True
            ):
                value = piece.view(getattr(torch, dtype)).view(shape).clone()
                assert torch.equal(received.setdefault(name, value), value)
    assert parts > 3
    expected = dict(PolicyWeights(policy))
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], value) for name, value in expected.items())


def test_sparse_nccl_sends_what_has_changed_and_everything_after_a_new_meeting(broadcasts, monkeypatch):
    policy = mixed_policy()
    monkeypatch.setattr(gpu_channels, "PART_BYTES", 10_000)
    channel = SparseNcclChannel("a", 1)
    assert channel.invitation(3) == {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 3}
    held = {name: torch.full_like(value, torch.inf) for name, value in PolicyWeights(policy)}
    everything = sum(value.numel() for value in held.values())

    def update():
        """Apply an update as the worker does; gives the number of weights sent."""
        count = 0
        for part in channel.parts(PolicyWeights(policy)):
            broadcasts.clear()
            part.send()
            info, tensors = part.info, iter(broadcasts)
            for name, dtype, shape, number in zip(
                info["names"], info["dtype_names"], info["shapes"], info["num_updates_list"], strict=True
            ):
                indices, values = next(tensors), next(tensors)
                assert indices.dtype == torch.int32
                assert values.dtype == getattr(torch, dtype)
                assert len(indices) == len(values) == number
                assert tuple(shape) == held[name].shape
                held[name].view(-1)[indices.long()] = values
                count += number
        assert all(torch.equal(held[name], value) for name, value in PolicyWeights(policy))
        return count

    channel.open(3)
    assert update() == everything
    assert update() == 0
    with torch.no_grad():
        policy.model.norm.odd[2:4] += 1
        policy.model.embed_tokens.weight[5] += 1
    assert update() == 2 + policy.config.hidden_size
    channel.close()
    channel.open(3)
    assert update() == everything
    monkeypatch.setattr(gpu_channels, "MOST_INDICES", 100)
    with pytest.raises(GenerationError, match=r"embed_tokens.weight has .* start the server with the backend 'nccl'"):
        update()
