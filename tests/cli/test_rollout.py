"""`agentrl rollout` as it is typed, on a local model and against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl.rollout.journal.reading import Records
from agentrl.testing.tokenizers import qwen_like_tokenizer
from tests.cli.typing_commands import COUNTER, run, save_model
from tests.generation.openai_stub import Server, says, serving
from tests.vision.helpers import family

TOKENIZER = qwen_like_tokenizer("compact")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollout")
    (folder / "clicks.py").write_text(COUNTER)
    save_model(folder / "model")
    return folder


def counts(body: dict[str, Any], mute: bool = False) -> dict[str, Any]:
    """Counts to the target as vLLM would: ids in, ids out; when mute, text alone."""
    prompt = TOKENIZER.decode(body["prompt"])
    target = prompt.split("Increment to ")[1][0]
    call = {"name": "increment", "arguments": {"step": int(target)}}
    text = "done" if "tool_response" in prompt else f"<tool_call>{json.dumps(call)}</tool_call>"
    ids = TOKENIZER.encode(text + "<|im_end|>")
    return {"choices": [{"text": text} if mute else {"text": text, "token_ids": ids}]}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        server.models = [{"id": "served", "max_model_len": 4096}]
        server.policy = counts
        yield server


def test_a_local_model_is_evaluated_and_its_episodes_are_kept(folder):
    arguments = ["rollout", "--env", f"{folder}/clicks.py:Counter", "--model", folder / "model", "-n", 6, "--group", 2]
    code, text, _ = run(*arguments, "--max-completion-length", 12, "--out", folder / "kept", "--json")
    assert code == 0
    report = json.loads(text)
    assert (report["episodes"], report["tasks"], report["scored"]) == (6, 3, 6)
    assert report["passes"].keys() == {"1", "2"}
    assert sum(bin_["episodes"] for bin_ in report["histogram"]) == 6
    assert 6 <= report["cost"]["sampled_tokens"] <= 72
    with Records(folder / "kept") as records:
        kept = records.summaries()
        played = {("eval", f"0.0.{task}", member) for task in range(3) for member in range(2)}
        assert {(s.kind, s.group, s.member) for s in kept} == played
        assert [s.rewards for s in kept] == [{"Counter": s.reward} for s in kept]
        assert sum(s.sampled for s in kept) == report["cost"]["sampled_tokens"]


def test_prompts_of_a_file_are_scored_by_a_function(folder):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(3)))
    arguments = ["--dataset", folder / "rows.jsonl", "--reward", f"{folder}/clicks.py:length"]
    code, text, _ = run("rollout", *arguments, "--model", folder / "model", "-n", 8, "--group", 2, "--top-k", 5)
    assert code == 0
    assert text.startswith("6 episodes of 3 tasks, 6 scored.")
    assert "pass@2" in text


def test_a_server_is_given_ids_and_gives_ids(folder, server):
    """Whatever shapes the distribution is said, so that nobody's defaults count."""
    arguments = [
        "rollout",
        "--env",
        f"{folder}/clicks.py:Counter",
        "--model",
        folder / "model",
        "--base-url",
        server.url,
    ]
    code, text, _ = run(*arguments, "-n", 4, "--group", 2, "--temperature", 0.7, "--json")
    report = json.loads(text)
    assert code == 0
    assert report["outcomes"] == {"finished": 4}
    assert report["passes"]["1"] == {"value": 1.0, "low": pytest.approx(0.3424, abs=1e-4), "high": 1.0}
    assert len(server.bodies) == 8
    for body in server.bodies:
        assert (body["model"], body["temperature"], body["return_token_ids"]) == ("served", 0.7, True)
        assert body["top_p"] == 1.0
        assert TOKENIZER.eos_token_id in body["stop_token_ids"]
    server.policy = partial(counts, mute=True)
    code, _, complaint = run(*arguments, "-n", 2, "--group", 2)
    assert code == 1
    assert "without the ids of the sampled tokens" in complaint


def test_what_is_mistyped_exits_with_2(folder):
    env, model = ["--env", f"{folder}/clicks.py:Counter"], ["--model", folder / "model"]
    for arguments, said in [
        (model, "name an environment"),
        ([*env, *model, "--group", 9, "-n", 4], "--group 9"),
        ([*env, "--model", folder / "nothing"], "no tokenizer could be loaded"),
        ([*env, *model, "--dataset", folder / "no.jsonl"], "no such file"),
        ([*env, *model, "--chat-template-kwargs", "[1]"], "expects a JSON object"),
        ([*env, *model, "--base-url", "http://127.0.0.1:9"], "does not answer"),
        ([*env, *model, "--served-model", "x"], "goes with --base-url"),
        (["--env", "gym:NoSuch-v0", *model], "NoSuch"),
    ]:
        code, _, complaint = run("rollout", *arguments)
        assert (code, said in complaint) == (2, True), complaint


def test_any_chat_server_is_evaluated_by_what_it_says(folder):
    """No tokenizer is needed; tokens that only the server knows are not reported."""
    with serving() as server:
        call, end = says(None, ("increment", '{"step": 1}'), tokens=7), says("done", tokens=3)
        server.policy = lambda body: end if body["messages"][-1]["role"] == "tool" else call
        arguments = ["rollout", "--env", f"{folder}/clicks.py:Counter", "--base-url", server.url, "--chat"]
        code, text, _ = run(*arguments, "--model", "clever", "-n", 4, "--group", 2, "--json", "--out", folder / "chat")
        mistyped, _, complaint = run(*arguments, "--model", "clever", "--reasoning", "fork")
        unknown, _, names = run(*arguments, "--model", "nobody")
    report = json.loads(text)
    assert (code, report["scored"], report["outcomes"]) == (0, 4, {"finished": 4})
    cost = report["cost"]
    assert (cost["sampled_tokens"], cost["prompt_tokens"], cost["other_tokens"]) == (40, None, None)
    assert (mistyped, "--reasoning and --chat" in complaint) == (2, True), complaint
    assert (unknown, "serves ['clever', 'other']" in names) == (2, True), names
    with Records(folder / "chat") as records:
        [kept, *_] = records.rollouts(records.summaries())
        assert [record.message.get("content") for record in kept.turns] == ["", "done"]


SHOWS = """
from PIL import Image


class Shows:
    def reset(self, seed: int):
        return [{"type": "image", "image": Image.new("RGB", (16, 16), (seed % 256, 0, 0))}]

    def get_reward(self) -> float:
        return 1.0
"""


@pytest.mark.slow
def test_a_model_that_sees_is_evaluated_on_what_it_is_shown(tmp_path):
    """With its processor: the picture's tokens are part of the prompt."""
    (tmp_path / "shows.py").write_text(SHOWS)
    model, processor = family("gemma3")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    arguments = ["--env", f"{tmp_path}/shows.py:Shows", "--model", tmp_path / "model", "-n", 2, "--group", 2]
    code, text, complaint = run("rollout", *arguments, "--max-completion-length", 4, "--json")
    assert code == 0, complaint
    report = json.loads(text)
    assert report["scored"] == 2
    assert report["cost"]["prompt_tokens"] >= 2 * processor.image_seq_length
