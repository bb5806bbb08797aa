"""Generators that own their weights: the policy may be trained while they sample, and `sync` renews them on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentrl.errors import ConfigurationError
from agentrl.generation.base import SamplingParams
from agentrl.generation.continuous import ContinuousGenerator
from agentrl.generation.local import LocalGenerator
from agentrl.generation.mirror import Mirror
from agentrl.generation.plain import PlainGenerator
from agentrl.testing.models import tiny_model
from agentrl.types import Sample, Turn
from tests.waiting import eventually, wait_until

PROMPT = [5, 6, 7, 8, 9]


def train(model: Any, amount: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * amount)


def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Of each sampled id, by a plain forward pass."""
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT + ids])).logits[0].float().log_softmax(-1)
    return [scores[len(PROMPT) + i - 1, token].item() for i, token in enumerate(ids)]


def before_each_step(generator: Any, act: Callable[[], object]) -> None:
    """Have something done in the generator's thread before each of its steps."""
    step = generator._core.step

    def acting() -> None:
        act()
        step()

    generator._core.step = acting


async def sample_and_train(generator: Any, model: Any, tokens: int) -> Sample:
    """Sample a turn; in the midst of it train the policy, and a little later hand the weights over."""

    def decoded(count: int) -> bool:
        return generator.stats.decoded_tokens >= count

    def slow() -> None:
        """Get no further until the new weights are there."""
        if decoded(6) and not handed.is_set():
            wait_until(lambda: not generator._inbox.empty())
            handed.set()

    handed = threading.Event()
    before_each_step(generator, slow)
    turn = asyncio.create_task(generator.sample("a", PROMPT, SamplingParams(max_tokens=tokens)))
    await eventually(lambda: decoded(1))
    train(model)
    await eventually(lambda: decoded(6))
    await asyncio.to_thread(generator.sync, 7)
    return await turn


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_token_of_a_turn_is_of_one_version_which_is_recorded(family, generators):
    """Not those of half-trained weights, nor with keys and values of older ones: every logprob is of its version."""
    model = tiny_model(family)
    before = Mirror(model).model
    generator = generators(LocalGenerator(model))
    generator.own_weights()
    sample = asyncio.run(sample_and_train(generator, model, 150))
    assert sample.weights_version == 0
    [(start, version)] = sample.updates
    assert version == 7
    assert 0 < start < 150
    expected = logprobs(before, sample.ids)[:start] + logprobs(model, sample.ids)[start:]
    assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    turn = Turn(4, 154, sample.finish, weights_version=0, updates=sample.updates)
    assert turn.versions == [0] * start + [7] * (150 - start)


def test_generate_takes_new_weights_between_two_batches(generators):
    model = tiny_model("llama")
    before = Mirror(model).model
    generator = generators(PlainGenerator(model))
    generator.own_weights()

    begun = threading.Event()
    before_each_step(generator, begun.set)

    async def play() -> list[Sample]:
        turn = asyncio.create_task(generator.sample("a", PROMPT, SamplingParams(max_tokens=30)))
        await eventually(begun.is_set)
        train(model)
        await asyncio.to_thread(generator.sync, 7)
        return [await turn, await generator.sample("b", PROMPT, SamplingParams(max_tokens=30))]

    first, second = asyncio.run(play())
    assert (first.weights_version, second.weights_version) == (0, 7)
    assert first.logprobs == pytest.approx(logprobs(before, first.ids), abs=1e-4)
    assert second.logprobs == pytest.approx(logprobs(model, second.ids), abs=1e-4)


def test_what_is_not_trained_is_shared_and_what_is_tied_stays_tied():
    base = tiny_model("llama", tie_word_embeddings=True)
    mirror = Mirror(base)
    train(base)
    mirror.update()
    assert mirror.model.lm_head.weight is mirror.model.model.embed_tokens.weight
    assert torch.equal(mirror.model.lm_head.weight, base.lm_head.weight)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    copied = dict(Mirror(adapted).model.named_parameters())
    for name, parameter in adapted.named_parameters():
        assert (copied[name] is parameter) is not parameter.requires_grad, name
    assert any(parameter.requires_grad for parameter in adapted.parameters()), "the mirror froze the policy"


def test_weights_that_cannot_be_handed_over_are_an_error_where_they_should_have_been(generators):
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model))
    generator.own_weights()
    asyncio.run(generator.sample("a", PROMPT, SamplingParams(max_tokens=2)))
    model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="size of tensor"):
        generator.sync(1)


def test_the_engine_of_transformers_cannot_change_weights_on_the_way(generators):
    generator = generators(ContinuousGenerator(tiny_model("llama")))
    with pytest.raises(ConfigurationError, match=r"use_transformers_continuous_batching.*gives up its turns"):
        generator.own_weights()
