"""Does the sampler sample from the policy? Asked after the first updates of a generator with weights of its own.

A weight transfer can answer "done" and leave old weights behind, and a server can run another model than the one that
is trained; rewards would only look noisy. So a short turn is sampled from every copy, scored by the trainer under the
same settings, and the logprobs compared:

    both in float32:  max_t |log pi_trainer(t) - log pi_sampler(t)| <= 1e-4
    otherwise:        the mean over the turn <= 0.2, since rounding to bfloat16 alone makes hundredths of it

A policy that sees images is asked behind a picture, too: the sampler's model may read the same pixels otherwise.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import suppress

import torch
from accelerate.utils import gather_object
from PIL import Image as Picture
from torch import Tensor, distributed
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from agentrl.chat.images import image_types, join_inputs
from agentrl.chat.renderer import Renderer
from agentrl.errors import GenerationError, ImageError, TemplateError
from agentrl.generation.base import Generator, Probed, SamplingParams
from agentrl.generation.sampling import first_occurrence, process_logits, seen_before, settings
from agentrl.generation.vision import vision_inputs
from agentrl.rollout.engine import RolloutEngine
from agentrl.training.arguments import RolloutConfig
from agentrl.training.baselines import evaluating
from agentrl.training.generators import unscored
from agentrl.types import Encoded, ImageSpan, Sample

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
        tokenizer: Reads the text of the probe.
        renderer: Shows its picture, where the policy sees any.
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
        renderer: Renderer,
        sampling: SamplingParams,
        engine: RolloutEngine,
    ) -> None:
        self._trainer, self._args, self._model = trainer, args, model
        self._generator, self._engine = generator, engine
        self._tokenizer, self._renderer, self._sampling = tokenizer, renderer, sampling
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
        single = not (self._args.bf16 or self._args.fp16) and self._model.dtype == torch.float32
        for ids, images in probe_rows(self._tokenizer, self._renderer, generator.max_context):
            params = probe_params(self._sampling, ids, generator.max_context)
            samples = self._engine.await_(generator.probe(ids, params, images))
            with self._trainer.compute_loss_context_manager(), evaluating(self._model):
                found = {
                    name: differences(self._model, ids, sample, params, images) for name, sample in samples.items()
                }
            judge(found, exact=generator.exact and single, sees=bool(images))


def probe_rows(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer, max_context: int | None
) -> list[tuple[list[int], tuple[ImageSpan, ...]]]:
    """Return what a turn is drawn behind: text, and a picture where the policy sees any and has room for it.

    Args:
        tokenizer: Reads the text.
        renderer: Shows the picture; nothing comes of it where its template shows none.
        max_context: Most tokens of a row; the text takes at most half of it.
    """
    ids: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    rows = [Encoded(ids if max_context is None else ids[: max(1, max_context // 2)])]
    if renderer.sees_images:
        picture = {"type": "image", "image": Picture.radial_gradient("L").resize((96, 64))}
        with suppress(ImageError, TemplateError):
            shown = [{"role": "user", "content": [picture, {"type": "text", "text": TEXT}]}]
            rows.append(renderer.encode_prompt(shown, None))
    return [(row.ids, row.images) for row in rows if max_context is None or len(row.ids) < max_context]


def probe_params(sampling: SamplingParams, prompt: Sequence[int], max_context: int | None) -> SamplingParams:
    """Return how to draw the probe: as rollouts are, but short."""
    room = TOKENS if max_context is None else min(TOKENS, max_context - len(prompt))
    return dataclasses.replace(sampling, max_tokens=room, stop_ids=frozenset(), seed=0)


@torch.no_grad()
def differences(
    model: torch.nn.Module,
    ids: Sequence[int],
    sample: Sample,
    params: SamplingParams,
    images: Sequence[ImageSpan] = (),
) -> Tensor:
    """Return |log pi_trainer - log pi_sampler| of each token of a sample, (T,).

    Args:
        model: The policy, in evaluation mode.
        ids: The prompt.
        sample: What was drawn after it.
        params: How.
        images: Those of the prompt.
    """
    row = torch.tensor([*ids, *sample.ids], device=next(model.parameters()).device)
    seen = {}
    if images:
        types = image_types(row.tolist(), images, ids[images[0].start])
        inputs = join_inputs([span.image for span in images])
        seen = vision_inputs(model, inputs, torch.tensor([types], device=row.device))
    logits_TV = model(input_ids=row[None], **seen).logits[0, len(ids) - 1 : -1].float()
    position_T = torch.arange(len(ids), len(row), device=row.device)
    seen_TV = seen_before(first_occurrence(row, logits_TV.shape[-1]), position_T)
    drawn_T = row[len(ids) :]
    logps_TV = process_logits(logits_TV, seen_NV=seen_TV, keep_N=drawn_T, **settings(params))
    logps_T = logps_TV.gather(-1, drawn_T[:, None])[:, 0].cpu()
    return (logps_T - torch.tensor(sample.logprobs)).abs()


def judge(found: dict[str, Tensor], *, exact: bool, sees: bool = False) -> None:
    """Refuse to go on with samplers that do not sample from the policy.

    Every process calls this, at the same place.

    Args:
        found: Differences of each copy that this process has asked.
        exact: Whether both sides compute in float32.
        sees: Whether they were asked behind a picture, after text alone was right.

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
        reason = (
            "Behind text it is right, so its model reads images otherwise; leave use_vllm out, or pass the tokenizer "
            "instead of the processor to train on text."
            if sees
            else "It may serve another model, compute in another precision (--dtype float32) or have kept old weights."
        )
        raise GenerationError(
            f"{name} does not sample from the policy{' behind a picture' if sees else ''}: its logprobs differ from "
            f"the trainer's by {value:.2g} {what}, and {bound:g} is allowed "
            f"({'both are in float32' if exact else 'not both are in float32'}). {reason}"
        )
