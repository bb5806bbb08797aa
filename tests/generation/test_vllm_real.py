"""Real vLLM on the CPU, in an environment of its own (`make venv-vllm`); without it these are skipped, as in CI."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.pictures import image_block
from agentrl.chat.renderer import Renderer
from agentrl.errors import GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.generation.chat_server import ChatServer, turn_request
from agentrl.generation.vllm_http import Replica
from agentrl.generation.vllm_server import VllmServerGenerator
from agentrl.generation.weight_transfer import GlooChannel, WeightTransfer
from agentrl.generation.weights import PolicyWeights
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import FIX_VOCAB_SIZE, fix_tokenizer
from agentrl.testing.vision import picture
from agentrl.testing.vllm import ENVIRONMENT, VllmServer, free_port
from agentrl.training.sampler_check import differences
from tests.generation.test_vllm_server import Broken, change
from tests.generation.vllm_vision import FAMILY, python_path, seeing, train

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-vllm" / "bin"
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = [140, 150, 160]
PARAMS = SamplingParams(max_tokens=16, temperature=0.7, top_k=40, repetition_penalty=1.2, seed=2**62)
TRUNCATED = [
    dataclasses.replace(PARAMS, top_k=0, top_p=0.8),
    dataclasses.replace(PARAMS, top_k=0, min_p=0.02, repetition_penalty=1.0),
]
START_SECONDS = 600.0
SEEING = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava_next", "internvl"]
"""Families whose images vLLM serves on the CPU."""
BLIND = {"gemma3": "see each other in both directions", "qwen3_5": "CPU GDN attention requires BF16"}
"""Those that it does not, and what it says, or we do where it says nothing."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),  # one engine at a time
    pytest.mark.skipif(not (BIN / "vllm").exists(), reason="no .venv-vllm: make venv-vllm"),
]


@pytest.fixture(scope="module", params=["tied"])
def served(request, tmp_path_factory):
    """A policy and a real server of it; vLLM forgets to renew tied heads on the CPU."""
    tied = request.param == "tied"
    policy = tiny_model("llama", vocab_size=FIX_VOCAB_SIZE, initializer_range=0.1, tie_word_embeddings=tied, **HEADS)
    folder = tmp_path_factory.mktemp("vllm")
    policy.save_pretrained(folder / "model")
    fix_tokenizer().save_pretrained(folder / "model")
    with VllmServer(BIN / "vllm", folder / "model", folder) as running:
        replica = Replica(running.url)
        replica.wait_until_up(START_SECONDS)
        replica.learn()
        yield policy, replica


@pytest.fixture
def policy(served):
    return served[0]


@pytest.fixture
def server(served):
    return served[1]


@pytest.fixture
def generator(policy, server):
    transfer = WeightTransfer(server, PolicyWeights(policy), GlooChannel("127.0.0.1", free_port(), 60.0), 60.0)
    made = VllmServerGenerator([(server, transfer)], sampling=PARAMS)
    yield made
    made.close()


@pytest.mark.parametrize("served", ["tied", "untied"], indirect=True)
def test_a_real_server_samples_from_the_policy_after_every_update(policy, generator, server):
    """J02, J03: with temperature, top-k and a penalty, with top-p and with min-p; over gloo."""
    assert server.dtype == "float32"
    assert generator.exact
    assert generator.max_context == 512
    for version in range(3):
        change(policy)
        generator.sync(version)
        for params in (PARAMS, *TRUNCATED):
            sample = asyncio.run(generator.sample("s", IDS, params))
            assert differences(policy, IDS, sample, params).max() <= 1e-4
            assert sample.weights_version == version
        server.generates = not server.generates  # both routes


def test_a_real_server_survives_a_failed_transfer(policy, generator):
    generator.sync(1)
    transfer = generator._pushes[0][1]
    for how, words in [("name", "nowhere"), ("stops", "the third tensor is lost")]:
        good, transfer._weights = transfer._weights, Broken(policy, how)
        with pytest.raises(GenerationError, match=words):
            generator.sync(2)
        transfer._weights = good
        assert asyncio.run(generator.sample("s", IDS, PARAMS)).ids
    change(policy)
    generator.sync(3)
    sample = asyncio.run(generator.sample("s", IDS, PARAMS))
    assert differences(policy, IDS, sample, PARAMS).max() <= 1e-4


def test_a_real_turn_in_flight_goes_on_across_an_update_and_tells_where(policy, generator, server):
    server.generates = True
    plain = SamplingParams(max_tokens=480)

    async def play(version: int, seconds: float) -> Any:
        turn = asyncio.create_task(generator.sample("s", [140], plain))
        await asyncio.sleep(seconds)
        await asyncio.to_thread(change, policy)
        await asyncio.to_thread(generator.sync, version)
        return await turn

    for version, seconds in enumerate([0.1, 0.3, 0.6, 1.2], 5):  # the machine decides how soon is in the middle
        generator.sync(version * 10)
        sample = asyncio.run(play(version * 10 + 1, seconds))
        if sample.updates:
            break
    assert sample.weights_version == version * 10
    [(start, drawn_by)] = sample.updates
    assert drawn_by == version * 10 + 1
    assert 0 < start < 480
    newer = differences(policy, [140], sample, plain)[start:]
    assert newer.max() <= 1e-4, "what came after the update is of the new weights, as if they had read the whole row"


def test_a_real_server_of_two_engines_gives_both_the_weights_and_asks_the_one_that_is_named(tmp_path):
    """`--data-parallel-size 2`: an engine that was left out, or not asked, would show in its logprobs or be missing."""
    policy = tiny_model("llama", vocab_size=FIX_VOCAB_SIZE, initializer_range=0.1, **HEADS)
    policy.save_pretrained(tmp_path / "model")
    fix_tokenizer().save_pretrained(tmp_path / "model")
    with VllmServer(BIN / "vllm", tmp_path / "model", tmp_path, ["--data-parallel-size", "2"]) as running:
        replica = Replica(running.url)
        replica.wait_until_up(START_SECONDS)
        replica.learn()
        channel = GlooChannel("127.0.0.1", free_port(), START_SECONDS)
        transfer = WeightTransfer(replica, PolicyWeights(policy), channel, START_SECONDS)
        generator = VllmServerGenerator([(replica, transfer)], sampling=PARAMS)
        for version in range(2):
            change(policy)
            generator.sync(version)
            probes = asyncio.run(generator.probe(IDS, PARAMS))
            assert list(probes) == [f"{running.url} (engine 0)", f"{running.url} (engine 1)"]
            for sample in probes.values():
                assert sample.weights_version == version
                assert differences(policy, IDS, sample, PARAMS).max() <= 1e-4
        generator.close()


def answers_of(module: str, *args: Any, environment: Mapping[str, str] = ENVIRONMENT, runs: int = 1) -> list[Any]:
    """Run a module with vLLM's Python; gives what it printed behind `ANSWER`, as JSON."""
    done = subprocess.run(
        [BIN / "python", "-W", "ignore", "-m", module, *args],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=START_SECONDS * runs,
    )
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in lines]


def backend_policy() -> Any:
    """The same in the server's folder and on the trainer's side."""
    return tiny_model("llama", vocab_size=FIX_VOCAB_SIZE, initializer_range=0.1, **HEADS)


def test_vllms_own_backends_bring_the_weights_to_a_real_server(tmp_path):
    """nccl, sparse_nccl and ipc, in parts, after one broke off, too; with stand-ins for NCCL and a GPU's memory."""
    policy = backend_policy()
    policy.save_pretrained(tmp_path / "model")
    fix_tokenizer().save_pretrained(tmp_path / "model")
    extension = ["--worker-extension-cls", "tests.generation.vllm_on_stand_ins.Extension"]
    serializes = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with VllmServer(BIN / "vllm", tmp_path / "model", tmp_path, extension, serializes) as running:
        Replica(running.url).wait_until_up(START_SECONDS)
        [answer] = answers_of("tests.generation.vllm_on_stand_ins", running.url, tmp_path)
    assert list(answer) == ["nccl", "sparse_nccl", "ipc", "nccl of adapters"]
    for name, found in answer.items():
        assert len(found["off"]) == 4, name
        assert max(found["off"]) <= 1e-4, name
        assert "the third tensor is lost" in found["failed"], name
    everything = sum(parameter.numel() for parameter in policy.parameters())
    assert answer["sparse_nccl"]["sent"] == [everything, everything, 2 * HEADS["hidden_size"], everything]
    assert answer["ipc"]["parts"][0] > 2
    assert answer["sparse_nccl"]["parts"][0] > 2 > answer["sparse_nccl"]["parts"][2]


def seeing_environment(family: str, folder: Path) -> dict[str, str]:
    return ENVIRONMENT | {"PYTHONPATH": f"{python_path(folder / 'path')}{os.pathsep}{ROOT}", FAMILY: family}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By family, what came of training with an engine in the process."""
    folder = tmp_path_factory.mktemp("seen")
    environment = seeing_environment(SEEING[0], folder)
    families = [*SEEING, *BLIND]
    return dict(
        answers_of("tests.generation.vllm_vision", folder, *families, environment=environment, runs=len(families))
    )


@pytest.mark.parametrize("family", SEEING)
def test_a_real_engine_in_the_process_sees_what_the_trainer_sees(family, seen):
    """Rows with pictures, the same one twice and none: logprobs agree after every update of the vision tower."""
    differences = seen[family]
    assert len(differences) == 4, differences
    assert max(differences) <= 1e-4


@pytest.mark.parametrize("family", BLIND)
def test_what_vllm_cannot_serve_on_the_cpu_ends_with_a_reason(family, seen):
    """Nothing is trained on rows that were sampled otherwise; docs/vllm.md has the table."""
    assert BLIND[family] in seen[family]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_a_real_server_sees_what_the_trainer_sees(family, tmp_path):
    """The same over HTTP: token ids and pixels are the trainer's; SmolVLM's go tile by tile.

    A chat has the pictures themselves, and vLLM renders it; with Qwen2.5-VL it reads as many tokens as we would give.
    """
    model, processor = seeing(family)
    model.save_pretrained(tmp_path / "model")
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.save_pretrained(tmp_path / "model")
    options = ["--limit-mm-per-prompt", '{"video": 0}', "--skip-mm-profiling", "--no-mm-device-do-normalize"]
    environment = seeing_environment(family, tmp_path)
    with VllmServer(BIN / "vllm", tmp_path / "model", tmp_path, options, environment) as running:
        where = {"vllm_server_base_url": running.url, "vllm_group_port": free_port()}
        differences = train(family, tmp_path, vllm_mode="server", vllm_server_timeout=START_SECONDS, **where)
        asked = [["What?"], [1, "What?"], [2, "What?"]] if family == "qwen2_5_vl" else []
        chats = [asyncio.run(chat(running.url, processor, content)) for content in asked]
    assert len(differences) == 4
    assert max(differences) <= 1e-4
    for told, rendered, _ in chats:
        assert told == rendered
    assert len({told for *_, told in chats}) == len(asked), "each picture is seen"


async def chat(url: str, processor: Any, content: list[Any]) -> tuple[int, int, str]:
    """Ask for a turn: tokens of the prompt by the server and by our renderer, and what was sampled."""
    blocks = [{"type": "text", "text": it} if isinstance(it, str) else image_block(picture(it)) for it in content]
    prompt = [{"role": "user", "content": blocks}]
    server = ChatServer(url)
    try:
        said = server._said[server.encode_prompt(prompt, None).ids[0]]
        body = turn_request(server.model, said.messages, [], SamplingParams(max_tokens=4, seed=1))
        reply = await server.ask("chat/completions", body | {"logprobs": True})
    finally:
        server.close()
    rendered = len(Renderer(processor).encode_prompt(prompt, None).ids)
    return reply["usage"]["prompt_tokens"], rendered, json.dumps(reply["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize(("head", "implementation"), [("tied", "vllm"), ("untied", "vllm"), ("tied", "transformers")])
def test_a_real_engine_in_the_process_samples_from_the_policy(head, implementation, tmp_path):
    """With vLLM's older transformers; sleeping is on, which does nothing on the CPU."""
    [answer] = answers_of("tests.generation.vllm_colocated_run", tmp_path, head, implementation)
    assert max(answer["logp_difference"]) <= 1e-4
    assert len(answer["logp_difference"]) == 3
    assert max(answer["after_updates"]) <= 1e-4
    assert answer["max_context"] == 512
    assert answer["in_flight"]["waited"] is False
    assert answer["in_flight"]["short"] == 4
    assert answer["in_flight"]["first"] == 2
    [(start, version)] = answer["in_flight"]["updates"]
    assert 0 < start < 400
    assert version == 7
