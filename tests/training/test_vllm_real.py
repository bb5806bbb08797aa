"""Trainers on real vLLM, of which a server is killed on the way; skipped without `.venv-vllm`, as in CI."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl.generation.vllm_http import Replica
from agentrl.testing.tokenizers import fix_tokenizer
from agentrl.testing.vllm import ENVIRONMENT, VllmServer, free_port
from agentrl.training.sampler_check import EXACT, UPDATES_CHECKED
from tests.generation.test_vllm_real import BIN, HEADS, ROOT, START_SECONDS, pytestmark  # noqa: F401
from tests.training.runs import logged, make_trainer, rows, small_model
from tests.training.test_vllm import adapted, play
from tests.training.worlds import run_world


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    small_model(**HEADS).save_pretrained(folder / "model")
    fix_tokenizer().save_pretrained(folder / "model")
    with VllmServer(BIN / "vllm", folder / "model", folder) as running:
        Replica(running.url).wait_until_up(START_SECONDS)
        yield running


def options(server: VllmServer, **others: Any) -> dict[str, Any]:
    where = {"vllm_server_base_url": server.url, "vllm_group_port": free_port()}
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": START_SECONDS, **where, **others}


def train(folder: Path, options: dict[str, Any]) -> list[float]:
    """In one process of several: train, and tell the differences between sampler and trainer."""
    trainer = make_trainer("grpo", folder / os.environ["RANK"], model=small_model(**HEADS), generator=None, **options)
    trainer.train()
    return logged(trainer, "sampling/sampling_logp_difference/max")


def test_processes_with_unequally_many_pending_rollouts_get_their_own_tokens_from_a_real_server(server, tmp_path):
    """5 and 3 pending rollouts, then 5 and 0: no process waits for another, no row is mixed up."""
    pending = [(5, 3), (5, 0), (1, 4)]
    first, second = run_world(play, tmp_path, tmp_path, server.url, free_port(), pending, HEADS)
    assert [len(first), len(second)] == [11, 7]
    for version, drawn_by, difference in first + second:
        assert drawn_by == version
        assert difference <= EXACT


def test_two_processes_train_with_a_real_server(server, tmp_path):
    """Their ranks sample on their own, the first one pushes the weights, and both agree with the server."""
    for differences in run_world(train, tmp_path, tmp_path, options(server, max_steps=3)):
        assert len(differences) == 3
        assert max(differences) <= EXACT


@pytest.mark.parametrize("shards", [1, 2])
def test_two_processes_train_with_a_real_engine_each_or_one_for_both(shards, tmp_path):
    """`vllm_tensor_parallel_size` inside the training world; every process samples its own rows from the policy."""
    command = [BIN / "python", "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "tests.generation.vllm_shards_run", tmp_path, str(shards)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for rank in range(2):
        answer = json.loads((tmp_path / f"answer-{rank}").read_text())
        assert answer["shards"] == shards
        assert len(answer["differences"]) == 3
        assert max(answer["differences"]) <= EXACT


def test_of_a_lora_run_a_real_server_gets_adapters_only(tmp_path, monkeypatch):
    small_model(**HEADS).save_pretrained(tmp_path / "model")
    fix_tokenizer().save_pretrained(tmp_path / "model")
    lora = ["--enable-lora", "--max-lora-rank", "8"]
    with VllmServer(BIN / "vllm", tmp_path / "model", tmp_path, lora, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as one:
        Replica(one.url).wait_until_up(START_SECONDS)
        policy, settings = adapted(model=HEADS), options(one, max_steps=3)
        paths, call = [], Replica.call

        def noting(self: Replica, method: str, path: str, *rest: Any, **more: Any) -> Any:
            paths.append(path)
            return call(self, method, path, *rest, **more)

        monkeypatch.setattr(Replica, "call", noting)
        trainer = make_trainer("grpo", tmp_path / "run", model=policy, generator=None, **settings)
        trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= EXACT
    assert paths.count("/v1/load_lora_adapter") == 3
    assert "/update_weights" not in paths


def test_a_real_server_killed_in_the_middle_of_rollouts_costs_nothing_but_time(server, tmp_path, caplog, monkeypatch):
    """The run says so, waits, pushes the weights again, loses no finished turn and ends as it would have."""
    turns: list[int] = []
    ask = Replica.ask

    def after(number: int) -> None:
        """Kill the server when so many turns are finished and others are being sampled."""

        async def counting(self: Replica, client: Any, method: str, path: str, *rest: Any) -> Any:
            reply = await ask(self, client, method, path, *rest)
            if path == "/inference/v1/generate":
                turns.append(len(turns))
                if len(turns) == number:
                    server.kill()
                    threading.Timer(1.0, server.start).start()
            return reply

        monkeypatch.setattr(Replica, "ask", counting)

    settings = options(server, max_steps=3, per_device_train_batch_size=16, max_completion_length=200, dataset=rows(8))
    runs = []
    for name, number in (("calm", 0), ("shaken", 20)):
        turns.clear()
        after(number)
        trainer = make_trainer("grpo", tmp_path / name, model=small_model(**HEADS), generator=None, **settings)
        trainer.train()
        assert len(turns) == 3 * 16 + UPDATES_CHECKED, "each turn was finished once, and the probes were"
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= EXACT
        runs.append(trainer)
    assert f"waiting up to {START_SECONDS:g} s for the server (vllm_server_timeout)" in caplog.text
    assert "pushing the weights again" in caplog.text
    calm, shaken = runs
    assert logged(shaken, "reward") == pytest.approx(logged(calm, "reward"))
    assert logged(shaken, "loss") == pytest.approx(logged(calm, "loss"), abs=1e-5)
