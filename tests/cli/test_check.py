"""`agentrl check` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.typing_commands import COUNTER, run, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    (folder / "clicks.py").write_text(COUNTER)
    save_model(folder / "model")
    return folder


def test_a_good_environment_and_a_good_model_pass(folder):
    code, text, _ = run("check", "--env", f"{folder}/clicks.py:Counter", "--model", folder / "model", "--json")
    found = {finding["check"]: finding["status"] for finding in json.loads(text)}
    assert code == 0
    assert set(found.values()) <= {"pass", "warn"}
    assert {"seed", "leaks", "template", "parsing", "context", "memory"} <= found.keys()


def test_what_fails_is_shown_with_what_to_do_and_exits_with_1(folder):
    leaking = COUNTER.replace("        self.value = 0\n", "").replace("replayable = True", "value = 0")
    (folder / "leaking.py").write_text(leaking)
    code, text, _ = run("check", "--env", f"{folder}/leaking.py:Counter")
    assert code == 1
    assert "fail  leaks " in text
    assert "-> set in `reset` all that an episode changes" in text
    assert "1 fail" in text


def test_what_is_mistyped_exits_with_2(folder):
    for arguments, said in [
        ([], "name an environment"),
        (["--env", f"{folder}/clicks.py:Counter", "--group", 1], "--group 1"),
        (["--model", folder / "nothing"], "no tokenizer could be loaded"),
        (["--tool", f"{folder}/clicks.py:length"], "goes with --dataset"),
        (["--env", f"{folder}/clicks.py:random"], "is a module, which cannot be called"),
    ]:
        code, _, complaint = run("check", *arguments)
        assert (code, said in complaint) == (2, True), complaint
