"""mini-swe-agent, as its authors ship it, plays against the endpoint in a process of its own."""

import os
import shutil
from pathlib import Path

import pytest
import third_party_agent

from agentrl import Agent
from agentrl.chat.renderer import Renderer
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Outcome, Task


def missing(what: str) -> None:
    pytest.skip(what)


@pytest.mark.slow
def test_mini_swe_agent_becomes_rows():
    """It leaves an answer without a command out of its history, so the turn after that is in a row of its own."""
    python = Path(os.environ.get("AGENTRL_AGENTS_PYTHON", third_party_agent.PYTHON))
    if not python.exists():
        missing(f"{python} is not there; run `make agents` (AGENTRL_AGENTS_PYTHON)")
    if shutil.which("bwrap") is None:
        missing("bwrap is not installed")
    tokenizer = qwen_like_tokenizer("compact")

    def turn(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def command(line: str) -> list[int]:
        return turn(f"```mswea_bash_command\n{line}\n```")

    script = [
        command("echo key=$OPENAI_API_KEY; echo 36 > answer.txt"),
        turn("nothing"),
        command("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"),
    ]
    generator = ScriptedGenerator(lambda session, ids, params: script.pop(0))
    engine = RolloutEngine(
        generator,
        Renderer(tokenizer, tools=True),
        failures=FailurePolicy(retries=0, max_rate=1.0),
        agent=Agent(third_party_agent.command(python)),
    )
    row = third_party_agent.rows()[0]
    try:
        [trajectory] = engine.run([Task("g", 0, 1, row["prompt"], {"answer": row["answer"]})])
    finally:
        engine.close()
    assert trajectory.failure is None
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert [one.row for one in trajectory.turns] == [0, 0, 1]
    assert_row_invariants(trajectory, generator.calls)
    assert "key=\n" in trajectory.completion[1]["content"], "the sandbox does not have the endpoint's key"
