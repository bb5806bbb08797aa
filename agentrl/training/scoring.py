"""Logprobs of the sampled tokens under a model, with gradients, without ever holding all the logits.

One forward pass of the model as it was given, so that data-parallel wrappers, adapters, autocast and
parameter sharding see an ordinary forward and return what they are used to. Two hooks that live for this pass
change what happens inside. In front of the LM head, the hidden states of the positions that predict a target
are taken; the head and the softmax run on them in chunks, each recomputed in the backward pass, and the
head's own call is left one position per row. After the forward, the scores are returned in place of the
model's output: a wrapper that prepares its backward pass by looking at outputs finds those that the loss
comes from.

What a model does to the logits after its head (soft capping, scaling) has to be repeated on the chunks. The
logits that the model gives for the position that was left are compared with ours the first time a model is
seen; a model that does something unknown is scored from its own full logits instead, at their cost in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl.generation.base import SamplingParams
from agentrl.generation.sampling import first_occurrence, needs_processing, process_logits, seen_before, suppress
from agentrl.generation.vision import vision_inputs
from agentrl.objectives.regularizers import entropy
from agentrl.training import attention  # noqa: F401 (without it no model would be told segments)
from agentrl.training.batching import MicroBatch

logger = logging.getLogger(__name__)

Head = Callable[[Tensor], Tensor]
"""From hidden states (or logits) of positions, (..., D), to logits, (..., V)."""

_tail_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Of the models seen so far, whether `_head` computes their logits."""


class Scores(NamedTuple):
    """Scores of the N targets of a batch, float32.

    Attributes:
        logps_N: Logprob of each target.
        entropy_N: Entropy in nats of the distribution it was drawn from; empty when not asked for.
        router_loss: Auxiliary loss of a mixture-of-experts model, a scalar; None when not asked for.
        selected_N: bool, the targets that the objective is restricted to by their entropy; None: all.
    """

    logps_N: Tensor
    entropy_N: Tensor
    router_loss: Tensor | None = None
    selected_N: Tensor | None = None


def score(
    model: nn.Module,
    batch: MicroBatch,
    sampling: SamplingParams,
    *,
    chunk_logits: int | None = None,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    router_loss: bool = False,
) -> Scores:
    """Score the targets of a batch under the distribution that they were sampled from.

    No other thread may run the model meanwhile: its forward would meet the hooks.

    Args:
        model: A causal language model of transformers, possibly with adapters, possibly wrapped for
            distributed training. Gradients are kept if they are enabled.
        batch: On the model's device, in a layout that the model supports.
        sampling: Temperature, top-k, top-p, min-p and repetition penalty that the generator used. A target
            stays in the support even if a changed policy would now drop it.
        chunk_logits: Logits that exist at the same time, at least those of one target. A few float32 copies of them
            are the peak of memory, whatever the vocabulary and the length. By default a copy takes 64 MiB on the CPU;
            on other devices 256 MiB, since there adding up the head's gradient after each chunk costs more than the
            chunk if that is small.
        with_entropy: Compute the entropy too.
        entropy_grad: Keep its gradient.
        router_loss: Have the model compute its auxiliary loss over the whole rows; for mixture-of-experts models.

    Raises:
        ValueError: The batch has segments, and the model's attention is not told them.
    """
    core = extract_model_from_parallel(model)
    config = core.config.get_text_config()
    if batch.segments is not None and config._attn_implementation != "sdpa":
        raise ValueError(f"segments need attn_implementation='sdpa', not {config._attn_implementation!r}")
    chunk_logits = chunk_logits or (2**24 if batch.input_ids.device.type == "cpu" else 2**26)
    chunk_tokens = max(chunk_logits // config.vocab_size, 1)
    seen = _Seen(batch, core) if sampling.repetition_penalty != 1.0 else None

    def run(states: Tensor, head: Head) -> Scores:
        def score_span(states_C: Tensor, span: slice) -> tuple[Tensor, Tensor]:
            return _score_chunk(
                head(states_C),
                batch.target_ids_N[span],
                None if seen is None else seen.before(span),
                sampling,
                with_entropy,
                entropy_grad,
            )

        return _in_chunks(score_span, states.flatten(0, -2)[batch.target_index_N], chunk_tokens)

    inputs: dict[str, Any] = {**batch.model_inputs(), "use_cache": False}
    if batch.image_types is not None:
        inputs |= vision_inputs(core, batch.images, batch.image_types)
    if router_loss:
        inputs["output_router_logits"] = True
    scores = _score_hidden(model, core, inputs, run) if _tail_known.get(core, True) else None
    return _score_logits(model, core, inputs, run) if scores is None else scores


def _score_hidden(
    model: nn.Module, core: Any, inputs: dict[str, Any], run: Callable[[Tensor, Head], Scores]
) -> Scores | None:
    """Score from the inputs of the LM head; None when the model's logits are something else than ours."""
    lm_head = core.get_output_embeddings()
    if lm_head is None:
        return None
    head = _head(lm_head, core.config.get_text_config())
    taken: list[Scores] = []
    expected: list[Tensor] = []
    to_check = core not in _tail_known  # asked out here: a compiled model cannot trace a weak reference to itself

    def take(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        left = args[0][:, :1]
        taken.append(run(args[0], head))
        if to_check:
            with torch.no_grad():
                expected.append(head(left))
        return (left, *args[1:])

    def hand_over(_: nn.Module, __: Any, logits: Tensor) -> tuple[Tensor, ...]:
        return logits, taken[0].logps_N, taken[0].entropy_N

    def take_back(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> Tensor:
        logits, *scored = output
        taken[0] = Scores(*scored)
        return logits

    def give(_: nn.Module, __: Any, output: Any) -> Scores | None:
        if expected:
            _tail_known[core] = _close(output.logits, expected[0])
        return _with_router_loss(taken[0], output) if taken and _tail_known.get(core, False) else None

    hooks = [
        lm_head.register_forward_pre_hook(take),
        # To whatever else hooks into the head, the scores are its output for as long as that takes: sharded weights are
        # fetched again for the backward pass when the gradient of a module's output arrives.
        lm_head.register_forward_hook(hand_over, prepend=True),
        lm_head.register_forward_hook(take_back),
        # First among the hooks: those of FSDP expect the final output.
        core.register_forward_hook(give, prepend=True),
    ]
    try:
        output = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if isinstance(output, Scores):
        return output
    _tail_known[core] = False
    logger.warning(
        "%s does something unknown to its logits after the LM head; it is scored from its full logits, which "
        "takes memory for sequence length x vocabulary",
        type(core).__name__,
    )
    return None


def _score_logits(model: nn.Module, core: Any, inputs: dict[str, Any], run: Callable[[Tensor, Head], Scores]) -> Scores:
    """Score from the model's own logits of all positions."""

    def give(_: nn.Module, __: Any, output: Any) -> Scores:
        return _with_router_loss(run(output.logits, lambda logits: logits), output)

    after_model = core.register_forward_hook(give, prepend=True)
    try:
        return cast(Scores, model(**inputs))
    finally:
        after_model.remove()


def _with_router_loss(scores: Scores, output: Any) -> Scores:
    """The scores together with the auxiliary loss that the model was asked for."""
    return scores._replace(router_loss=getattr(output, "aux_loss", None))


def _head(lm_head: nn.Module, config: Any) -> Head:
    """The LM head and what the architectures that we know do to the logits after it."""
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
    multiplier = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite

    def head(hidden: Tensor) -> Tensor:
        # Its forward, not the call: the hooks of the one call that the model makes are enough. Those of sharded weights
        # communicate, and processes have different numbers of chunks.
        logits = lm_head.forward(hidden)
        if multiplier is not None:
            logits = logits * multiplier
        if divisor is not None:
            logits = logits / divisor
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return head


def _close(logits: Tensor, ours: Tensor) -> bool:
    """Whether two computations of the same logits agree but for rounding in the model's precision."""
    if logits.shape != ours.shape:
        return False
    scale = logits.detach().abs().max().float().item()
    return torch.allclose(logits.float(), ours.float(), rtol=1e-2, atol=1e-2 * scale)


class _Seen:
    """Which ids stand in a sequence before each target: what a repetition penalty looks at."""

    def __init__(self, batch: MicroBatch, core: Any) -> None:
        vocab_size = core.config.get_text_config().vocab_size
        ids = batch.input_ids.flatten()
        places = [torch.tensor([*chain(*place)], dtype=torch.int64, device=ids.device) for place in batch.sequences_at]
        self.first_SV = torch.stack([first_occurrence(ids[place], vocab_size) for place in places])
        self.sequence_N = batch.sequence_N
        before = [batch.target_index_N[batch.sequence_N == s] for s in range(len(places))]  # targets lie by sequence
        self.position_N = 1 + torch.cat([torch.searchsorted(*pair) for pair in zip(places, before, strict=True)])

    def before(self, span: slice) -> Tensor:
        """For the targets of a span, bool (C, V)."""
        return seen_before(self.first_SV[self.sequence_N[span]], self.position_N[span])


def _in_chunks(
    score_span: Callable[[Tensor, slice], tuple[Tensor, Tensor]], states_N: Tensor, chunk_tokens: int
) -> Scores:
    """Apply a function to `chunk_tokens` targets at a time, and again in the backward pass.

    But not to the last chunk, whose backward pass is the next thing to be done: forgetting it saves no memory.
    """
    parts = []
    # At least one chunk, if an empty one: every process has to run the head for its gradients to be reduced.
    for start in range(0, max(len(states_N), 1), chunk_tokens):
        span = slice(start, start + chunk_tokens)
        if torch.is_grad_enabled() and span.stop < len(states_N):
            parts.append(checkpoint(score_span, states_N[span], span, use_reentrant=False))
        else:
            parts.append(score_span(states_N[span], span))
    logps, entropies = zip(*parts, strict=True)
    return Scores(torch.cat(logps), torch.cat(entropies))


def _score_chunk(
    logits_CV: Tensor,
    ids_C: Tensor,
    seen_CV: Tensor | None,
    sampling: SamplingParams,
    with_entropy: bool,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of C targets from their logits."""
    logits_CV = suppress(logits_CV, sampling.suppress_tokens, ids_C)
    truncation: dict[str, Any] = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    processed = needs_processing(**truncation, repetition_penalty=sampling.repetition_penalty)
    if processed:
        scores_CV = process_logits(
            logits_CV,
            temperature=sampling.temperature,
            repetition_penalty=sampling.repetition_penalty,
            seen_NV=seen_CV,
            keep_N=ids_C,
            **truncation,
        )
        logps_C = scores_CV.gather(1, ids_C[:, None])[:, 0]
    else:
        logps_C, scores_CV = _TargetLogps.apply(logits_CV, ids_C, sampling.temperature)
    if not with_entropy:
        return logps_C, logps_C.new_zeros(0)
    if entropy_grad and torch.is_grad_enabled():
        return logps_C, entropy(scores_CV if processed else logits_CV.float() / sampling.temperature)
    with torch.no_grad():
        p_CV = scores_CV.exp()
        # Outside of the support, 0 times infinity counts 0.
        return logps_C, -p_CV.mul_(scores_CV).masked_fill_(scores_CV.isneginf(), 0.0).sum(-1)


class _TargetLogps(torch.autograd.Function):
    """Logprobs of targets and, without a gradient, of all ids: softmax with one float32 copy kept for its backward."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, ids_C: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits_dtype, scores_CV = logits_CV.dtype, logits_CV.float()
        if temperature != 1.0:
            scores_CV = scores_CV / temperature
        logps_CV = scores_CV.log_softmax(dim=-1)
        ctx.save_for_backward(logps_CV, ids_C)
        ctx.mark_non_differentiable(logps_CV)
        ctx.temperature, ctx.dtype = temperature, logits_dtype
        return logps_CV.gather(1, ids_C[:, None])[:, 0], logps_CV

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor, _: Any) -> tuple[Tensor, None, None]:
        logps_CV, ids_C = ctx.saved_tensors
        grad_C1 = (grad_C / ctx.temperature)[:, None]
        # d logp[target] / d logits[v] = [v = target] - p[v]
        grad_CV = logps_CV.exp().mul_(-grad_C1).scatter_add_(1, ids_C[:, None], grad_C1)
        return grad_CV.to(ctx.dtype), None, None
