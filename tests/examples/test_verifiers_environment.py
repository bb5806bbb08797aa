"""An environment of the real verifiers package plays against the endpoint, in a process of its own."""

import json
import os
from pathlib import Path

import pytest
import verifiers_environment

from agentrl import Agent
from agentrl.chat.renderer import Renderer
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Outcome, Task

TOKENIZER = qwen_like_tokenizer("compact")


@pytest.fixture(scope="module")
def python():
    path = Path(os.environ.get("AGENTRL_VERIFIERS_PYTHON", verifiers_environment.PYTHON))
    if not path.exists():
        pytest.skip(f"{path} is not there; run `make verifiers` (AGENTRL_VERIFIERS_PYTHON)")
    return path


def played(command, row, script):
    """One rollout, whose turns are scripted."""
    turns = [[*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id] for text in script]
    generator = ScriptedGenerator(lambda session, ids, params: turns.pop(0))
    engine = RolloutEngine(
        generator,
        Renderer(TOKENIZER, tools=True),
        failures=FailurePolicy(retries=0, max_rate=1.0),
        agent=Agent(command),
    )
    try:
        [trajectory] = engine.run([Task("g", 0, 1, row["prompt"], {"row": row["row"]})])
    finally:
        engine.close()
    if trajectory.failure is None:
        assert_row_invariants(trajectory, generator.calls)
    return trajectory


@pytest.mark.slow
def test_a_tool_environment_of_verifiers_becomes_rows(python):
    """Its data set, its tools, its loop and its rubric, untouched; what comes of it is one exact row."""
    row = verifiers_environment.rows(python=python)[0]
    assert row["prompt"] == [{"role": "user", "content": "What is 17 + 38?"}]
    call = json.dumps({"name": "add", "arguments": {"a": 17, "b": 38}})
    script = [f"<tool_call>\n{call}\n</tool_call>", "The answer is 55."]
    trajectory = played(verifiers_environment.command(python=python), row, script)
    assert trajectory.failure is None
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert [turn.row for turn in trajectory.turns] == [0, 0]
    assert [message["role"] for message in trajectory.completion] == ["assistant", "tool", "assistant"]
    assert trajectory.completion[1]["content"] == "55"


@pytest.mark.slow
def test_an_environment_of_verifiers_that_breaks_gives_no_reward(python):
    row = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "row": "{}"}
    trajectory = played(verifiers_environment.command(python=python), row, [])
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENV_FAILURE, None)


@pytest.mark.slow
def test_a_random_model_trains_on_an_environment_of_verifiers(python, tmp_path):
    trainer = verifiers_environment.main(["--steps", "1", "--python", str(python), "--out", str(tmp_path)])
    assert trainer.state.global_step == 1
