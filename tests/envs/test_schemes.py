"""Environments that are named by a scheme are checked and trained on, with the servers of the other tests."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typing_commands import run, save_model
from tests.envs.harbor.writing import write_task
from tests.envs.servers import OPENENV

pytestmark = OPENENV


def check(env: str, *arguments: Any) -> dict[str, str]:
    code, text, complaint = run("check", "--env", env, *arguments, "--json")
    assert code == 0, text + complaint
    found = {finding["check"]: finding["status"] for finding in json.loads(text)}
    assert {"tools", "episodes", "reward", "seed"} <= found.keys()
    return found


def train(env: str, folder: Path) -> None:
    model = save_model(folder / "model")
    small = ["--use_cpu", "--num_generations", 2, "--per_device_train_batch_size", 2, "--max_completion_length", 8]
    options = ["--max_steps", 1, "--output_dir", folder / "run", "--quiet", "--json"]
    code, text, complaint = run("train", "--env", env, "--model", model, *small, *options)
    assert code == 0, complaint
    assert json.loads(text)["step"] == 1
    assert complaint.startswith(f"run: {folder / 'run'}\n")


def test_an_openenv_server(start_openenv, tmp_path):
    env = f"openenv:{start_openenv('guess').url}"
    assert check(env)["leaks"] == "pass"
    train(env, tmp_path)


def test_an_ors_server(start_ors, tmp_path):
    url = f"ors:{start_ors('guess').url}"
    code, _, complaint = run("check", "--env", url)
    assert (code, "the environment has ['train', 'hard']; name one" in complaint) == (2, True)
    env = f"{url}#train"
    assert check(env)["leaks"] == "pass"
    train(env, tmp_path)


@pytest.mark.slow
def test_harbor_tasks(tmp_path):
    if shutil.which("bwrap") is None and os.environ.get("AGENTRL_REQUIRE_SERVICES") != "1":
        pytest.skip("bwrap is not installed")
    write_task(tmp_path / "tasks/hello", dockerfile=None)
    env = f"harbor:{tmp_path}/tasks"
    assert check(env, "--groups", 1, "--group", 2)["close"] == "pass"
    train(env, tmp_path)


def test_a_gymnasium_environment(tmp_path):
    assert check("gym:FrozenLake-v1")["leaks"] == "pass"
    train("gym:FrozenLake-v1", tmp_path)


def test_a_shipped_environment():
    assert check("agentrl.envs:PlotReading")["leaks"] == "pass"
