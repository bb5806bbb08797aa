"""Trainers whose weights are sharded, in worlds of CPU processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor

from agentrl.training.sharding import whole_parameters
from agentrl.training.trainer import RolloutTrainer
from tests.training.runs import make_trainer

SHARDED = ["fsdp2", "zero1", "zero2", "zero3"]


def prepare_process(kind: str) -> dict[str, Any]:
    """Make this process ready for a kind of sharding; gives the arguments that ask for it.

    accelerate ignores its FSDP plugin on the CPU. Nothing in it needs a GPU, so a test may set what `AcceleratorState`
    sets on one; everything after that is what runs there.
    """
    if kind == "ddp":
        return {}
    if kind == "fsdp2":
        _enable_fsdp_on_cpu()
        return {"fsdp": "full_shard", "fsdp_config": fsdp_config()}
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
    PartialState(backend="gloo")  # which accelerate does not choose by itself for DeepSpeed
    configured = {"accelerator_config": {"use_configured_state": True}, "use_cpu": False}
    return {"deepspeed": deepspeed_config(int(kind[-1])), **configured}


def fsdp_config() -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_ram_efficient_loading": False,
    }


def deepspeed_config(stage: int) -> dict[str, Any]:
    auto = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Small enough for tiny weights to be in pieces at all.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {**dict.fromkeys(auto, "auto"), "zero_optimization": zero, "zero_allow_untested_optimizer": True}


def _enable_fsdp_on_cpu() -> None:
    init = AcceleratorState.__init__

    def as_on_a_gpu(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = as_on_a_gpu  # type: ignore[method-assign]


def whole_weights(trainer: RolloutTrainer) -> dict[str, Tensor]:
    """A copy of the policy's weights; every process has to ask."""
    return {name: value.clone() for name, value in whole_parameters(trainer.model)}


def make_sharded(kind: str, algorithm: str, folder: Path, **options: Any) -> RolloutTrainer:
    torch.use_deterministic_algorithms(False)
    return make_trainer(algorithm, folder, **options, **prepare_process(kind))
