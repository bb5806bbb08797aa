"""transformers' continuous batching behind the protocol, for real on the CPU."""

import random
import threading

import pytest
from conversations import Conversations, run, worst_error

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import Generator, SamplingParams
from agentrl.generation.continuous import ContinuousGenerator
from agentrl.testing.models import tiny_model
from agentrl.types import FinishReason
from tests.waiting import wait_until

PROMPTS = [[random.Random(i).randint(3, 63) for _ in range(5 + 3 * i)] for i in range(4)]
SMALL = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}], ids=["plain", "all"])
def test_logprobs_equal_a_full_forward(sampling, generators):
    model = tiny_model("qwen3").train()
    threads = set(threading.enumerate())
    generator = generators(ContinuousGenerator(model, config=SMALL))
    assert isinstance(generator, Generator)
    conversations = Conversations()
    run(*(conversations.play(generator, str(i), PROMPTS[i], seed=i, **sampling) for i in range(4)))
    assert worst_error(model.eval(), conversations.turns) < 1e-4
    assert generator.stats.decoded_tokens == sum(len(turn.logprobs) for turn in conversations.turns)
    generator.close()
    wait_until(lambda: set(threading.enumerate()) <= threads)


def test_e01_every_stop_id_ends_a_turn(generators):
    generator = generators(ContinuousGenerator(tiny_model("llama"), config=SMALL))
    params = SamplingParams(max_tokens=200, stop_ids=frozenset(range(0, 64, 8)))
    [sample] = run(generator.sample("a", PROMPTS[0], params))
    assert sample.finish is FinishReason.STOP
    assert [index for index, token in enumerate(sample.ids) if token % 8 == 0] == [len(sample.ids) - 1]


def test_the_model_is_given_back_when_all_sessions_are_released(generators):
    model = tiny_model("llama").train()
    generator = generators(ContinuousGenerator(model, config=SMALL))
    run(generator.sample("a", PROMPTS[0], SamplingParams(max_tokens=3)))
    assert not model.training
    generator.release("a")
    run(generator.sample("b", PROMPTS[0], SamplingParams(max_tokens=1)))
    generator.sync(4)
    [sample] = run(generator.sample("c", PROMPTS[0], SamplingParams(max_tokens=1)))
    assert sample.weights_version == 4
    generator.close()
    assert model.training


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(max_tokens=3, repetition_penalty=1.2), "repetition_penalty"),
        (SamplingParams(max_tokens=510), "num_blocks"),
    ],
    ids=["penalty", "room"],
)
def test_what_it_cannot_serve_is_refused(params, message, generators):
    generator = generators(ContinuousGenerator(tiny_model("llama", max_position_embeddings=600), config=SMALL))
    with pytest.raises(GenerationError, match=message):
        run(generator.sample("a", PROMPTS[0], params))


@pytest.mark.parametrize("config", [{"nonsense": 1}, {"return_logprobs": False}], ids=str)
def test_bad_settings_are_refused(config):
    with pytest.raises(ConfigurationError, match=next(iter(config))):
        ContinuousGenerator(tiny_model("llama"), config=config)
