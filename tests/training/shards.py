"""Trainers whose weights are sharded, in worlds of CPU processes, from the shipped accelerate configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch import Tensor

from agentrl.training.sharding import whole_parameters
from agentrl.training.trainer import RolloutTrainer
from tests.training.runs import make_trainer

CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate"


def launched_environment(name: str) -> dict[str, str]:
    """What `accelerate launch` adds to the environment of a script when it reads a configuration."""
    script = [f"--config_file={CONFIGS / name}.yaml", "train.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(script))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
    ours = ("ACCELERATE_", "FSDP_")
    return {key: value for key, value in environment.items() if key.startswith(ours) and key not in os.environ}


def prepare_process(kind: str) -> dict[str, Any]:
    """Make this process what `accelerate launch` would make it; gives the arguments that are needed besides.

    On the CPU accelerate takes neither FSDP nor a process group for DeepSpeed. Nothing in FSDP2 needs a GPU, so a test
    may set what `AcceleratorState` sets where there is one; everything after that is what runs there.
    """
    if kind == "ddp":
        return {}
    if kind == "zero3":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    else:
        os.environ |= launched_environment(kind)
    if kind == "fsdp2":
        _let_fsdp_run_on_the_cpu()
        return {}
    os.environ["DS_ACCELERATOR"] = "cpu"
    PartialState(backend="gloo")
    options = {"accelerator_config": {"use_configured_state": True}, "use_cpu": False}
    return {**options, "deepspeed": _IN_PIECES} if kind == "zero3" else options


_IN_PIECES = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    # Not from the shipped file: there small weights stay whole, which in a tiny model are all.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "zero_allow_untested_optimizer": True,
}


def _let_fsdp_run_on_the_cpu() -> None:
    init = AcceleratorState.__init__

    def as_on_a_gpu(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)

    AcceleratorState.__init__ = as_on_a_gpu  # type: ignore[method-assign]


def make_sharded(kind: str, algorithm: str, folder: Path, **options: Any) -> RolloutTrainer:
    """A trainer of the tiny Llama, sharded in some way; see `make_trainer`."""
    return make_trainer(algorithm, folder, **options, **prepare_process(kind))


def whole_weights(trainer: RolloutTrainer) -> dict[str, Tensor]:
    """A copy of the policy's weights; every process has to ask."""
    return {name: value.clone() for name, value in whole_parameters(trainer.model)}
