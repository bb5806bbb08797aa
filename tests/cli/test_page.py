"""Every command of docs/cli.md is run as it is printed, with a tiny model, and few short episodes or steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.typing_commands import run, save_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
SHORT = {"rollout": ["--max-completion-length", "8", "-n", "2", "--group", "2"]}
SHORT["train"] = ["--max_steps", "1", "--max_completion_length", "8", "--use_cpu", "--no_journal", "--quiet"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("page") / "model")


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page_runs(line, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "run.yaml").write_text(f"model: {model}\nenv: examples/counter.py:Counter\noutput_dir: kept\n")
    program, command, *rest = shlex.split(line.replace("Qwen/Qwen3-0.6B", str(model)))
    assert program == "agentrl"
    if "--resume" in rest:  # there is nothing to resume from yet
        assert run(command, *rest, *SHORT[command])[0] == 2
        rest.remove("--resume")
    code, _, complaint = run(command, *rest, *SHORT.get(command, []))
    assert code == 0, complaint


def test_the_page_has_commands():
    assert {line.split()[1] for line in LINES} == {"check", "rollout", "train"}
