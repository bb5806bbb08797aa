"""What is said to vLLM and what it answers: pure functions between our words and vLLM's.

A turn is one request with token ids in and out. Everything that shapes the distribution is
written into it, because vLLM fills what is missing from the checkpoint's `generation_config.json`. What vLLM would
compute differently from `agentrl.generation.sampling`, by which the trainer scores, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.generation.vllm_images import features
from agentrl.types import FinishReason, ImageSpan, Sample

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this."""

EXTRAS = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "thinking_token_budget",
)
"""Further sampling parameters of vLLM that only change the distribution, by the name that both its API and its
`SamplingParams` have; the trainer does not score with them."""


def check_sampling(params: SamplingParams, extras: Mapping[str, Any]) -> None:
    """Refuse what vLLM does not sample as the trainer scores, and what it would ignore.

    Raises:
        ConfigurationError: Says which parameter, and why.
    """
    if params.temperature < LOWEST_TEMPERATURE:
        raise ConfigurationError(
            f"temperature={params.temperature}: vLLM samples at {LOWEST_TEMPERATURE} instead, so its logprobs would "
            f"not be those of the policy; set at least {LOWEST_TEMPERATURE}."
        )
    if params.top_p < 1.0 and params.min_p:
        raise ConfigurationError(
            f"top_p={params.top_p} together with min_p={params.min_p}: vLLM applies min-p before top-p, the trainer "
            "after it, so they would disagree about which tokens remain; set one of them."
        )
    for name in extras:
        if name not in EXTRAS:
            raise ConfigurationError(
                f"generation_kwargs[{name!r}] is not something that vLLM can be given for a turn; besides the "
                f"arguments of the configuration these are {', '.join(EXTRAS)}."
            )


NEVER = -100.0
"""The lowest bias of a logit that vLLM takes, for ids that are not to be drawn."""


def sampling_fields(params: SamplingParams, extras: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields by which both vLLM's API and its `SamplingParams` describe a turn.

    Args:
        params: How to draw.
        extras: Some of `EXTRAS`.
    """
    fields = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p or 0.0,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": params.seed,
        "logprobs": 0,  # of the sampled token alone
        "stop_token_ids": sorted(params.stop_ids),
        "ignore_eos": True,  # a turn ends with its stop ids, whatever the checkpoint thinks
        **(extras or {}),
    }
    if params.suppress_tokens:
        biases = {int(token): bias for token, bias in (fields.get("logit_bias") or {}).items()}
        fields["logit_bias"] = biases | dict.fromkeys(params.suppress_tokens, NEVER)
    return fields


def turn_request(
    model: str,
    ids: Sequence[int],
    params: SamplingParams,
    extras: Mapping[str, Any],
    regex: str | None = None,
    *,
    images: Sequence[ImageSpan] = (),
    generates: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Return the route and the body that ask for one turn.

    Args:
        model: The name that the server knows the weights by.
        ids: The whole row so far.
        params: How to draw.
        extras: Some of `EXTRAS`.
        regex: What the turn's text has to match.
        images: The images of the row; only vLLM's own route takes them.
        generates: Take vLLM's own route, which tells the weights of each token, not the one that all servers have.
    """
    fields = sampling_fields(params, extras)
    if regex is not None:
        fields["structured_outputs"] = {"regex": regex}
    if generates:
        seen = {"features": features(ids, images)} if images else {}
        fields["detokenize"] = False  # nobody reads its text
        return "/inference/v1/generate", {"model": model, "token_ids": list(ids), "sampling_params": fields, **seen}
    assert not images, "a server without /inference/v1/generate is refused where there are images"
    return "/v1/completions", {"model": model, "prompt": list(ids), "return_token_ids": True, **fields}


def read_turn(reply: Any, ids: Sequence[int], params: SamplingParams, weights_version: int) -> Sample:
    """Read a turn from the reply to `turn_request`.

    Args:
        reply: The JSON.
        ids: The row that was sent.
        params: What was asked for.
        weights_version: Of the weights that drew it, unless the reply says.

    Raises:
        GenerationError: Something is missing in the reply, or what is there does not fit together.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise GenerationError(f"the vLLM server's reply has no single choice: {shorten(reply)}")
    choice = choices[0]
    sampled, logprobs = choice.get("token_ids"), _logprobs(choice)
    if not isinstance(sampled, list) or logprobs is None:
        raise GenerationError(
            f"the vLLM server's reply lacks token ids or their logprobs (tried with vLLM 0.32): {shorten(choice)}"
        )
    if len(sampled) != len(logprobs) or not 0 < len(sampled) <= params.max_tokens:
        raise GenerationError(
            f"the vLLM server's reply has {len(sampled)} token ids and {len(logprobs)} logprobs where 1 to "
            f"{params.max_tokens} of both were asked for: {shorten(choice)}"
        )
    if choice.get("prompt_token_ids") not in (None, list(ids)):
        raise GenerationError("the vLLM server's reply is to another prompt than was sent")
    version, updates = read_spans(choice.get("weight_versions"), weights_version)
    return Sample(sampled, logprobs, finish_reason(sampled, params, choice.get("finish_reason")), version, updates)


def _logprobs(choice: dict[str, Any]) -> list[float] | None:
    """The logprobs of the sampled tokens, in either route's form; None if any is missing."""
    given = choice.get("logprobs")
    if not isinstance(given, dict):
        return None
    values = given.get("token_logprobs")
    if values is None:
        values = [entry.get("logprob") for entry in given.get("content") or ()]
    return values if isinstance(values, list) and None not in values else None


def read_spans(spans: Any, otherwise: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Read which weights drew which tokens.

    Args:
        spans: vLLM's list of (version, start, end), as dicts or objects; None where it does not say.
        otherwise: The version where it does not say, or in words that are not ours ("default").

    Returns:
        The first version, and where others begin, as `Sample.updates`.
    """
    starts: list[tuple[int, int]] = []
    for span in spans or ():
        fields = span if isinstance(span, dict) else vars(span)
        name = str(fields["version"])
        version = int(name) if name.isdecimal() else otherwise
        if not starts or starts[-1][1] != version:
            starts.append((int(fields["start"]), version))
    if not starts:
        return otherwise, ()
    return starts[0][1], tuple(starts[1:])


def drawn_by(reply: Any) -> list[str]:
    """Return what the server calls the weights that drew a turn; empty where the route does not say.

    Weights that were pushed are called by their version, in digits; those of a server's start are "default".
    """
    return [str(span["version"]) for span in reply["choices"][0].get("weight_versions") or ()]


def finish_reason(sampled: Sequence[int], params: SamplingParams, said: str | None) -> FinishReason:
    """Tell a turn that is whole from one that was cut.

    Raises:
        GenerationError: It is neither.
    """
    if sampled[-1] in params.stop_ids or said == "stop":  # a structured output may be complete without a stop id
        return FinishReason.STOP
    if said == "length" or len(sampled) >= params.max_tokens:
        return FinishReason.LENGTH
    raise GenerationError(f"vLLM ended a turn of {len(sampled)} tokens with finish_reason={said!r}")


def shorten(value: Any, length: int = 300) -> str:
    """Show a value of a reply, cut to a readable length."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else f"{text[:length]} ... ({len(text)} characters)"
