"""Through the package `harbor`: its registry, its environments. Played in an interpreter that has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.harbor import HarborBackend, download
from agentrl.errors import ConfigurationError
from tests.envs.harbor.writing import KNOWN

ROOT = Path(__file__).parents[3]

PLAYED = [name for name in KNOWN if name != "atimeout"]  # whose agent has two seconds, which starting it may take here


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    """What `package_play.py` found, with tasks whose official verdicts are known."""
    python = Path(os.environ.get("AGENTRL_HARBOR_PYTHON", ROOT / ".venv-harbor/bin/python"))
    if not python.exists():
        pytest.skip(f"{python} is not there; run `make harbor` (AGENTRL_HARBOR_PYTHON)")
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    command = [str(python), "-m", "tests.envs.harbor.package_play", *PLAYED]
    environment = {**os.environ, "HARBOR_TELEMETRY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_verdicts_in_an_environment_of_harbor_are_the_official_ones(name: str, played: dict[str, Any]) -> None:
    known = KNOWN[name]
    rewards, fault, error = played["verdicts"][name]
    assert fault == (known.fault and known.fault.name), error
    assert rewards == (known.rewards and dict(known.rewards)), error


@pytest.mark.slow
def test_an_environment_of_harbor_is_a_sandbox_like_the_others(played: dict[str, Any]) -> None:
    """Deadlines, input, output limits, cancelled commands and files, of which Harbor's own interface has little."""
    found = played["sandbox"]
    assert found["said"] == [3, "hi 1 2 /work\n", "no\n"]
    assert found["late"] == [True, 137]
    assert found["long"] == [True, True]
    assert found["cancelled"] == [True, ""], "nothing of a cancelled command goes on"
    assert found["folder"] == "1,2"
    assert found["errors"] == {
        "missing": "FileNotFoundError",
        "data": "IsADirectoryError",
        "data/deep/numbers": "ValueError",
    }
    assert found["home"] == "/app"


@pytest.mark.slow
def test_environments_of_harbor_are_stopped(played: dict[str, Any]) -> None:
    assert played["open"] == 0


@pytest.mark.slow
def test_datasets_are_fetched_by_harbor(played: dict[str, Any]) -> None:
    assert played["downloaded"] == ["one", "two"]


@pytest.mark.slow
def test_what_harbor_cannot_do_is_refused_before_training_starts(played: dict[str, Any]) -> None:
    credentials, unknown, network, registry = played["refused"]
    assert "DAYTONA_API_KEY" in credentials
    assert "'nowhere'" in unknown
    assert "network_mode='no-network' is not supported" in network
    assert "cannot fetch 'set@1'" in registry


def test_without_the_package_harbor_it_says_what_to_install() -> None:
    try:
        import harbor  # noqa: F401
    except ImportError:
        for use in (lambda: HarborBackend("daytona"), lambda: download("set@1")):
            with pytest.raises(ConfigurationError, match=r"pip install harbor, with Python 3\.12"):
                use()
    else:
        pytest.skip("it is installed here")
