"""Which settings of vLLM make sense, checked when a configuration is made."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigurationError
from agentrl.rollout.limits import require_seconds
from agentrl.training.objective_checks import require

if TYPE_CHECKING:
    from agentrl.training.arguments import RolloutConfig

logger = logging.getLogger(__name__)

MODES = ("colocate", "server")
IMPLEMENTATIONS = ("vllm", "transformers")
OF_COLOCATE = (
    "vllm_model_impl",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
)
OF_SERVER = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_request_timeout",
    "vllm_group_port",
)
OTHER_MODE = {"colocate": OF_SERVER, "server": OF_COLOCATE}
"""Arguments that a run in this mode does not need; a script may keep them for the other one."""


def check_vllm(args: RolloutConfig) -> None:
    """Check the arguments of vLLM, also those of the mode that is not chosen.

    Raises:
        ConfigurationError: One is out of range, or they contradict each other.
    """
    require(args.vllm_mode in MODES, "vllm_mode", args.vllm_mode, f"one of {MODES}")
    implementation = args.vllm_model_impl
    require(implementation in IMPLEMENTATIONS, "vllm_model_impl", implementation, f"one of {IMPLEMENTATIONS}")
    for name in ("vllm_server_timeout", "vllm_request_timeout"):
        require(getattr(args, name) is not None, name, None, "a number of seconds")
        require_seconds(name, getattr(args, name))
    for name in ("vllm_server_port", "vllm_group_port"):
        require(0 < getattr(args, name) < 65536, name, getattr(args, name), "a port")
    share = args.vllm_gpu_memory_utilization
    require(0 < share <= 1, "vllm_gpu_memory_utilization", share, "a share, in (0, 1]")
    length = args.vllm_max_model_length
    require(length is None or length >= 1, "vllm_max_model_length", length, "None or at least 1")
    shards = args.vllm_tensor_parallel_size
    require(shards >= 1, "vllm_tensor_parallel_size", shards, "at least 1")
    if not args.use_vllm:
        return
    idle = [name for name in OTHER_MODE[args.vllm_mode] if getattr(args, name) != default_of(args, name)]
    if idle:
        logger.warning("with vllm_mode=%r nothing comes of %s", args.vllm_mode, ", ".join(idle))
    for name in ("use_transformers_continuous_batching", "cache_implementation"):
        if getattr(args, name):
            raise ConfigurationError(f"{name}={getattr(args, name)!r} is about another generator; drop it or use_vllm.")
    if args.vllm_mode == "server" and args.vllm_enable_sleep_mode:
        raise ConfigurationError(
            "vllm_enable_sleep_mode gives vLLM's memory to the optimizer step, which shares none with a server; leave "
            "it off with vllm_mode='server'."
        )
    if args.vllm_mode == "colocate" and args.world_size % shards:
        raise ConfigurationError(
            f"vllm_tensor_parallel_size={shards} does not divide the {args.world_size} processes of the run."
        )
    if args.vllm_structured_outputs_regex is not None and getattr(args, "vllm_importance_sampling_correction", False):
        raise ConfigurationError(
            "vllm_structured_outputs_regex makes vLLM sample from what matches, and the trainer scores all tokens, so "
            "their ratio is no error to be corrected; set vllm_importance_sampling_correction=False."
        )


def default_of(args: RolloutConfig, name: str) -> Any:
    """The default of an argument."""
    return next(field.default for field in dataclasses.fields(args) if field.name == name)
