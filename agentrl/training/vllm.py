"""From a configuration to a generator on vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from agentrl.errors import ConfigurationError
from agentrl.generation.base import Generator, SamplingParams
from agentrl.generation.gpu_channels import IpcChannel, NcclChannel, SparseNcclChannel
from agentrl.generation.processes import is_first
from agentrl.generation.vllm_http import Replica
from agentrl.generation.vllm_images import require_known
from agentrl.generation.vllm_server import Push, VllmServerGenerator
from agentrl.generation.weight_transfer import Channel, GlooChannel, WeightTransfer, address_towards
from agentrl.generation.weights import PolicyWeights
from agentrl.training.arguments import RolloutConfig

logger = logging.getLogger(__name__)


def vllm_generator(
    args: RolloutConfig,
    policy: PreTrainedModel,
    sampling: SamplingParams,
    extras: Mapping[str, Any],
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
) -> Generator:
    """Make the generator that `vllm_mode` asks for.

    Args:
        args: The configuration.
        policy: The policy, not wrapped.
        sampling: How turns will be drawn.
        extras: Further sampling parameters of vLLM.
        processing_class: What the policy reads with; rows may have images where it is a processor.
    """
    processor = processing_class if isinstance(processing_class, ProcessorMixin) else None
    if processor is not None:
        require_known(policy)
    if args.vllm_mode == "colocate":
        from agentrl.generation.vllm_colocate import VllmColocateGenerator

        return VllmColocateGenerator(
            policy,
            processor=processor,
            sampling=sampling,
            extras=extras,
            regex=args.vllm_structured_outputs_regex,
            model_impl=args.vllm_model_impl,
            memory_share=args.vllm_gpu_memory_utilization,
            max_context=args.vllm_max_model_length,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            sleeps=args.vllm_enable_sleep_mode,
            trust_remote_code=args.trust_remote_code,
            bf16=bool(args.bf16),
        )
    return VllmServerGenerator(
        [(replica, _push(args, policy, replica, number)) for number, replica in enumerate(_servers(args))],
        sampling=sampling,
        extras=extras,
        regex=args.vllm_structured_outputs_regex,
        sees_images=processor is not None,
        timeout=args.vllm_server_timeout,
        request_timeout=args.vllm_request_timeout,
    )


def _servers(args: RolloutConfig) -> list[Replica]:
    """The servers, once they are up and have said what they serve."""
    if args.vllm_server_base_url is not None:
        urls = [url.strip() for url in args.vllm_server_base_url.split(",")]
    else:
        host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
        urls = [f"http://{host}:{args.vllm_server_port}"]
    replicas = [Replica(url) for url in urls]
    for replica in replicas:
        replica.wait_until_up(args.vllm_server_timeout)
        replica.learn()
    return replicas


def _push(args: RolloutConfig, policy: PreTrainedModel, replica: Replica, number: int) -> Push | None:
    """What takes the policy to a server; the first process does it for all, and all refuse alike."""
    if hasattr(policy, "peft_config"):
        from agentrl.generation.adapter_transfer import AdapterTransfer, why_whole

        if (reason := why_whole(replica, policy)) is None:
            return AdapterTransfer(replica, policy, args.vllm_server_timeout) if is_first() else None
        logger.warning("%s: adapters are merged and whole weights are sent, because %s", replica.url, reason)
    channel = _channel(args, replica, number)
    return WeightTransfer(replica, PolicyWeights(policy), channel, args.vllm_server_timeout) if is_first() else None


def _channel(args: RolloutConfig, replica: Replica, number: int) -> Channel:
    """What speaks the weight transfer backend that a server was started with."""
    address, port = address_towards(replica.host, replica.port), args.vllm_group_port + number
    match replica.backend:
        case "gloo":
            return GlooChannel(address, port, args.vllm_server_timeout)
        case "nccl":
            return NcclChannel(address, port)
        case "sparse_nccl":
            return SparseNcclChannel(address, port)
        case "ipc":
            return IpcChannel()
    raise ConfigurationError(
        f"the vLLM server at {replica.url} has the weight transfer backend {replica.backend!r}, and the trainer knows "
        "'nccl', 'sparse_nccl', 'ipc' and 'gloo'; start it with --weight-transfer-config '{\"backend\": \"nccl\"}' "
        "(docs/vllm.md says which one is for what)."
    )
