"""vLLM in the trainer's process: its engine is stepped by a thread, requests join and leave at any step.

vLLM's `AsyncLLM` runs its engine in a process of its own, to which weights would have to be sent. `LLMEngine` runs
here, so weights are loaded in place from the policy's tensors, and behind `ThreadedGenerator` it has no barrier either.

With `sleeps` the engine gives its memory up whenever the policy is about to be trained (level 2: weights and KV cache)
and takes it back, with the policy's weights, when turns are to be sampled. On the CPU sleeping does nothing.
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel, ProcessorMixin

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.lockstep import Lockstep
from agentrl.generation.threaded import Answer, ThreadedGenerator, explain
from agentrl.generation.vllm_images import engine_input
from agentrl.generation.vllm_protocol import check_sampling, finish_reason, read_spans, sampling_fields
from agentrl.generation.weights import PolicyWeights
from agentrl.types import ImageSpan, Sample

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""How long a process without work waits before it asks the others for theirs, where they share an engine."""


class VllmColocateGenerator(ThreadedGenerator):
    """Samples turns with a vLLM engine in this process; see `Generator` for the contract.

    Args:
        policy: The policy, not wrapped; also says which model vLLM builds.
        processor: That of a policy that sees images.
        sampling: How turns will be drawn, for checks.
        extras: Further sampling parameters of vLLM, see `agentrl.generation.vllm_protocol.EXTRAS`.
        regex: What each turn's text has to match.
        model_impl: "vllm" or "transformers".
        memory_share: Share of the GPU's memory that vLLM may take.
        max_context: Most tokens of a row; None for the model's own.
        tensor_parallel_size: Processes that share an engine.
        sleeps: Whether it gives its memory up while the policy is trained.
        trust_remote_code: Whether the model's own code may run.
        bf16: Whether to compute in bfloat16; else as the policy.

    Raises:
        ConfigurationError: vLLM is not there, or the trainer would not score what it samples.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        processor: ProcessorMixin | None = None,
        sampling: SamplingParams,
        extras: Mapping[str, Any] | None = None,
        regex: str | None = None,
        model_impl: str = "vllm",
        memory_share: float = 0.3,
        max_context: int | None = None,
        tensor_parallel_size: int = 1,
        sleeps: bool = False,
        trust_remote_code: bool = False,
        bf16: bool = False,
    ) -> None:
        check_sampling(sampling, extras or {})
        dtype = torch.bfloat16 if bf16 else policy.dtype
        options: dict[str, Any] = {
            "model_impl": model_impl,
            "gpu_memory_utilization": memory_share,
            "max_model_len": max_context,
            "tensor_parallel_size": tensor_parallel_size,
            "trust_remote_code": trust_remote_code,
            "dtype": str(dtype).removeprefix("torch."),
        }
        cuda = next(policy.parameters()).device.type == "cuda"
        if cuda:
            options["enable_sleep_mode"] = sleeps
        else:
            options["enforce_eager"] = True  # compiling takes minutes, and gains little on the CPU
            options["enable_chunked_prefill"] = False  # with seeds it ends the engine there (vLLM 0.32)
            if "linear_attention" in (getattr(policy.config.get_text_config(), "layer_types", None) or ()):
                options["enable_prefix_caching"] = False  # that of recurrent layers goes with chunked prefill alone
        if processor is not None:
            options["limit_mm_per_prompt"] = {"video": 0}
            options["mm_processor_cache_gb"] = 0  # nothing is left to process
            options["mm_device_do_normalize"] = False  # the trainer's processor has normalized the pixels
            options["skip_mm_profiling"] = not cuda
        folder = tempfile.TemporaryDirectory(prefix="agentrl-model-")
        needs_text = regex is not None or "bad_words" in (extras or {})
        engine = make_engine(policy, processor, Path(folder.name), options, needs_text=needs_text)
        stats = GenerationStats()
        core = _Core(engine, PolicyWeights(policy), Lockstep(tensor_parallel_size), dict(extras or {}), regex, stats)
        super().__init__(core, stats, engine.model_config.max_model_len)
        self._engine_core, self._sleeps = core, sleeps
        self._folder = folder  # vLLM may come back to its processor; the folder goes with the generator
        self._dtype = dtype
        self.follow(core)

    @property
    def exact(self) -> bool:
        """Whether it computes in float32, so that its logprobs are to be the trainer's."""
        return self._dtype == torch.float32

    async def probe(
        self, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> dict[str, Sample]:
        """Sample a turn for comparison with the trainer."""
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        return {f"vLLM in process {rank}": await self.sample("probe", ids, params, images)}

    def wake(self) -> None:
        """Turns are about to be sampled; see `Phased`. The thread starts, also where no turn will be asked for."""
        self._perform(lambda _: self._engine_core.wake(), start=True)

    def rest(self) -> None:
        """The policy may change from here on; see `Phased`."""
        self._perform(lambda _: self._engine_core.rest(sleeps=self._sleeps))


@dataclass(eq=False, slots=True)
class _Turn:
    name: str
    session: str
    params: SamplingParams
    done: Answer


class _Core:
    """Turns requests into samples by stepping an engine; see `agentrl.generation.threaded.Core`.

    Args:
        engine: vLLM's `LLMEngine`.
        weights: Of the policy.
        lockstep: The processes that share the engine.
        extras: As of the generator.
        regex: The same.
        stats: The counters to keep.
    """

    def __init__(
        self,
        engine: Any,
        weights: PolicyWeights,
        lockstep: Lockstep,
        extras: dict[str, Any],
        regex: str | None,
        stats: GenerationStats,
    ) -> None:
        self._engine, self._weights, self._lockstep, self._stats = engine, weights, lockstep, stats
        self._extras, self._regex = extras, regex
        self._turns: dict[str, _Turn] = {}
        self._count = 0
        self._version = 0
        self._asleep = False

    @property
    def busy(self) -> bool:
        return bool(self._turns) or self._lockstep.running

    def submit(
        self, name: str, ids: list[int], params: SamplingParams, done: Answer, images: tuple[ImageSpan, ...] = ()
    ) -> _Turn:
        self._awaken()
        self._count += 1
        turn = _Turn(f"{self._lockstep.prefix}{self._count}", name, params, done)
        self._lockstep.add(turn.name, (ids, params, images))
        self._turns[turn.name] = turn
        return turn

    def cancel(self, request: _Turn) -> None:
        if self._turns.pop(request.name, None) is not None:
            self._lockstep.drop(request.name)

    def release(self, name: str) -> None:
        """Nothing is kept for a session but its prefix in vLLM's cache, which vLLM looks after."""

    def update(self) -> None:
        """Take over the policy's weights."""
        if self._asleep:
            self._engine.wake_up(tags=["weights"])
        self._engine.collective_rpc(_load_in_worker, args=(self._weights,))
        if self._asleep:
            self._engine.wake_up(tags=["kv_cache"])
        self._asleep = False

    def renew(self, version: int) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._weights.sees_images:  # features of old weights
            self._engine.reset_encoder_cache()

    def wake(self) -> None:
        """Be ready to sample."""
        self._awaken()
        self._lockstep.begin()

    def rest(self, *, sleeps: bool) -> None:
        """Give memory up until `wake` or `update`."""
        self._lockstep.end()
        if sleeps and not self._asleep and not self._turns:
            self._engine.sleep(level=2)
            self._asleep = True

    def step(self) -> None:
        idle = not self._engine.has_unfinished_requests()
        news = self._lockstep.exchange(idle=idle)
        for name, (ids, params, images) in news.added:
            self._add(name, ids, params, images)
        if news.dropped:
            self._engine.abort_request(news.dropped)
        if not self._engine.has_unfinished_requests():
            time.sleep(IDLE_SECONDS)
            return
        outputs = self._engine.step()
        self._stats.forward_passes += 1
        for output in outputs:
            turn = self._turns.pop(output.request_id, None) if output.finished else None
            if turn is not None:
                turn.done(self._read(turn, output.outputs[0]))

    def fail(self, error: Exception) -> None:
        turns, self._turns = self._turns, {}
        if turns:
            self._engine.abort_request(list(turns))
        for turn in turns.values():
            turn.done(explain(turn.session, error))

    def _awaken(self) -> None:
        if self._asleep:  # level 2 has thrown the weights away
            self.update()
            self.renew(self._version)

    def _add(self, name: str, ids: list[int], params: SamplingParams, images: tuple[ImageSpan, ...]) -> None:
        try:
            prompt = engine_input(ids, images) if images else {"prompt_token_ids": ids}
            self._engine.add_request(name, prompt, self._params(params))
        except Exception as error:  # noqa: BLE001 - a turn that vLLM refuses must not end the others
            turn = self._turns.pop(name, None)
            if turn is not None:
                turn.done(explain(turn.session, error))

    def _params(self, params: SamplingParams) -> Any:
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.sampling_params import SamplingParams as Theirs

        fields = sampling_fields(params, self._extras)
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        if self._regex is not None:
            fields["structured_outputs"] = StructuredOutputsParams(regex=self._regex)
        return Theirs(**fields, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)

    def _read(self, turn: _Turn, output: Any) -> Sample | GenerationError:
        ids = list(output.token_ids)
        try:
            if not ids:
                raise GenerationError(f"vLLM ended a turn without a token, with finish_reason={output.finish_reason!r}")
            logprobs = [position[token].logprob for token, position in zip(ids, output.logprobs, strict=True)]
            finish = finish_reason(ids, turn.params, output.finish_reason)
        except GenerationError as error:
            return explain(turn.session, error)
        version, updates = read_spans(output.weight_versions, self._version)
        self._stats.decoded_tokens += len(ids)
        return Sample(ids, logprobs, finish, version, updates)


def _load_in_worker(worker: Any, weights: PolicyWeights) -> None:
    """Runs where vLLM's model is, which is here."""
    from vllm.config import set_current_vllm_config

    from agentrl.generation.vllm_worker import load_weights

    with set_current_vllm_config(worker.vllm_config):
        load_weights(worker.model_runner.model, worker.model_config, weights)


def make_engine(
    policy: PreTrainedModel,
    processor: ProcessorMixin | None,
    folder: Path,
    options: dict[str, Any],
    *,
    needs_text: bool,
) -> Any:
    """Make a vLLM engine for a policy's model, without weights.

    Args:
        policy: Says which model.
        processor: Of a model that sees images; vLLM asks it about sizes, and has it read none.
        folder: An empty one, for what vLLM reads.
        options: Fields of vLLM's `EngineArgs`.
        needs_text: Whether vLLM has to know the tokenizer, for a regular expression say.

    Raises:
        ConfigurationError: vLLM is not there, or does not know the tokenizer.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or it pins the trainer's threads too
    try:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise ConfigurationError(f"vllm_mode='colocate' needs vllm in this environment: {error}") from error
    model: Any = policy
    if hasattr(policy, "peft_config"):
        model = model.get_base_model()
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    name = getattr(model.config, "_name_or_path", "")
    if processor is not None:
        processor.save_pretrained(folder)
        name = str(folder)
    elif needs_text and not name:
        raise ConfigurationError(
            "vllm_structured_outputs_regex and bad_words are about text, so vLLM needs the tokenizer, and the model "
            "was not loaded from a name or a folder that would have one."
        )
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        options["distributed_executor_backend"] = "external_launcher"
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "12345")
    config.save_pretrained(folder)
    knows_text = needs_text or processor is not None
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            load_format="dummy",  # the policy's weights come with the first `update`
            skip_tokenizer_init=not knows_text,
            **({"tokenizer": name} if knows_text else {}),
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **options,
        )
    )
