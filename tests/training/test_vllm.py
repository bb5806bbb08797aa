"""Trainers on vLLM's server mode, against a server that speaks its protocol; and which settings make sense."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from agentrl import GRPOConfig, RLOOConfig
from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation import vllm_server
from agentrl.generation.base import SamplingParams
from agentrl.generation.vllm_images import require_known
from agentrl.testing.tokenizers import fix_tokenizer
from agentrl.testing.vision import tiny_vision
from agentrl.testing.vllm import free_port
from agentrl.training.sampler_check import EXACT, differences, judge
from agentrl.training.vllm import vllm_generator
from tests.generation.vllm_stub import StubServer
from tests.training.runs import logged, make_config, make_trainer, rows, small_model
from tests.training.shards import make_sharded
from tests.training.test_sharded import held_by_sampler
from tests.training.worlds import run_world


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(vllm_server, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.05)
    made = StubServer(small_model(), max_model_len=64)
    yield made
    if made.alive:
        made.die()


def options(server: StubServer, **others: Any) -> dict[str, Any]:
    url = {"vllm_server_base_url": server.url, "vllm_group_port": free_port(), "vllm_server_timeout": 20.0}
    return {"use_vllm": True, "vllm_mode": "server", **url, **others}


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_run_samples_from_the_policy_after_every_update(algorithm, server, tmp_path):
    """Invariant 3: sampler and trainer agree on every token of every step, though the weights change."""
    more = {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.1, "max_steps": 3}
    trainer = make_trainer(algorithm, tmp_path, generator=None, **options(server, **more))
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert len(logged(trainer, "sampling/sampling_logp_difference/max")) == 3
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= EXACT
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert [body["weight_version"] for body in server.bodies("/finish_weight_update")] == ["0", "1", "2"]
    assert trainer.collector.engine.limits.max_context == 64, "the server's, not the config's"


def test_a_server_that_keeps_old_weights_ends_the_run(server, tmp_path):
    """An update that answers 200 and changes nothing is noticed at the next one."""
    server.stale = True
    trainer = make_trainer("grpo", tmp_path, generator=None, **options(server, max_steps=5))
    with pytest.raises(GenerationError, match="does not sample from the policy"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_the_bound_is_exact_in_float32_and_rough_otherwise():
    judge({"a": torch.tensor([1e-5, 9e-5])}, exact=True)
    judge({"a": torch.tensor([0.1, 0.2])}, exact=False)
    for values, exact in [([0.0, 2e-4], True), ([0.1, 0.5], False), ([0.0, torch.nan], True)]:
        with pytest.raises(GenerationError, match="a does not sample from the policy"):
            judge({"a": torch.tensor(values)}, exact=exact)


def test_a_server_killed_in_the_middle_of_a_run_costs_nothing_but_time(server, tmp_path, caplog):
    """Finished turns are kept, weights are pushed again, and the run ends as it would have."""

    def rewarding(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [(sum(ids) % 11) / 10 for ids in completion_ids]

    settings = options(server, max_steps=3)
    calm = make_trainer("grpo", tmp_path / "calm", reward=rewarding, generator=None, **settings)
    calm.train()
    server.die()
    server.start()
    asked = []

    def delay(body: dict[str, Any]) -> float:
        asked.append(body)
        if len(asked) == 8:  # in the second step

            def restart() -> None:
                server.die()
                server.start()

            threading.Thread(target=restart, daemon=True).start()
            return 0.5
        return 0.0

    server.delay = delay
    shaken = make_trainer("grpo", tmp_path / "shaken", reward=rewarding, generator=None, **settings)
    shaken.train()
    assert "pushing the weights again" in caplog.text
    assert logged(shaken, "reward") == pytest.approx(logged(calm, "reward"))
    assert logged(shaken, "loss") == pytest.approx(logged(calm, "loss"), abs=1e-5)


class AfterAStep(TrainerCallback):
    """Sets an event after the first optimizer step."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.event.set()


def test_a_server_that_dies_between_two_updates_gets_the_weights_before_the_next_one(server, tmp_path):
    """With `weight_sync_steps` the trainer waits for rollouts also in steps that hand no weights over."""
    stepped, lock, dataset = AfterAStep(), threading.Lock(), rows(8)
    second_window = fix_tokenizer()(dataset["prompt"][2:4])["input_ids"]

    def delay(body: dict[str, Any]) -> float:
        if body["prompt"] in second_window:
            stepped.event.wait(60)
            with lock:
                if server.life == 1:
                    server.die()
                    server.start()
        return 0.0

    server.delay = delay
    pace = {"max_steps": 4, "max_staleness": 1, "weight_sync_steps": 2, "shuffle_dataset": False, "dataset": dataset}
    settings = options(server, **pace, keywords={"callbacks": [stepped]})
    trainer = make_trainer("async_grpo", tmp_path, generator=None, **{**settings, "vllm_server_timeout": 60.0})
    trainer.train()
    assert trainer.state.global_step == 4
    assert server.life == 2
    versions = [body["weight_version"] for body in server.bodies("/finish_weight_update")]
    assert versions == ["0", "0", "2"]
    assert max(logged(trainer, "async/staleness/max")) <= 1


def play(folder: Path, url: str, port: int, pending: list[tuple[int, int]], model: dict[str, Any]) -> list[Any]:
    """In one process of several: sample as many turns as are pending here, round by round."""
    rank = int(os.environ["RANK"])
    policy = small_model(**model)
    args = make_config(
        "grpo", folder, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, vllm_group_port=port
    )
    params = SamplingParams(max_tokens=5, temperature=0.8)
    generator = vllm_generator(args, policy, params, {})
    answers = []
    for version, counts in enumerate(pending):
        with torch.no_grad():
            for number, parameter in enumerate(policy.parameters()):
                parameter.add_(0.01 * (version + 1) * (number % 3))
        torch.distributed.barrier()  # in a training, the optimizer step: nobody is at the last round's turns any more
        generator.sync(version)

        async def rounds(count: int = counts[rank], version: int = version) -> list[Any]:
            turns = [generator.sample(f"{version}/{i}", [140 + rank, 150 + i], params) for i in range(count)]
            return await asyncio.gather(*turns)

        for i, sample in enumerate(asyncio.run(rounds())):
            ids = [140 + rank, 150 + i]
            answers.append((version, sample.weights_version, float(differences(policy, ids, sample, params).max())))
    generator.close()
    return answers


def test_processes_with_unequally_many_pending_rollouts_get_their_own_tokens(server, tmp_path):
    """5 and 3 pending rollouts, then 5 and 0: no process waits for another, no row is mixed up."""
    first, second = run_world(play, tmp_path, tmp_path, server.url, free_port(), [(5, 3), (5, 0), (1, 4)], {})
    assert [len(first), len(second)] == [11, 7]
    for version, drawn_by, difference in first + second:
        assert drawn_by == version
        assert difference <= EXACT


def train_in_pieces(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """In one process of several that share the policy's weights."""
    trainer = make_sharded("fsdp2", "grpo", folder, generator=None, per_device_train_batch_size=2, **settings)
    trainer.train()
    assert trainer.collector._whole is not None
    copy_device = {parameter.device.type for parameter in trainer.collector._whole.model.parameters()}
    return {
        "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
        "held": held_by_sampler(trainer),
        "where": copy_device,
    }


@pytest.mark.slow
def test_weights_in_pieces_are_whole_in_the_memory_of_one_process_alone(server, tmp_path):
    """So a server may sample from a model that fits on no device of the trainer; it gets the weights again, too."""
    asked = []

    def delay(body: dict[str, Any]) -> float:
        asked.append(body)
        if len(asked) != 8:  # in the second step
            return 0.0
        server.die()
        server.start()
        return 0.1

    server.delay = delay
    settings = options(server, max_steps=3, vllm_server_timeout=120.0)
    first, second = run_world(train_in_pieces, tmp_path, tmp_path, settings)
    for result in (first, second):
        assert len(result["differences"]) == 3
        assert max(result["differences"]) <= EXACT
        assert result["where"] == {"cpu"}
    whole = sum(parameter.numel() for parameter in small_model().parameters())
    assert [first["held"], second["held"]] == [whole, 0]
    assert len(server.bodies("/init_weight_transfer_engine")) == 2, "the server came back without weights"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vllm_mode": "remote"}, "vllm_mode"),
        ({"vllm_model_impl": "jax"}, "vllm_model_impl"),
        ({"vllm_server_timeout": 0}, "vllm_server_timeout"),
        ({"vllm_request_timeout": None}, "vllm_request_timeout"),
        ({"vllm_server_port": 70000}, "vllm_server_port"),
        ({"vllm_group_port": 0}, "vllm_group_port"),
        ({"vllm_gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization"),
        ({"vllm_max_model_length": 0}, "vllm_max_model_length"),
        ({"vllm_tensor_parallel_size": 2, "use_vllm": True}, "does not divide the 1 processes"),
        ({"use_vllm": True, "use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ({"use_vllm": True, "cache_implementation": "static"}, "cache_implementation"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode"),
    ],
)
@pytest.mark.parametrize("cls", [GRPOConfig, RLOOConfig])
def test_settings_of_vllm_that_make_no_sense_are_refused(cls, settings, words, tmp_path):
    with pytest.raises(ConfigurationError, match=words):
        cls(str(tmp_path), use_cpu=True, num_generations=2, **settings)


def test_a_regular_expression_is_for_runs_that_do_not_correct_the_sampler(tmp_path):
    """Sampler and trainer score other distributions then, which is no error to be corrected."""
    settings = {"use_vllm": True, "vllm_structured_outputs_regex": "[0-9]+", "num_generations": 2, "use_cpu": True}
    with pytest.raises(ConfigurationError, match="vllm_importance_sampling_correction=False"):
        GRPOConfig(str(tmp_path), **settings)
    GRPOConfig(str(tmp_path), **settings, vllm_importance_sampling_correction=False)
    RLOOConfig(str(tmp_path), **settings)


def test_the_regular_expression_and_further_parameters_reach_the_server(server, tmp_path):
    more = {"vllm_structured_outputs_regex": "[a-z]+", "vllm_importance_sampling_correction": False, "max_steps": 1}
    trainer = make_trainer(
        "grpo", tmp_path, generator=None, **options(server, **more, generation_kwargs={"min_tokens": 1})
    )
    trainer.train()
    bodies = server.bodies("/v1/completions")[1:]
    assert bodies
    assert all(body["structured_outputs"] == {"regex": "[a-z]+"} and body["min_tokens"] == 1 for body in bodies)


def test_without_vllm_colocate_says_what_is_missing(tmp_path):
    pytest.importorskip("torch")
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigurationError, match="needs vllm in this environment"):
            make_trainer("grpo", tmp_path, generator=None, use_vllm=True)
    else:
        pytest.skip("vllm is installed here")


def test_quantized_weights_are_refused(server, tmp_path, monkeypatch):
    policy = small_model()
    policy.is_quantized = True
    args = make_config("grpo", tmp_path, **options(server))
    with pytest.raises(ConfigurationError, match="quantized"):
        vllm_generator(args, policy, SamplingParams(max_tokens=1), {})


COLOCATE = {
    "vllm_model_impl": ("model_impl", "transformers"),
    "vllm_gpu_memory_utilization": ("memory_share", 0.7),
    "vllm_max_model_length": ("max_context", 77),
    "vllm_tensor_parallel_size": ("tensor_parallel_size", 1),
    "vllm_enable_sleep_mode": ("sleeps", True),
    "vllm_structured_outputs_regex": ("regex", "a+"),
}
SERVER = {
    "vllm_server_timeout": ("timeout", 33.0),
    "vllm_request_timeout": ("request_timeout", 44.0),
    "vllm_structured_outputs_regex": ("regex", "a+"),
}
ADDRESSES = ["vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port"]


def recorded(monkeypatch: Any, module: str, name: str) -> dict[str, Any]:
    """Put a recorder of keywords in place of a class."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(f"{module}.{name}", lambda *args, **keywords: found.update(keywords) or found)
    return found


def test_every_argument_of_vllm_is_used(server, tmp_path, monkeypatch, caplog):
    """Each of them reaches the generator of its mode; one of the other mode is said to do nothing."""
    asked = {name for name in (f.name for f in dataclasses.fields(GRPOConfig)) if name.startswith("vllm_")}
    asked -= {name for name in asked if name.startswith("vllm_importance_sampling")}  # tests/training/test_policy_loss
    assert asked == {"vllm_mode", *COLOCATE, *SERVER, *ADDRESSES}

    def made(**settings: Any) -> None:
        args = make_config("grpo", tmp_path, use_vllm=True, vllm_importance_sampling_correction=False, **settings)
        vllm_generator(args, small_model(), SamplingParams(max_tokens=1), {})

    found = recorded(monkeypatch, "agentrl.generation.vllm_colocate", "VllmColocateGenerator")
    made(vllm_mode="colocate", **{name: value for name, (_, value) in COLOCATE.items()})
    assert {word: found[word] for word, _ in COLOCATE.values()} == dict(COLOCATE.values())
    made(vllm_mode="colocate", vllm_server_port=1234)
    assert "nothing comes of vllm_server_port" in caplog.text

    found = recorded(monkeypatch, "agentrl.training.vllm", "VllmServerGenerator")
    channels: list[Any] = []
    monkeypatch.setattr("agentrl.training.vllm.GlooChannel", lambda *args: channels.append(args))
    values = {name: value for name, (_, value) in SERVER.items()}
    made(vllm_mode="server", vllm_server_host="localhost", vllm_server_port=server.port, vllm_group_port=5, **values)
    made(vllm_mode="server", vllm_server_base_url=server.url, vllm_group_port=6, **values)
    assert {word: found[word] for word, _ in SERVER.values()} == dict(SERVER.values())
    assert [port for _, port, _ in channels] == [5, 6]
    made(vllm_mode="server", vllm_server_base_url=server.url, vllm_gpu_memory_utilization=0.5)
    assert "nothing comes of vllm_gpu_memory_utilization" in caplog.text


def test_images_of_families_that_vllm_would_read_otherwise_are_refused(tmp_path):
    """vLLM's attention on the CPU knows no tokens that see those behind them, and says nothing."""
    model, processor = tiny_vision("gemma3")
    processor.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(ConfigurationError, match="see each other in both directions"):
        vllm_generator(make_config("grpo", tmp_path, use_vllm=True), model, SamplingParams(max_tokens=1), {}, processor)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_qwen3_that_vllm_would_place_otherwise_is_refused(family):
    """Found with a real engine: the logprobs of rows with pictures were 0.4 apart, those of text were not."""
    model, _ = tiny_vision(family)
    with pytest.raises(ConfigurationError, match="mrope_interleaved"):
        require_known(model)
    model.config.text_config.rope_parameters["mrope_interleaved"] = True
    require_known(model)


def test_images_need_the_route_that_takes_token_ids_and_pixels(server, tmp_path):
    """Any other route of vLLM reads pictures by itself."""
    model, processor = tiny_vision("qwen2_5_vl")
    args = make_config("grpo", tmp_path, **options(server))
    with pytest.raises(ConfigurationError, match="--enable-scale-out"):
        vllm_generator(args, model, SamplingParams(max_tokens=1), {}, processor)
    server.generates = True
    with pytest.raises(ConfigurationError, match="--no-mm-device-do-normalize"):
        vllm_generator(args, model, SamplingParams(max_tokens=1), {}, processor)
    server.normalizes = False
    vllm_generator(args, model, SamplingParams(max_tokens=1), {}, processor).close()
