"""The local generator: exact against plain forward passes, KV reused, well behaved when things go wrong."""

import asyncio
import logging
import random

import pytest
import torch
from conversations import Conversations, Played, run, worst_error

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import Generator, SamplingParams
from agentrl.generation.local import LocalGenerator
from agentrl.testing.models import TINY_FAMILIES, tiny_model
from agentrl.types import FinishReason

PROMPT = [random.Random(1).randint(3, 63) for _ in range(20)]
TIGHT = {"roomy": {}, "chunks": {"max_batch_tokens": 7}, "evicting": {"max_cache_tokens": 130}}


def play_many(generator, count=12, **sampling):
    conversations = Conversations()
    run(
        *(
            conversations.play(generator, f"s{i}", PROMPT if i % 2 else PROMPT[: 5 + i], seed=i, **sampling)
            for i in range(count)
        )
    )
    return conversations.turns


@pytest.mark.parametrize("limits", TIGHT.values(), ids=TIGHT)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_random_schedules_equal_a_full_forward(family, limits, generators):
    model = tiny_model(family, initializer_range=0.2)
    generator = generators(LocalGenerator(model, **limits))
    turns = play_many(generator)
    assert worst_error(model, turns) < 1e-5
    assert generator.stats.decoded_tokens == sum(len(turn.logprobs) for turn in turns)
    assert bool(generator.stats.evictions) == ("max_cache_tokens" in limits)


def test_eager_attention_gets_an_additive_mask(generators):
    model = tiny_model("gemma3", attn_implementation="eager")
    assert worst_error(model, play_many(generators(LocalGenerator(model)), 4)) < 1e-5


RATIO_1 = [
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"top_p": 0.7},
    {"top_k": 4},
    {"min_p": 0.1},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("sampling", RATIO_1, ids=str)
def test_ratio_is_1_for_an_unchanged_policy(sampling, generators):
    model = tiny_model("qwen3")
    assert worst_error(model, play_many(generators(LocalGenerator(model)), 8, **sampling)) < 1e-4


def test_rows_that_sample_differently_share_a_batch(generators):
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model))
    conversations = Conversations()
    run(*(conversations.play(generator, str(i), PROMPT, i, **RATIO_1[i]) for i in range(len(RATIO_1))))
    assert worst_error(model, conversations.turns) < 1e-4


def test_nearly_greedy_tokens_are_the_likeliest(generators):
    model = tiny_model("qwen2")
    generator = generators(LocalGenerator(model))
    [sample] = run(generator.sample("a", PROMPT, SamplingParams(max_tokens=12, temperature=1e-4)))
    with torch.no_grad():
        likeliest = model(torch.tensor([PROMPT + sample.ids])).logits[0].argmax(-1)
    assert sample.ids == likeliest[19:-1].tolist()
    assert sample.finish is FinishReason.LENGTH


def test_the_same_seed_draws_the_same_tokens_alone_and_in_a_batch(generators):
    generator = generators(LocalGenerator(tiny_model("qwen3")))
    rng = random.Random(0)
    prompts = [[rng.randint(3, 63) for _ in range(rng.randint(3, 30))] for _ in range(16)]

    def ask(index, session):
        return generator.sample(session, prompts[index], SamplingParams(max_tokens=20, seed=index))

    together = run(*(ask(index, f"batch {index}") for index in range(16)))
    alone = [run(ask(index, f"alone {index}"))[0] for index in range(16)]
    assert [sample.ids for sample in together] == [sample.ids for sample in alone]
    assert len({tuple(sample.ids) for sample in together}) == 16


def test_a_later_turn_prefills_only_its_suffix(generators):
    generator = generators(LocalGenerator(tiny_model("llama")))
    [first] = run(generator.sample("a", PROMPT, SamplingParams(max_tokens=5)))
    assert generator.stats.prefilled_tokens == 20
    run(generator.sample("a", PROMPT + first.ids + [7, 8, 9], SamplingParams(max_tokens=5)))
    # The last sampled token was not run yet, so it comes with the suffix.
    assert generator.stats.prefilled_tokens == 20 + 1 + 3


def test_a_row_that_was_changed_is_prefilled_from_the_change(generators):
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model))
    run(generator.sample("a", PROMPT, SamplingParams(max_tokens=5)))
    changed = [*PROMPT[:15], 3, 4, 5]
    conversations = Conversations()
    run(conversations.play(generator, "a", changed, seed=0))
    assert worst_error(model, conversations.turns[:1]) < 1e-5


@pytest.mark.parametrize("limits", [{}, {"max_batch_tokens": 6}], ids=["whole", "chunks"])
def test_a_prompt_of_a_group_is_prefilled_once(limits, generators):
    generator = generators(LocalGenerator(tiny_model("qwen3"), **limits))
    run(*(generator.sample(str(i), PROMPT, SamplingParams(max_tokens=4, seed=i)) for i in range(8)))
    assert generator.stats.prefilled_tokens == 20 + 7  # each further member runs the last token for its logits


def test_common_beginnings_are_copied(generators):
    generator = generators(LocalGenerator(tiny_model("qwen3")))
    run(*(generator.sample(str(i), [*PROMPT, 10 + i, 11], SamplingParams(max_tokens=4)) for i in range(3)))
    assert generator.stats.prefilled_tokens == 22 + 2 + 2


@pytest.mark.parametrize(
    ("drawn", "stop_ids", "kept"), [([5, 9, 8, 8], {2, 9}, [5, 9]), ([5, 6, 2], {2, 9}, [5, 6, 2])]
)
def test_e01_every_stop_id_ends_a_turn(drawn, stop_ids, kept, generators, monkeypatch):
    draws = iter(drawn)
    monkeypatch.setattr("agentrl.generation.requests.draw", lambda logprobs, uniforms: torch.tensor([next(draws)]))
    generator = generators(LocalGenerator(tiny_model("llama")))
    [sample] = run(generator.sample("a", PROMPT, SamplingParams(max_tokens=9, stop_ids=frozenset(stop_ids))))
    assert (sample.ids, sample.finish) == (kept, FinishReason.STOP)


def test_new_weights_make_the_cache_stale(generators):
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model))
    [first] = run(generator.sample("a", PROMPT, SamplingParams(max_tokens=5)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    generator.sync(3)
    conversations = Conversations()
    run(conversations.play(generator, "a", PROMPT + first.ids, seed=0))
    assert worst_error(model, conversations.turns) < 1e-5
    [sample] = run(generator.sample("b", PROMPT, SamplingParams(max_tokens=1)))
    assert (first.weights_version, sample.weights_version) == (0, 3)


def test_requests_wait_for_room_and_all_are_served(generators):
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model, max_cache_tokens=70))
    samples = run(*(generator.sample(str(i), PROMPT, SamplingParams(max_tokens=40, seed=i)) for i in range(6)))
    assert [len(sample.ids) for sample in samples] == [40] * 6


def test_a_running_row_gives_way_when_the_others_need_its_room(generators):
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model, max_cache_tokens=250))
    params = [SamplingParams(max_tokens=200, seed=seed) for seed in range(3)]
    samples = run(*(generator.sample(f"s{i}", PROMPT[i:], params[i]) for i in range(3)))
    turns = [Played(PROMPT[i:] + s.ids, 20 - i, s.logprobs, params[i]) for i, s in enumerate(samples)]
    assert [len(sample.ids) for sample in samples] == [200] * 3
    assert worst_error(model, turns) < 1e-4
    assert generator.stats.evictions
    assert generator.stats.decoded_tokens == 600


def test_a_row_longer_than_the_cache_is_refused(generators):
    generator = generators(LocalGenerator(tiny_model("llama"), max_cache_tokens=30))
    with pytest.raises(GenerationError, match=r"'long'.*row of 31 tokens.*cache of 30.*max_cache_tokens"):
        run(generator.sample("long", PROMPT, SamplingParams(max_tokens=400)))
    with pytest.raises(GenerationError, match=r"'longer'.*row of 40 tokens.*max_cache_tokens"):
        run(generator.sample("longer", PROMPT * 2, SamplingParams(max_tokens=1)))
    run(generator.sample("fits", PROMPT, SamplingParams(max_tokens=10)))
    first, *_ = run(generator.sample("stops", PROMPT, SamplingParams(max_tokens=1)))
    stop = frozenset(first.ids)
    [stopped] = run(generator.sample("stops soon", PROMPT, SamplingParams(max_tokens=400, stop_ids=stop)))
    assert stopped.ids == first.ids, "what a turn may take does not count, what it takes does"


def test_a_row_longer_than_the_context_is_refused(generators):
    generator = generators(LocalGenerator(tiny_model("gpt2", max_position_embeddings=24)))
    assert generator.max_context == 24
    run(generator.sample("a", PROMPT, SamplingParams(max_tokens=4)))
    with pytest.raises(GenerationError, match="context of 24"):
        run(generator.sample("a", PROMPT, SamplingParams(max_tokens=5)))


def test_the_default_budget_is_logged(generators, caplog):
    caplog.set_level(logging.INFO, "agentrl.generation.local")
    generator = generators(LocalGenerator(tiny_model("llama")))
    run(*(generator.sample(str(i), PROMPT, SamplingParams(max_tokens=1)) for i in range(2)))
    [record] = caplog.records
    assert "max_cache_tokens" in record.getMessage()
    assert "0.25 KiB a token" in record.getMessage()  # 2 layers x 2 heads x 8 floats, keys and values


def test_cancelled_requests_leave_the_batch(generators):
    generator = generators(LocalGenerator(tiny_model("llama", max_position_embeddings=4000)))

    async def main():
        long = asyncio.create_task(generator.sample("long", PROMPT, SamplingParams(max_tokens=3900)))
        await generator.sample("short", PROMPT, SamplingParams(max_tokens=3))
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        generator.release("long")
        await generator.sample("next", PROMPT, SamplingParams(max_tokens=3))
        return generator.stats.decoded_tokens

    assert run(main())[0] < 1000


def test_an_exception_in_the_model_reaches_the_requests_and_the_generator_goes_on(generators, monkeypatch):
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model))
    broken = True
    forward = model.model.layers[1].mlp.forward

    def fail(hidden):
        if broken:
            raise ZeroDivisionError("the model broke")
        return forward(hidden)

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(GenerationError, match=r"'a'.*the model broke") as caught:
        run(generator.sample("a", PROMPT, SamplingParams(max_tokens=3)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    broken = False
    conversations = Conversations()
    run(conversations.play(generator, "a", PROMPT, seed=0))
    assert worst_error(model, conversations.turns) < 1e-5


def test_close_fails_what_is_unfinished(generators):
    generator = generators(LocalGenerator(tiny_model("llama", max_position_embeddings=100_000)))

    async def main():
        task = asyncio.create_task(generator.sample("a", PROMPT, SamplingParams(max_tokens=90_000)))
        await asyncio.sleep(0.05)
        generator.close()
        with pytest.raises(GenerationError, match="closed"):
            await task
        again = await generator.sample("b", PROMPT, SamplingParams(max_tokens=1))
        assert len(again.ids) == 1, "a closed generator starts again"

    run(main())
    generator.close()


def test_two_turns_of_a_session_at_once_are_refused(generators):
    generator = generators(LocalGenerator(tiny_model("llama")))
    with pytest.raises(GenerationError, match="still sampling"):
        run(*(generator.sample("a", PROMPT, SamplingParams(max_tokens=9)) for _ in range(2)))


def test_the_memory_is_free_when_the_last_session_is_released(generators):
    generator = generators(LocalGenerator(tiny_model("llama")))
    run(*(generator.sample(str(i), PROMPT, SamplingParams(max_tokens=2)) for i in range(3)))
    for i in range(3):
        generator.release(str(i))
    cache = generator._core._pool.cache
    freed = []
    generator._perform(lambda core: freed.append((cache.slots, cache.layers[0].keys)))  # behind the releases
    assert freed == [(0, None)]


def test_the_cache_begins_with_the_size_that_it_came_to_before(generators):
    """Rollouts come one by one: growing with each of them would copy the cache again at every step of training."""
    generator = generators(LocalGenerator(tiny_model("llama")))
    cache = generator._core._pool.cache
    run(*(generator.sample(str(i), PROMPT, SamplingParams(max_tokens=70)) for i in range(3)))
    for i in range(3):
        generator.release(str(i))
    run(generator.sample("next", PROMPT[:3], SamplingParams(max_tokens=1)))
    assert (cache.slots, cache.length) == (3, len(PROMPT) + 70)


def test_rows_that_end_together_leave_the_others_as_they_are(generators):
    """Several rows are moved at once where they leave the batch, from its front, its middle and its end."""
    model = tiny_model("llama")
    generator = generators(LocalGenerator(model))
    lengths = [3, 9, 3, 12, 3, 3, 14, 3]
    params = [SamplingParams(max_tokens=length, seed=seed) for seed, length in enumerate(lengths)]
    prompts = [[*PROMPT, seed + 1] for seed in range(len(lengths))]
    samples = run(*(generator.sample(str(i), prompts[i], params[i]) for i in range(len(lengths))))
    for prompt, sample in zip(prompts, samples, strict=True):
        row = torch.tensor([[*prompt, *sample.ids]])
        with torch.no_grad():
            logps = model(row).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        expected = logps.gather(1, row[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)


def test_training_mode_dropout_and_checkpointing_do_not_change_a_sample(generators):
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    model.activation_checkpointing_enable()
    model.train()
    model.transformer.ln_f.eval()
    turns = play_many(generators(LocalGenerator(model)), 4)
    assert model.training
    assert not model.transformer.ln_f.training
    assert worst_error(model.eval(), turns) < 1e-5


def test_n05_the_model_can_be_trained_after_generation(generators):
    model = tiny_model("llama").train()
    generator = generators(LocalGenerator(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16)))
    [sample] = run(generator.sample("a", PROMPT, SamplingParams(max_tokens=5)))
    logprobs = torch.tensor(sample.logprobs)
    logprobs.add_(1.0)
    assert not logprobs.is_inference()
    assert not any(parameter.is_inference() for parameter in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.tensor([PROMPT])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_peft_models_are_served_with_their_adapter(generators):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("qwen3"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    turns = play_many(generators(LocalGenerator(model)), 4)
    assert worst_error(model, turns) < 1e-5
    with model.disable_adapter():
        assert worst_error(model, turns) > 1e-3


def test_it_is_a_generator(generators):
    assert isinstance(generators(LocalGenerator(tiny_model("llama"))), Generator)


@pytest.mark.parametrize("name", ["max_cache_tokens", "max_batch_tokens"])
def test_sizes_are_checked(name):
    with pytest.raises(ConfigurationError, match=f"{name} is 0"):
        LocalGenerator(tiny_model("llama"), **{name: 0})


@pytest.mark.parametrize("seed", range(4))
def test_random_limits_cancellations_and_new_weights_leave_every_turn_exact(seed, generators):
    """Room for about three rows: growth, eviction, giving way, cancelling and `sync` in random order."""
    model = tiny_model("mistral", initializer_range=0.2, seed=seed)
    rng = random.Random(seed)
    limits = {"max_cache_tokens": rng.randint(200, 300), "max_batch_tokens": rng.choice([5, 16, 4096])}
    generator = generators(LocalGenerator(model, **limits))
    turns = []

    async def play(name):
        row = [rng.randint(3, 63) for _ in range(rng.randint(1, 30))]
        for _ in range(3):
            params = SamplingParams(max_tokens=rng.randint(1, 90), stop_ids=frozenset({5}), seed=rng.randint(0, 999))
            asked = asyncio.create_task(generator.sample(name, row, params))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.02)
                asked.cancel()
                await asyncio.wait([asked])
            if asked.cancelled():
                continue
            sample = await asked
            turns.append(Played(row + sample.ids, len(row), sample.logprobs, params))
            row = turns[-1].row[:90]
            if rng.random() < 0.3:
                generator.sync(rng.randint(1, 9))
        generator.release(name)

    run(*(play(str(i)) for i in range(10)))
    assert worst_error(model, turns) < 2e-5
