"""Every command of docs/cli.md and of the tutorial runs as it is printed, with a tiny model and few short episodes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.typing_commands import run, save_model
from tests.generation.openai_stub import says, serving

ROOT = Path(__file__).parents[2]
SHORT = {"rollout": ["--max-completion-length", "8", "-n", "2", "--group", "2"]}
SHORT["train"] = ["--max_steps", "1", "--max_completion_length", "8", "--use_cpu", "--no_journal", "--quiet"]


def commands(name: str, language: str = "bash") -> list[str]:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("page") / "model")


@pytest.fixture
def here(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def openai() -> Iterator[str]:
    """Stands for OpenAI's server."""
    with serving() as server:
        server.policy = lambda body: says("I am done.")
        yield server.url


@pytest.mark.parametrize("line", commands("cli.md"))
def test_a_command_of_the_page_runs(line, model, here, openai):
    line = line.replace("https://api.openai.com", openai).replace("gpt-4.1-mini", "clever")
    (here / "run.yaml").write_text(f"model: {model}\nenv: examples/counter.py:Counter\noutput_dir: kept\n")
    (here / "questions.jsonl").write_text('{"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}\n' * 2)
    program, command, *rest = shlex.split(line.replace("Qwen/Qwen3-0.6B", str(model)))
    assert program == "agentrl"
    if "--resume" in rest:  # there is nothing to resume from yet
        assert run(command, *rest, *SHORT[command])[0] == 2
        rest.remove("--resume")
    code, _, complaint = run(command, *rest, *SHORT.get(command, []))
    assert code == 0, complaint


def test_the_page_has_commands():
    assert {line.split()[1] for line in commands("cli.md")} == {"check", "rollout", "train"}


def test_the_commands_of_the_tutorial_run_one_after_the_other(model, here, monkeypatch):
    """With a tiny model in the place of that which `examples/counter.py --start` makes."""
    monkeypatch.setitem(sys.modules, "counter", None)  # the name of an example too, which other tests import
    (here / "counter.py").write_text("\n".join(commands("tutorial.md", "python")))
    (here / "runs").mkdir()
    (here / "runs/start").symlink_to(model)
    seen = []
    for line in commands("tutorial.md"):
        program, command, *rest = shlex.split(line)
        if program == "python":
            assert [command, *rest] == ["examples/counter.py", "--start", "runs/start"]
            continue
        seen.append(command)
        batches = ["--per_device_train_batch_size", "8"] if command == "train" else []
        code, _, complaint = run(command, *rest, *SHORT.get(command, []), *batches)
        assert code == 0, complaint
    assert seen == ["check", "rollout", "train", "rollout"]
