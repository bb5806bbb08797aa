"""`agentrl rollout` on a real vLLM server, by ids and by messages; skipped without `.venv-vllm`, as in CI."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.generation.vllm_http import Replica
from agentrl.rollout.journal.reading import Records
from agentrl.testing.vllm import VllmServer
from agentrl.types import Limit
from tests.cli.typing_commands import run
from tests.generation.test_vllm_real import BIN, ROOT, START_SECONDS, pytestmark  # noqa: F401

TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
TALKATIVE = '''
from counter import Counter


class Talkative(Counter):
    def increment(self, step: int) -> str:
        """Increment the counter.

        Args:
            step: What to add to it.

        Returns:
            The counter's new value.
        """
        return f"{super().increment(step)} " + "word " * 600
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, Path]]:
    """The tiny agent of `examples/counter.py`, served as vLLM's page says for agents."""
    sys.path.insert(0, str(ROOT / "examples"))
    from counter import Counter
    from tiny_agent.agents import counting_agent

    folder, model = tmp_path_factory.mktemp("vllm"), counting_agent(Counter)
    with VllmServer(BIN / "vllm", model, folder, [*TOOLS, "--served-model-name", "tiny"]) as running:
        Replica(running.url).wait_until_up(START_SECONDS)
        yield running, model


def evaluate(url: str, env: Any, *arguments: Any) -> dict[str, Any]:
    small = ["-n", 16, "--group", 8, "--json", "--max-completion-length", 100]
    code, text, complaint = run("rollout", "--env", env, "--base-url", url, *arguments, *small)
    assert code == 0, complaint
    report: dict[str, Any] = json.loads(text)
    assert (report["episodes"], report["scored"]) == (16, 16)
    return report


def test_the_same_model_is_evaluated_by_ids_and_by_messages(server, tmp_path):
    """vLLM renders, reads calls by its own parser and names them; what it counts are the tokens that it sampled."""
    running, model = server
    env = f"{ROOT}/examples/counter.py:Counter"
    by_ids = evaluate(running.url, env, "--model", model)
    by_messages = evaluate(running.url, env, "--model", "tiny", "--chat", "--out", tmp_path)
    for report in (by_ids, by_messages):
        assert report["tool_calls"] >= 8
        assert report["reward"]["value"] > 0
        assert 5 * 16 <= report["cost"]["sampled_tokens"] <= 20 * 16  # a call is 7 tokens and the answer 2
    with Records(tmp_path) as records:
        [played, *_] = [r for r in records.rollouts(records.summaries()) if r.turns[0].message.get("tool_calls")]
    [call] = played.turns[0].message["tool_calls"]
    assert call["id"].startswith("chatcmpl-tool-")
    assert call["function"]["name"] == "increment"


def test_a_conversation_that_outgrows_a_real_server_is_cut(server, tmp_path):
    running, _ = server
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    report = evaluate(running.url, f"{tmp_path}/talkative.py:Talkative", "--model", "tiny", "--chat", "--out", tmp_path)
    assert report["outcomes"]["truncated"] >= 8
    with Records(tmp_path) as records:
        assert {s.limit for s in records.summaries() if s.outcome == "truncated"} == {Limit.CONTEXT}


def test_a_real_server_whose_model_sees_no_images_says_so(server):
    """None is left out in silence."""
    env = f"{ROOT}/examples/grid_world.py:GridWorld"
    code, _, complaint = run("rollout", "--env", env, "--base-url", server[0].url, "--model", "tiny", "--chat", "-n", 4)
    assert code == 1
    assert "not a multimodal model" in complaint
