"""The plain generator: the same contract on `model.generate`, and the choice between the two."""

import logging
import random

import pytest
import torch
from conversations import Conversations, Played, run, worst_error
from transformers import MambaConfig, MambaForCausalLM

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import Generator, SamplingParams
from agentrl.generation.factory import make_generator
from agentrl.generation.local import LocalGenerator
from agentrl.generation.plain import PlainGenerator
from agentrl.generation.support import supports
from agentrl.testing.models import tiny_model
from agentrl.types import FinishReason

PROMPTS = [[random.Random(i).randint(3, 63) for _ in range(5 + 3 * i)] for i in range(6)]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.02, "repetition_penalty": 1.2}],
    ids=["plain", "all"],
)
def test_conversations_equal_a_full_forward(family, sampling, generators):
    model = tiny_model(family)
    generator = generators(PlainGenerator(model))
    conversations = Conversations()
    run(*(conversations.play(generator, str(i), PROMPTS[i], seed=i, **sampling) for i in range(6)))
    assert worst_error(model, conversations.turns) < 1e-4
    assert generator.stats.decoded_tokens == sum(len(turn.logprobs) for turn in conversations.turns)


def test_the_same_seed_draws_the_same_tokens_as_the_local_generator(generators):
    model = tiny_model("qwen3")

    def sample_all(generator):
        return run(*(generator.sample(str(i), PROMPTS[i], SamplingParams(max_tokens=5 + i, seed=i)) for i in range(6)))

    plain = sample_all(generators(PlainGenerator(model)))
    local = sample_all(generators(LocalGenerator(model)))
    assert [sample.ids for sample in plain] == [sample.ids for sample in local]


def test_waiting_requests_are_one_batch(generators):
    generator = generators(PlainGenerator(tiny_model("llama")))
    run(*(generator.sample(str(i), PROMPTS[i], SamplingParams(max_tokens=4)) for i in range(6)))
    assert generator.stats.forward_passes <= 8  # the first request may have started alone


def test_settings_of_generate_are_honoured_and_scored(generators):
    model = tiny_model("llama")
    generator = generators(PlainGenerator(model, generation_kwargs={"suppress_tokens": list(range(32))}))
    params = SamplingParams(max_tokens=10, seed=1)
    [sample] = run(generator.sample("a", PROMPTS[0], params))
    assert min(sample.ids) >= 32
    unconstrained = worst_error(model, [Played(PROMPTS[0] + sample.ids, 5, sample.logprobs, params)])
    assert unconstrained > 0.1


def test_the_generation_config_of_a_checkpoint_changes_nothing(generators):
    model = tiny_model("llama")
    model.generation_config.update(top_k=2, repetition_penalty=1.5, suppress_tokens=[7, 8, 9], min_p=0.3)
    conversations = Conversations()
    run(conversations.play(generators(PlainGenerator(model)), "a", PROMPTS[0], seed=0))
    assert worst_error(model, conversations.turns) < 1e-4
    assert model.generation_config.top_k == 2


def test_peft_models_are_served_with_their_adapter(generators):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("qwen3"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    conversations = Conversations()
    run(conversations.play(generators(PlainGenerator(model)), "a", PROMPTS[0], seed=0))
    assert worst_error(model, conversations.turns) < 1e-4


def test_e01_every_stop_id_ends_a_turn_and_the_models_own_eos_does_not(generators, monkeypatch):
    draws = iter([2, 5, 9, 8, 8])  # 2 is the model's EOS
    monkeypatch.setattr("agentrl.generation.plain.draw", lambda logprobs, uniforms: torch.tensor([next(draws)]))
    generator = generators(PlainGenerator(tiny_model("llama")))
    [sample] = run(generator.sample("a", PROMPTS[0], SamplingParams(max_tokens=9, stop_ids=frozenset({9, 11}))))
    assert (sample.ids, sample.finish) == ([2, 5, 9], FinishReason.STOP)


@pytest.mark.parametrize("name", ["num_return_sequences", "do_sample", "no_such_field"])
def test_h11_settings_that_change_what_a_sample_is_are_refused(name):
    with pytest.raises(ConfigurationError, match=name):
        PlainGenerator(tiny_model("llama"), generation_kwargs={name: 2})


def test_an_exception_reaches_the_requests_and_the_generator_goes_on(generators):
    generator = generators(PlainGenerator(tiny_model("llama", vocab_size=64)))
    with pytest.raises(GenerationError, match=r"'bad'.*IndexError"):
        run(generator.sample("bad", [3, 400], SamplingParams(max_tokens=2)))
    run(generator.sample("good", [3, 4], SamplingParams(max_tokens=2)))


def test_recurrent_models_fall_back_and_say_so_once(generators, caplog):
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = MambaForCausalLM(config).eval()
    assert supports(model)
    with pytest.raises(ConfigurationError, match="PlainGenerator"):
        LocalGenerator(model)
    with caplog.at_level(logging.WARNING, "agentrl.generation.factory"):
        generator = generators(make_generator(model))
    assert isinstance(generator, PlainGenerator)
    assert len(caplog.records) == 1
    [sample] = run(generator.sample("a", PROMPTS[0], SamplingParams(max_tokens=4)))
    assert len(sample.ids) == 4


@pytest.mark.parametrize(
    "setting", [{"generation_kwargs": {"suppress_tokens": [4]}}, {"cache_implementation": "static"}], ids=str
)
def test_settings_of_generate_choose_the_plain_generator(setting, generators):
    model = tiny_model("llama")
    generator = generators(make_generator(model, **setting))
    assert isinstance(generator, PlainGenerator)
    run(generator.sample("a", PROMPTS[0], SamplingParams(max_tokens=4)))
    assert isinstance(generators(make_generator(model)), LocalGenerator)
    assert isinstance(generator, Generator)
