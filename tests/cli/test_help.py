"""Help fits a screen and loads nothing heavy; every command has an exit code for what was mistyped; completion."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app

HEAVY = {"torch", "transformers", "datasets", "accelerate", "numpy", "PIL", "pyarrow", "httpx", "docker"}
COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)
SCREEN = (100, 50)


def test_importing_agentrl_loads_no_heavy_module():
    code = "import sys, agentrl; dir(agentrl); print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "agentrl" in loaded
    assert not {*HEAVY, "typer", "rich"} & set(loaded)


def test_help_loads_no_heavy_module():
    """Seconds depend on the machine, modules do not."""
    code = (
        "import sys; from typer.testing import CliRunner; from agentrl.cli.main import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; print(*{m.split('.')[0] for m in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "typer" in loaded
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(command):
    width, height = SCREEN
    arguments = [command, "--help"] if command else ["--help"]
    result = CliRunner(env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}).invoke(app, arguments)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) <= height, result.stdout


def test_the_commands_are_there():
    assert {"train", "options", "check", "rollout", "replay", "export"} <= set(COMMANDS)
    assert CliRunner().invoke(app, ["trane"]).exit_code == 2


def test_shells_can_complete():
    environment = {"_AGENTRL_COMPLETE": "complete_bash", "COMP_WORDS": "agentrl ro", "COMP_CWORD": "1"}
    result = CliRunner(env=environment).invoke(app, prog_name="agentrl")
    assert result.stdout.split() == ["rollout"]


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "agentrl", "options", "--help"]
    assert "Usage" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
