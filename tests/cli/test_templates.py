"""`agentrl templates` as it is typed: what it prints, and its exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from agentrl.chat.families import FAMILIES
from agentrl.cli.main import app
from agentrl.testing.tokenizers import qwen_like_tokenizer


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["templates", *arguments])
    return result.exit_code, result.output


def test_list_names_every_family():
    code, text = run("list")
    assert code == 0
    assert [line.split("  ")[0] for line in text.splitlines()] == [family.name for family in FAMILIES]
    code, text = run("list", "--json")
    assert [row["family"] for row in json.loads(text)] == [family.name for family in FAMILIES]


def test_show_prints_a_training_template():
    code, text = run("show", "qwen3")
    assert code == 0
    assert "<|im_start|>" in text
    assert run("show", "nobody's")[0] == 2


def test_verify_tells_whether_a_model_can_be_trained_with_tools(tmp_path):
    tokenizer = qwen_like_tokenizer()
    tokenizer.save_pretrained(tmp_path / "good")
    code, text = run("verify", str(tmp_path / "good"))
    assert code == 0
    assert "used with tools" in text

    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "bad")
    code, text = run("verify", str(tmp_path / "bad"), "--json")
    assert code == 1
    assert json.loads(text)["usable"] is False


@pytest.mark.parametrize("where", ["nowhere", "/etc"])
def test_what_is_no_model_is_said_in_a_line(where):
    code, text = run("verify", where)
    assert code == 2
    assert "Traceback" not in text
    assert where in text
