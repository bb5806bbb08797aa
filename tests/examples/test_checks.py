"""`agentrl check` passes on what every example plays: nothing fails; a warning is advice.

Examples without an environment are checked by their tools and their prompts. Programs with a loop of their own
(`OWN_LOOPS`) have neither: the program owns its tools, and `tests/examples` plays them with scripted turns.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.typing_commands import run
from tests.examples.conftest import EXAMPLES
from tests.vision.helpers import family

ENVIRONMENTS = {
    "counter": "Counter",
    "frozen_lake": "lake",
    "grid_world": "GridWorld",
    "guess_number": "GuessNumber",
    "two_environments": "ENVIRONMENTS",
}
"""Each example by the name of what it plays."""
SLOW = {"browser_agent": "browser", "textarena_games": "guess_the_number"}
"""Likewise; these start other programs, of which few episodes are played."""
TOOLS = {"plain_tools": ["add", "multiply"], "smollm2_arithmetic": ["calculate"]}
"""Examples of tools in a data set of prompts."""
PROMPTS = {"visual_question_answering"}
"""Examples of prompts alone."""
OWN_LOOPS = {"third_party_agent", "verifiers_environment"}


def check(*arguments: Any) -> dict[str, list[str]]:
    """Check, and give the statuses of each finding."""
    code, text, complaint = run("check", *arguments, "--json")
    assert code == 0, text + complaint
    found: dict[str, list[str]] = {}
    for finding in json.loads(text):
        found.setdefault(finding["check"], []).append(finding["status"])
    return found


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_passes(name):
    found = check("--env", f"{EXAMPLES}/{name}.py:{ENVIRONMENTS[name]}")
    assert {"tools", "episodes", "reward", "variance", "seed", "determinism", "leaks", "calls"} <= found.keys()
    assert {*found["leaks"], *found["determinism"]} == {"pass"}
    assert len(found["leaks"]) == (2 if name == "two_environments" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_an_environment_that_starts_other_programs_passes(name):
    if name == "browser_agent":
        pytest.importorskip("playwright")
        if shutil.which("chromium") is None:
            pytest.skip("Chromium is not installed")
    else:
        pytest.importorskip("textarena", reason="make games")
    found = check("--env", f"{EXAMPLES}/{name}.py:{SLOW[name]}", "--groups", 2, "--group", 2)
    assert {*found["leaks"], *found["determinism"], *found["close"]} == {"pass"}
    assert ("images" in found) == (name == "browser_agent")


@pytest.mark.parametrize("name", TOOLS)
def test_tools_pass(name, tmp_path):
    if name == "smollm2_arithmetic":
        pytest.importorskip("reasoning_gym")
    example = importlib.import_module(name)
    rows = example.questions(4) if name == "plain_tools" else [{"prompt": example.conversation("1 + 2 =")}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = [argument for tool in TOOLS[name] for argument in ("--tool", f"{EXAMPLES}/{name}.py:{tool}")]
    found = check(*tools, "--dataset", tmp_path / "rows.jsonl")
    assert {"tools", "episodes"} <= found.keys()


def test_prompts_with_pictures_pass(tmp_path):
    """The model's processor reads the pictures; what they take of its context is measured."""
    import visual_question_answering

    model, processor = family("gemma3")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    visual_question_answering.questions(3, seed=0).to_parquet(tmp_path / "rows.parquet")
    found = check("--dataset", tmp_path / "rows.parquet", "--model", tmp_path / "model")
    assert found == {"context": ["pass"], "memory": ["pass"]}


def test_every_example_that_trains_is_checked():
    training = {path.stem for path in Path(EXAMPLES).glob("*.py") if "trainer.train()" in path.read_text("utf-8")}
    checked = {*ENVIRONMENTS, *SLOW, *TOOLS, *PROMPTS, *OWN_LOOPS}
    assert training - {"demo"} | {"guess_number"} == checked  # what the demo plays stands in a file of its own
