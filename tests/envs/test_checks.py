"""`agentrl check` passes on the environments that are named by a scheme, with the servers of the other tests."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.cli.typing_commands import run
from tests.envs.harbor.writing import write_task
from tests.envs.servers import OPENENV

pytestmark = OPENENV


def check(env, *arguments):
    code, text, complaint = run("check", "--env", env, *arguments, "--json")
    assert code == 0, text + complaint
    found = {finding["check"]: finding["status"] for finding in json.loads(text)}
    assert {"tools", "episodes", "reward", "seed"} <= found.keys()
    return found


def test_an_openenv_server_passes(start_openenv):
    assert check(f"openenv:{start_openenv('guess').url}")["leaks"] == "pass"


def test_an_ors_server_passes(start_ors):
    assert check(f"ors:{start_ors('guess').url}")["leaks"] == "pass"


@pytest.mark.slow
def test_harbor_tasks_pass(tmp_path):
    if shutil.which("bwrap") is None and os.environ.get("AGENTRL_REQUIRE_SERVICES") != "1":
        pytest.skip("bwrap is not installed")
    write_task(tmp_path / "hello", dockerfile=None)
    assert check(f"harbor:{tmp_path}", "--groups", 1, "--group", 2)["close"] == "pass"


def test_a_gymnasium_environment_passes():
    assert check("gym:FrozenLake-v1")["leaks"] == "pass"


def test_a_shipped_environment_passes():
    assert check("agentrl.envs:PlotReading")["leaks"] == "pass"
