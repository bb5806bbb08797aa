"""Sampling from an OpenAI-compatible server that takes and gives back token ids: for evaluation.

The route is `/v1/completions` with the prompt as ids, so the server applies no chat template and reads no calls, and a
row stays token-exact. Servers that answer with text alone (OpenAI's own among them) are refused: what they sampled
cannot be known from it. `vllm serve` answers with ids (`return_token_ids`).

Logprobs are not asked for and are NaN in the samples, so nothing can be trained on them.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from agentrl.errors import GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.generation.openai_http import OpenAIServer
from agentrl.generation.vllm_protocol import sampling_fields
from agentrl.types import FinishReason, ImageSpan, Sample


class CompletionsGenerator(OpenAIServer):
    """Implements `Generator`; see `OpenAIServer` for the arguments."""

    async def sample(
        self, session: str, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Sample:
        """Sample one turn; see `Generator.sample`."""
        if images:
            raise GenerationError("images are not passed on to a completions server in this version")
        reply = await self.ask("completions", turn_request(self.model, ids, params))
        sample = read_turn(reply, params)
        self.stats.prefilled_tokens += len(ids)
        self.stats.decoded_tokens += len(sample.ids)
        self.stats.forward_passes += 1
        return sample


def turn_request(model: str, ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """The body that asks for one turn; what shapes the distribution is written out, so no default of theirs counts."""
    fields = sampling_fields(params)
    del fields["logprobs"]
    return {"model": model, "prompt": list(ids), "return_token_ids": True, **fields}


def read_turn(reply: Any, params: SamplingParams) -> Sample:
    """Read a turn from the answer.

    Raises:
        GenerationError: There are no token ids in it.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    ids = choices[0].get("token_ids") if isinstance(choices, list) and choices else None
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise GenerationError(
            "the server answers without the ids of the sampled tokens, so it cannot be evaluated token-exactly: serve "
            f"the model with vLLM 0.10.2 or newer (`vllm serve`). It said {reprlib.repr(reply)}"
        )
    stopped = ids[-1] in params.stop_ids
    return Sample(ids, [math.nan] * len(ids), FinishReason.STOP if stopped else FinishReason.LENGTH)
