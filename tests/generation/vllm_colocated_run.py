"""Trains with vLLM in the process and prints what a test wants to know; run by the Python of `.venv-vllm`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import torch
import transformers

from agentrl.generation.base import SamplingParams
from agentrl.generation.vllm_colocate import VllmColocateGenerator
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import FIX_VOCAB_SIZE
from agentrl.training.sampler_check import differences
from tests.training.runs import logged, make_trainer

HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
"""A head of 32, the smallest that vLLM's CPU kernels know."""


def updates(generator: VllmColocateGenerator, policy: Any) -> list[float]:
    """Differences of the logprobs after each of a few updates."""
    params = SamplingParams(max_tokens=12, temperature=0.8, top_k=40, repetition_penalty=1.2, seed=3)
    found = []
    for version in range(3):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        generator.sync(version)
        generator.wake()
        sample = asyncio.run(generator.sample("s", [140, 150, 160], params))
        assert sample.weights_version == version
        found.append(float(differences(policy, [140, 150, 160], sample, params).max()))
        generator.rest()
    return found


def in_flight(generator: VllmColocateGenerator) -> dict[str, Any]:
    """A long turn outlives an update, and a short one does not wait for it."""

    async def play() -> dict[str, Any]:
        long = asyncio.create_task(generator.sample("a", [140], SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.2)
        short = await generator.sample("b", [150], SamplingParams(max_tokens=4))
        waited = long.done()
        await asyncio.to_thread(generator.sync, 7)
        sample = await long
        cancelled = asyncio.create_task(generator.sample("c", [140], SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        return {"waited": waited, "short": len(short.ids), "first": sample.weights_version, "updates": sample.updates}

    return asyncio.run(play())


def main(folder: str, tied: bool, implementation: str = "vllm") -> None:
    logging.disable(logging.WARNING)
    policy = tiny_model("llama", vocab_size=FIX_VOCAB_SIZE, initializer_range=0.1, tie_word_embeddings=tied, **HEADS)
    trainer = make_trainer(
        "grpo",
        folder,
        model=policy,
        generator=None,
        use_vllm=True,
        vllm_max_model_length=512,
        vllm_enable_sleep_mode=True,
        vllm_model_impl=implementation,
        temperature=0.9,
        max_steps=3,
        gradient_checkpointing=False,
    )
    generator = trainer.collector.generator
    trainer.train()
    answer = {
        "transformers": transformers.__version__,
        "logp_difference": logged(trainer, "sampling/sampling_logp_difference/max"),
        "max_context": generator.max_context,
        "after_updates": updates(generator, policy),
        "in_flight": in_flight(generator),
    }
    generator.close()
    print("ANSWER " + json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "tied", *sys.argv[3:])
