"""Does the sampler sample from the policy? Asked after the first updates of a generator with weights of its own.

A weight transfer can answer "done" and leave old weights behind, and a server can run another model than the one that
is trained; rewards would only look noisy. So a short turn is sampled from every copy, scored by the trainer under the
same settings, and the logprobs compared:

    both in float32:  max_t |log pi_trainer(t) - log pi_sampler(t)| <= 1e-4
    otherwise:        the mean over the turn <= 0.2, since rounding to bfloat16 alone makes hundredths of it
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from agentrl.errors import GenerationError
from agentrl.generation.base import Generator, Probed, SamplingParams
from agentrl.generation.sampling import first_occurrence, process_logits, seen_before, settings
from agentrl.rollout.engine import RolloutEngine
from agentrl.training.arguments import RolloutConfig
from agentrl.training.baselines import evaluating
from agentrl.training.generators import unscored
from agentrl.types import Sample

logger = logging.getLogger(__name__)

UPDATES_CHECKED = 3
EXACT = 1e-4
ROUGH = 0.2
TEXT = "Sampler and trainer are to agree on this: 1, 2, 3, 5, 8, 13."
TOKENS = 16


class SamplerCheck:
    """Compares the logprobs of samplers and trainer after the first updates.

    Generators without weights of their own are not asked, nor are those that draw otherwise than the trainer scores.

    Args:
        trainer: Gives the mixed-precision context.
        args: The configuration.
        model: The policy.
        generator: What samples.
        tokenizer: Makes the probe.
        sampling: How turns are drawn.
        engine: Its loop asks the generator.
    """

    def __init__(
        self,
        trainer: Trainer,
        args: RolloutConfig,
        model: PreTrainedModel,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        engine: RolloutEngine,
    ) -> None:
        self._trainer, self._args, self._model = trainer, args, model
        self._generator, self._engine = generator, engine
        self._tokenizer, self._sampling = tokenizer, sampling
        comparable = not unscored(args) and not args.vllm_structured_outputs_regex
        self._left = UPDATES_CHECKED if comparable and isinstance(generator, Probed) else 0

    def after_update(self) -> None:
        """Refuse to go on if the generator's own weights are not the policy's; every process calls this.

        Raises:
            GenerationError: They are not.
        """
        if not self._left:
            return
        self._left -= 1
        generator = self._generator
        assert isinstance(generator, Probed)
        ids = probe_ids(self._tokenizer, generator.max_context)
        params = probe_params(self._sampling, ids, generator.max_context)
        samples = self._engine.await_(generator.probe(ids, params))
        with self._trainer.compute_loss_context_manager(), evaluating(self._model):
            found = {name: differences(self._model, ids, sample, params) for name, sample in samples.items()}
        single = not (self._args.bf16 or self._args.fp16) and self._model.dtype == torch.float32
        judge(found, exact=generator.exact and single)


def probe_ids(tokenizer: Any, max_context: int | None) -> list[int]:
    """Return a short prompt, at most half of the context."""
    ids: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return ids if max_context is None else ids[: max(1, max_context // 2)]


def probe_params(sampling: SamplingParams, prompt: Sequence[int], max_context: int | None) -> SamplingParams:
    """Return how to draw the probe: as rollouts are, but short."""
    room = TOKENS if max_context is None else min(TOKENS, max_context - len(prompt))
    return dataclasses.replace(sampling, max_tokens=room, stop_ids=frozenset(), seed=0)


@torch.no_grad()
def differences(model: torch.nn.Module, ids: Sequence[int], sample: Sample, params: SamplingParams) -> Tensor:
    """Return |log pi_trainer - log pi_sampler| of each token of a sample, (T,).

    Args:
        model: The policy, in evaluation mode.
        ids: The prompt.
        sample: What was drawn after it.
        params: How.
    """
    row = torch.tensor([*ids, *sample.ids], device=next(model.parameters()).device)
    logits_TV = model(input_ids=row[None]).logits[0, len(ids) - 1 : -1].float()
    position_T = torch.arange(len(ids), len(row), device=row.device)
    seen_TV = seen_before(first_occurrence(row, logits_TV.shape[-1]), position_T)
    drawn_T = row[len(ids) :]
    logps_TV = process_logits(logits_TV, seen_NV=seen_TV, keep_N=drawn_T, **settings(params))
    logps_T = logps_TV.gather(-1, drawn_T[:, None])[:, 0].cpu()
    return (logps_T - torch.tensor(sample.logprobs)).abs()


def judge(found: dict[str, Tensor], *, exact: bool) -> None:
    """Refuse to go on with samplers that do not sample from the policy.

    Every process calls this, at the same place.

    Args:
        found: Differences of each copy that this process has asked.
        exact: Whether both sides compute in float32.

    Raises:
        GenerationError: They are too large somewhere, in any process.
    """
    size, bound, what = (Tensor.max, EXACT, "at most") if exact else (Tensor.mean, ROUGH, "on average")
    mine = {name: float(size(values)) for name, values in found.items()}
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        mine = {name: value for part in gather_object([mine]) for name, value in part.items()}
    logger.info("the logprobs of samplers and trainer differ by %s: %s", what, mine)
    wrong = {name: value for name, value in mine.items() if not value <= bound}
    if wrong:
        name, value = max(wrong.items(), key=lambda item: item[1])
        raise GenerationError(
            f"{name} does not sample from the policy: its logprobs differ from the trainer's by {value:.2g} {what}, "
            f"and {bound:g} is allowed ({'both are in float32' if exact else 'not both are in float32'}). It may serve "
            "another model, compute in another precision (--dtype float32) or have kept old weights."
        )
