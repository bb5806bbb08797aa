"""Server mode against a server that speaks vLLM's protocol: turns, weights, and what goes wrong."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time

import pytest
import torch

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation import vllm_server
from agentrl.generation.base import SamplingParams
from agentrl.generation.vllm_http import Replica
from agentrl.generation.vllm_server import VllmServerGenerator
from agentrl.generation.weight_transfer import GlooChannel, WeightTransfer
from agentrl.generation.weights import PolicyWeights
from agentrl.testing.models import tiny_model
from agentrl.testing.vllm import free_port
from agentrl.training.sampler_check import differences
from tests.generation.vllm_stub import DROP, StubServer
from tests.waiting import LONG, eventually, wait_until

PARAMS = SamplingParams(max_tokens=6, temperature=0.8, top_k=20, repetition_penalty=1.1, seed=1)
IDS = [5, 9, 12, 7]


@pytest.fixture
def world(monkeypatch):
    """Make servers, a policy and a generator on them; everything is closed at the end."""
    made: list[VllmServerGenerator] = []
    monkeypatch.setattr(vllm_server, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.05)
    servers: list[StubServer] = []

    def make(count=1, *, policy=None, timeout=30.0, request_timeout=60.0, sampling=PARAMS, **options):
        policy = policy or tiny_model("qwen3")
        servers.extend(StubServer(policy, **options) for _ in range(count))
        pushes = []
        for server in servers:
            replica = Replica(server.url)
            replica.learn()
            channel = GlooChannel("127.0.0.1", free_port(), timeout)
            pushes.append((replica, WeightTransfer(replica, PolicyWeights(policy), channel, timeout)))
        generator = VllmServerGenerator(pushes, sampling=sampling, timeout=timeout, request_timeout=request_timeout)
        made.append(generator)
        return policy, servers, generator

    yield make
    for generator in made:
        generator.close()
        wait_until(lambda: "agentrl-vllm-watch" not in {thread.name for thread in threading.enumerate()})
    for server in servers:
        if server.alive:
            server.die()


def sample(generator, session="s", ids=IDS, params=PARAMS):
    return asyncio.run(generator.sample(session, ids, params))


def change(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_j03_after_every_update_the_servers_logprobs_are_the_trainers(world, tied, generates):
    """An update changes what is sampled, with temperature, top-k and penalty in the logprobs of both sides."""
    policy, _, generator = world(policy=tiny_model("qwen3", tie_word_embeddings=tied), generates=generates)
    for version in range(3):
        change(policy)
        generator.sync(version)
        drawn = sample(generator)
        assert differences(policy, IDS, drawn, PARAMS).max() <= 1e-4
        assert drawn.weights_version == version
        assert generator.max_context == 256
    assert generator.stats.decoded_tokens == 18


def test_the_server_is_paused_while_weights_move_and_forgets_prefixes_of_old_ones(world):
    _, [server], generator = world()
    generator.sync(1)
    paths = [path for path, _ in server.requests]
    update = paths[paths.index("/pause") :]
    assert update[:3] == ["/pause", "/start_weight_update", "/update_weights"]
    assert update[3:6] == ["/finish_weight_update", "/reset_prefix_cache", "/resume"]
    assert server.bodies("/finish_weight_update") == [{"weight_version": "1"}]


def test_no_turn_waits_for_another_ones(world):
    """Invariant 6: each rollout's requests are its own."""
    _, [server], generator = world()
    server.delay = lambda body: 0.6 if body["prompt"][0] == 1 else 0.0
    order = []

    async def turn(first):
        await generator.sample(f"s{first}", [first, 5], PARAMS)
        order.append(first)

    async def play():
        await asyncio.gather(turn(1), turn(2), turn(3))

    asyncio.run(play())
    assert order[-1] == 1


def test_a_rollout_stays_on_one_server_and_servers_share_rollouts(world):
    _, servers, generator = world(2)

    async def play():
        for turn in range(3):
            for session in range(4):
                await generator.sample(f"s{session}", [session + 1, *[5] * turn], PARAMS)

    asyncio.run(play())
    homes = [{body["prompt"][0] for body in server.bodies("/v1/completions")} - {0} for server in servers]
    assert homes == [{1, 3}, {2, 4}]
    generator.release("s0")
    generator.release("s2")
    sample(generator, "s4", [40])
    assert servers[0].bodies("/v1/completions")[-1]["prompt"] == [40]


@pytest.mark.parametrize(
    ("parallel", "engines"),
    [
        ({"data_parallel_size": 3, "data_parallel_size_local": 1}, ["0", "1", "2"]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, ["0", "1"]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_external_lb": True}, [None]),
        ({"data_parallel_size": 1, "data_parallel_size_local": 1}, [None]),
    ],
)
def test_a_rollout_stays_on_one_engine_of_a_server_with_several(world, parallel, engines):
    """`--data-parallel-size`: by itself vLLM would send each turn to another engine, which has not its prefix."""
    _, [server], generator = world(parallel=parallel)
    server.engines_asked.clear()

    async def play():
        for _ in range(2):
            for session in range(3):
                await generator.sample(f"s{session}", IDS, PARAMS)
        return await generator.probe(IDS, PARAMS)

    probes = asyncio.run(play())
    assert server.engines_asked[:3] == (engines * 3)[:3]
    assert server.engines_asked[3:6] == server.engines_asked[:3]
    assert server.engines_asked[6:] == engines, "each engine has weights of its own to be checked"
    assert len(probes) == len(engines)


def test_e07_the_servers_context_is_asked_and_held(world):
    _, _, generator = world(max_model_len=16)
    assert generator.max_context == 16
    with pytest.raises(GenerationError, match="context of 16"):
        sample(generator, ids=list(range(3, 15)))


def test_logprobs_of_another_distribution_are_refused_at_the_start(world):
    """J02, J03."""
    with pytest.raises(ConfigurationError, match="--logprobs-mode processed_logprobs"):
        world(raw=True)


def test_the_servers_words_reach_the_user_and_bad_requests_are_not_repeated(world):
    _, [server], generator = world()
    server.fail("/v1/completions", (400, "Token id 99999 is out of vocabulary"))
    before = len(server.bodies("/v1/completions"))
    with pytest.raises(GenerationError, match=r"'s'.* 400: Token id 99999 is out of vocabulary"):
        sample(generator)
    assert len(server.bodies("/v1/completions")) == before + 1


def test_j04_errors_of_the_servers_own_are_tried_again_so_often(world):
    _, [server], generator = world()
    expected = sample(generator)
    server.fail("/v1/completions", (500, "EngineCore encountered an issue"), DROP, (503, "busy"))
    assert sample(generator) == expected
    server.fail("/v1/completions", *[(500, "EngineCore encountered an issue")] * vllm_server.ATTEMPTS)
    with pytest.raises(GenerationError, match="500: EngineCore encountered an issue"):
        sample(generator)


def test_a_hung_server_is_asked_again(world):
    """G15: of the answer that came too late nothing is used; ids and logprobs are those of one answer."""
    _, [server], generator = world(request_timeout=5.0)
    generator.sync(0)
    expected = sample(generator)
    free, hanging = threading.Event(), iter([True])

    def hang_once(body):
        if next(hanging, False):
            free.wait(LONG)
        return 0.0

    server.delay = hang_once
    assert sample(generator) == expected
    free.set()
    assert len(expected.ids) == len(expected.logprobs) == 6


def test_a_server_without_the_routes_is_refused_with_the_setting_to_add(world, monkeypatch):
    _, [server], _ = world()
    replica = Replica(server.url)
    monkeypatch.setattr("tests.generation.vllm_stub.ROUTES", ["/v1/completions"])
    with pytest.raises(ConfigurationError, match="VLLM_SERVER_DEV_MODE=1"):
        replica.learn()
    with pytest.raises(ConfigurationError, match="no URL"):
        Replica("localhost:8000")


class Broken(PolicyWeights):
    """Describes or sends something else than a policy's weights."""

    def __init__(self, model, how):
        super().__init__(model)
        self.how = how

    def described(self):
        (_, dtype, shape), *rest = super().described()
        return [("nowhere.weight", dtype, shape), *rest] if self.how == "name" else super().described()

    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if self.how == "stops" and number == 3:
                raise RuntimeError("the third tensor is lost")
            yield item


@pytest.mark.parametrize(
    ("how", "words"), [("name", "no module or parameter named 'nowhere.weight'"), ("stops", "the third tensor is lost")]
)
def test_a_failed_transfer_raises_what_went_wrong_and_leaves_a_usable_server(world, how, words):
    policy, [server], generator = world(timeout=5.0)
    generator.sync(1)
    transfer = generator._pushes[0][1]
    good, transfer._weights = transfer._weights, Broken(policy, how)
    change(policy)
    with pytest.raises(GenerationError, match=words):
        generator.sync(2)
    assert [path for path, _ in server.requests if path in ("/pause", "/resume")][-1] == "/resume"
    assert len(sample(generator).ids) == 6
    transfer._weights = good
    generator.sync(3)
    assert differences(policy, IDS, sample(generator), PARAMS).max() <= 1e-4


def test_a_transfer_has_a_time_limit(world):
    _, [server], generator = world(timeout=0.5)
    answer, free = server._weights, threading.Event()
    server._weights = lambda path, body: (free.wait(600), {}) if "init" in path else answer(path, body)
    with pytest.raises(GenerationError, match=r"vllm_server_timeout|had no answer"):
        generator.sync(1)
    assert not free.is_set()
    free.set()


def test_a_killed_server_is_waited_for_gets_its_weights_again_and_the_turn_goes_on(world, caplog):
    policy, [server], generator = world()
    change(policy)
    generator.sync(4)
    expected = sample(generator)

    async def play():
        asked, dead = threading.Event(), threading.Event()
        server.delay = lambda body: asked.set() or dead.wait(LONG) * 0.0
        turn = asyncio.create_task(generator.sample("s", IDS, PARAMS))
        await eventually(asked.is_set)
        await asyncio.to_thread(server.die)
        dead.set()
        await eventually(lambda: "waiting up to" in caplog.text)
        server.delay = lambda body: 0.0
        server.start()
        return await turn

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(play()) == expected
    assert server.version == "4"
    assert "waiting up to 30 s for the server" in caplog.text
    assert "pushing the weights again" in caplog.text
    assert "answers" in caplog.text


def test_a_server_that_comes_back_while_the_policy_is_trained_waits_for_the_next_sync(world):
    policy, [server], generator = world()
    generator.sync(1)
    generator.rest()
    server.die()
    server.start()
    time.sleep(0.3)
    assert server.version == "default"
    change(policy)
    generator.sync(2)
    assert differences(policy, IDS, sample(generator), PARAMS).max() <= 1e-4


def test_with_several_servers_rollouts_of_a_dead_one_move_to_another(world):
    _, servers, generator = world(2)
    generator.sync(0)
    sample(generator, "s")
    servers[0].die()
    assert len(sample(generator, "s").ids) == 6
    assert len(sample(generator, "t").ids) == 6


def test_a_server_that_stays_away_ends_the_run_with_the_setting_to_change(world):
    _, [server], generator = world(timeout=0.4)
    server.die()
    with pytest.raises(GenerationError, match=r"did not come back within 0\.4 s \(vllm_server_timeout\)"):
        sample(generator)
    with pytest.raises(GenerationError, match=r"is not up after 0\.1 s"):
        Replica(server.url).wait_until_up(0.1)


def test_a_cancelled_turn_hangs_up(world):
    _, [server], generator = world()
    asked, free = threading.Event(), threading.Event()
    server.delay = lambda body: asked.set() or free.wait(LONG) * 0.0

    async def play():
        turn = asyncio.create_task(generator.sample("s", IDS, PARAMS))
        await eventually(asked.is_set)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(play())
    free.set()


def test_closed_it_starts_again(world):
    policy, _, generator = world()
    generator.sync(0)
    generator.close()
    change(policy)
    generator.sync(1)
    assert differences(policy, IDS, sample(generator), PARAMS).max() <= 1e-4


def test_weights_have_the_names_of_a_checkpoint_and_adapters_are_merged_exactly():
    """What is sent is what `save_pretrained` of the merged model would write, and the policy is as before."""
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen3", tie_word_embeddings=False)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    policy = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    weights = PolicyWeights(policy)
    sent = {name: value.clone() for name, value in weights}
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert [(n, v.dtype, tuple(v.shape)) for n, v in sent.items()] == weights.described()
    merged = copy.deepcopy(policy).merge_and_unload().state_dict()
    assert sent.keys() == merged.keys() == base.state_dict().keys()
    for name, value in sent.items():
        assert torch.allclose(value, merged[name], atol=1e-6), name


def test_a_mixtures_experts_have_the_names_of_a_checkpoint(tmp_path):
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    size = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3MoeConfig(
        **size, vocab_size=32, num_hidden_layers=1, intermediate_size=16, moe_intermediate_size=8, num_experts=4
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(PolicyWeights(model))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert {name for name, _, _ in PolicyWeights(model).described()} == saved.keys()
