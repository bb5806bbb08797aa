"""The verdicts are those of the official package, whose answers to these tasks are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.envs import Harbor
from tests.envs.harbor.playing import Verdict, play
from tests.envs.harbor.writing import KNOWN
from tests.envs.sandbox.conftest import docker_backend, local_backend

FAST = ("ok", "json", "multi-gate", "separate", "stale")
NEEDS_IMAGES = ("badbuild",)


def assert_official(name: str, verdict: Verdict) -> None:
    """Assert that a verdict is the recorded one."""
    known = KNOWN[name]
    assert verdict.fault is known.fault, verdict
    assert (verdict.rewards or None) == known.rewards, verdict
    assert verdict.late == (known.error == "AgentTimeoutError")


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_verdicts_in_docker_are_the_official_ones(name: str, tmp_path: Path) -> None:
    backend = docker_backend()
    key = "accuracy" if name == "json-noreward-key" else "reward"
    harbor = Harbor(KNOWN[name].write(tmp_path / name), backend=backend, reward_key=key)
    assert_official(name, play(harbor, KNOWN[name].acts))
    backend.client.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in KNOWN if name not in NEEDS_IMAGES],
)
def test_verdicts_in_the_local_sandbox_are_the_official_ones(name: str, tmp_path: Path) -> None:
    key = "accuracy" if name == "json-noreward-key" else "reward"
    harbor = Harbor(KNOWN[name].write(tmp_path / name), backend=local_backend(), reward_key=key)
    assert_official(name, play(harbor, KNOWN[name].acts))
