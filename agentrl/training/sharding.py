"""Weights that lie in pieces on several processes (FSDP2, DeepSpeed ZeRO-3): read whole, written, copied.

The functions that read or write weights are collectives where weights are sharded: every process has to call them, in
the same order. Where weights are not sharded they do what they say without any communication.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, Trainer

from agentrl.errors import ConfigurationError


def is_sharded(trainer: Trainer) -> bool:
    """Whether a trainer's policy lies in pieces, at the latest once training has begun."""
    return trainer.is_fsdp_enabled or _zero_stage(trainer) == 3


def check_distribution(trainer: Trainer) -> None:
    """Refuse what a run on several processes cannot do.

    Raises:
        ConfigurationError: Says what, and what to change.
    """
    accelerator, args = trainer.accelerator, trainer.args
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise ConfigurationError(
            "tensor, context and sequence parallelism (parallelism_config) are not part of this version: rows are "
            "scored by their positions, and no process would have all of them. Use FSDP2 or ZeRO."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version != 2:
        raise ConfigurationError(
            "FSDP of version 1 flattens weights, which generation could not read one by one; set fsdp_version: 2 in "
            "the accelerate config (fsdp_config in the arguments). It takes the same settings."
        )
    sharded = is_sharded(trainer)
    if sharded and getattr(trainer.model, "is_quantized", False):
        raise ConfigurationError(
            "a quantized model cannot be sharded: its weights are read whole for generation, and their packed form "
            "has no such reading. Use DDP or ZeRO-1/2, or leave quantization_config out."
        )
    head = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings()
    if _zero_stage(trainer) == 3 and head is not None and any(head.children()):
        raise ConfigurationError(
            "adapters on the LM head cannot be trained under ZeRO-3: it fetches each part of the head at each use, and "
            "processes use it different numbers of times. Leave it out of target_modules and modules_to_save, or use "
            "FSDP2 or ZeRO-2."
        )
    one_precision = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if getattr(args, "cast_lm_head_to_fp32", False) and one_precision and accelerator.mixed_precision != "no":
        raise ConfigurationError(
            f"cast_lm_head_to_fp32: with mixed precision ({accelerator.mixed_precision}) FSDP2 and DeepSpeed cast the "
            "weights of all layers, that of the head too; set bf16=False and fp16=False, or train with DDP."
        )


def check_engine(trainer: Trainer) -> None:
    """Refuse to train with a DeepSpeed engine that was made to evaluate: transformers would take it, without optimizer.

    Raises:
        ConfigurationError: `evaluate` was called before `train`.
    """
    if trainer.deepspeed is not None and trainer.accelerator.deepspeed_engine_wrapped is None:
        raise ConfigurationError(
            "with DeepSpeed, evaluate() before train() leaves an engine that has no optimizer; evaluate after training "
            "or between steps (eval_strategy, eval_on_start), or in a process of its own."
        )


def prepare_evaluation(trainer: Trainer) -> None:
    """Shard a policy that is evaluated before it is trained.

    transformers would give accelerate the model alone; FSDP2 takes it together with its optimizer only.
    """
    if trainer.is_fsdp_enabled and not isinstance(trainer.model, FSDPModule):
        trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Give a model's parameters one by one in the order of `named_parameters`, each in one piece.

    Only one of them takes memory at a time: a tensor is valid until the next one is asked for.

    Args:
        model: Wrapped or not, between its forward passes.
    """
    for name, parameter in resting_parameters(model).items():
        with _gathered(parameter):
            yield name, _whole(parameter)


def resting_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters as they lie between passes; other objects after each wrapping.

    FSDP2 leaves some weights whole after a pass that no backward follows; they are put back into pieces.
    """
    core: nn.Module = extract_model_from_parallel(model)
    for module in core.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(core.named_parameters())


def whole_value(parameter: nn.Parameter) -> Tensor:
    """A copy of a parameter in one piece."""
    with _gathered(parameter):
        return _whole(parameter).clone()


def assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a new value.

    Args:
        parameter: As it lies.
        value: Whole, the same on every process.
    """
    with torch.no_grad(), _gathered(parameter, written=True):
        value = value.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)


def shard_reference(trainer: Trainer, reference: nn.Module) -> nn.Module:
    """Lay out a frozen model as the trainer's policy will be: in pieces or whole, in the same precision.

    Args:
        trainer: Knows how its policy is distributed.
        reference: Whole; it may be changed in place.
    """
    if trainer.is_fsdp_enabled:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        return fsdp2_prepare_model(trainer.accelerator, reference)
    if trainer.is_deepspeed_enabled:  # which keeps all of the policy in one precision
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
        reference = reference if precision is None else reference.to(precision)
    if _zero_stage(trainer) == 3:
        import deepspeed

        return deepspeed.initialize(model=reference, config=_frozen_config(trainer))[0].module
    return reference.to(trainer.args.device)


class WholeCopy:
    """A plain copy of a policy that may lie in pieces. It has weights between `gather` and `free` only.

    Each process samples from a copy of its own, at its own pace: a forward pass of sharded weights is a collective, and
    one process plays more turns than another. While rollouts are played a process holds its share of the training state
    and the whole policy; while it trains, only its share. Where a server samples, one process alone needs a copy, in
    its machine's memory: the server gets the weights from there, also when it comes back in the midst of rollouts.

    Args:
        policy: Not yet wrapped, or loaded in pieces by DeepSpeed.
        device: Where the copy lies.
        keeps: Whether this process keeps what is gathered, or only takes part in gathering it.

    Attributes:
        model: The copy.
    """

    def __init__(self, policy: PreTrainedModel, device: torch.device | str, *, keeps: bool = True) -> None:
        self._device, self._keeps = torch.device(device), keeps
        empty = {id(p): nn.Parameter(_nothing(p.dtype, self._device), requires_grad=False) for p in policy.parameters()}
        self.model = copy.deepcopy(policy, empty).eval()
        nn.Module.to(self.model, self._device)

    def gather(self, policy: nn.Module) -> None:
        """Take over the policy's weights as they are now."""
        for mine, (_, value) in zip(self.model.parameters(), whole_parameters(policy), strict=True):
            if self._keeps and mine.shape == value.shape:
                mine.data.copy_(value)
            elif self._keeps:
                mine.data = value.to(self._device, copy=True)

    def free(self) -> None:
        """Give the memory back."""
        for parameter in self.model.parameters():
            parameter.data = _nothing(parameter.dtype, self._device)


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _whole(parameter: nn.Parameter) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.data


def _gathered(parameter: nn.Parameter, *, written: bool = False) -> AbstractContextManager[Any]:
    """Where a parameter of ZeRO-3 is whole; process 0's changes become those of all if it is to be written."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if written else None)


def _zero_stage(trainer: Trainer) -> int:
    return trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0


def _frozen_config(trainer: Trainer) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is not trained, sharded like the one that is."""
    given = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    kept = {name: value for name, value in given.items() if value != "auto" and name != "offload_optimizer"}
    precision = trainer.accelerator.mixed_precision
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {**kept, "stage": 3}}
    return config if precision == "no" else {**config, precision: {"enabled": True}}
