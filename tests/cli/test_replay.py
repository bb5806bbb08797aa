"""`agentrl replay` and `agentrl export` as they are typed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.chat.renderer import Renderer
from agentrl.cli.environments import load_environment
from agentrl.cli.main import app
from agentrl.envs import Harbor
from agentrl.errors import ConfigurationError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.limits import Limits
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Task
from tests.cli.typing_commands import run as typed
from tests.envs.harbor.writing import write_task

TOKENIZER = qwen_like_tokenizer("compact")
GAME = '''
class Game:
    def reset(self, seed):
        self.count = seed
        return f"start {seed}"

    def add(self, n: int) -> str:
        """Add.

        Args:
            n: How much.
        """
        self.count += n
        return f"now {self.count}"

    def get_reward(self):
        return self.count / 10
'''


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout or result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two rollouts with two calls each, in the environment of game.py."""
    (tmp_path / "game.py").write_text(GAME)
    calls = [{"name": "add", "arguments": {"n": n}} for n in (1, 2)]
    turns = [TOKENIZER.encode(f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>") for call in calls]
    journal = Journal(tmp_path)
    engine = RolloutEngine(
        ScriptedGenerator([[*turns, TOKENIZER.encode("done<|im_end|>")]] * 2),
        Renderer(TOKENIZER, tools=True),
        environments=load_environment(f"{tmp_path / 'game.py'}:Game"),
        limits=Limits(),
        journal=journal,
    )
    engine.run([Task("g", member, 5, columns={"n": member}) for member in range(2)])
    engine.close()
    journal.close()
    return tmp_path


def test_an_environment_that_does_it_again_exits_with_0(folder):
    assert run("replay", folder, 1, "--env", f"{folder}/game.py:Game") == (
        0,
        "3 turns were played again without a difference.\n",
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("now {", "then {", "add(n=1) of turn 0 is different.\nrecorded: 'now 6'\nnow:      'then 6'"),
        ("+= n", "+= n % 2", "add(n=2) of turn 1 is different.\nrecorded: 'now 8'\nnow:      'now 6'"),
        ("/ 10", "/ 100", "get_reward is different.\nrecorded: 0.8\nnow:      0.08"),
        ("start", "begin", "reset is different."),
        ("n: int", "n: str", "add(n=1) of turn 0 is different.\nrecorded: 'now 6'\nnow:      \"Error"),
    ],
)
def test_the_first_difference_is_shown_and_exits_with_1(old, new, said, folder):
    """In an answer, later, in the reward only, in the first observation, in what the tool takes."""
    (folder / "game.py").write_text(GAME.replace(old, new))
    code, text = run("replay", folder, "0:2", "--env", f"{folder}/game.py:Game")
    assert code == 1
    assert said in text


def test_a_model_goes_on_from_a_turn(folder):
    model = tiny_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=2048)
    model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    arguments = ("replay", folder, 1, "--env", f"{folder}/game.py:Game", "--from-turn", 1)
    code, text = run(*arguments, "--model", folder / "model")
    assert code == 0, text
    first, answer, new, *_ = [json.loads(line) for line in text.split("\n") if line.startswith("{")]
    assert first["tool_calls"][0]["function"]["arguments"] == {"n": 1}
    assert answer["content"] == "now 6"
    assert new["role"] == "assistant"
    assert "tool_calls" not in new
    assert run(*arguments)[0] == 2
    assert run(*arguments[:-1], 9, "--model", folder / "model")[0] == 2


def test_what_is_mistyped_exits_with_2(folder):
    env = f"{folder}/game.py:Game"
    for arguments, said in [
        (("replay", folder, 7, "--env", env), "there is no rollout 7"),
        (("replay", folder, "x", "--env", env), "names no rollout"),
        (("replay", folder / "model", 1, "--env", env), "there is no journal"),
        (("replay", folder, 1, "--env", f"{folder}/game.py:Chess"), "no class or function 'Chess'; its classes: Game"),
        (("replay", folder, 1, "--env", "no_such_module:Game"), "no_such_module cannot be imported"),
        (("export", folder, "--to", folder / "rollouts.txt"), "ends in .parquet or .jsonl"),
    ]:
        code, text = run(*arguments)
        assert (code, said in text) == (2, True), text


def test_rollouts_are_exported_to_parquet_and_jsonl(folder):
    for name in ("out.parquet", "out.jsonl"):
        assert run("export", folder, "--to", folder / name) == (0, f"2 rollouts written to {folder / name}\n")
    table = pq.read_table(folder / "out.parquet").to_pylist()
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().split("\n")[:-1]]
    with Records(folder) as records:
        played = [record.trajectory() for record in records.rollouts(records.summaries())]
    for row, line, trajectory in zip(table, lines, played, strict=True):
        [part] = row["rows"]
        assert part["completion_ids"] == line["rows"][0]["completion_ids"] == trajectory.completion_ids
        assert all(math.isnan(p) == bool(m) for p, m in zip(part["logprobs"], part["loss_mask"], strict=True))
        assert [p is None for p in line["rows"][0]["logprobs"]] == [bool(m) for m in trajectory.loss_mask]
        assert json.loads(row["completion"]) == trajectory.completion
        assert (row["reward"], line["outcome"], line["turns"]) == (trajectory.reward, "finished", 3)


def test_harbor_tasks_are_named_by_their_folder(tmp_path):
    write_task(tmp_path / "tasks/hello", dockerfile=None)
    factory = load_environment(f"harbor:{tmp_path}/tasks")
    assert isinstance(factory, Harbor)
    assert [Path(row["task"]).name for row in factory.tasks()] == ["hello"]
    code, _, complaint = typed("check", "--env", f"harbor:{tmp_path}/nothing")
    assert (code, "nothing" in complaint) == (2, True)


def test_environments_are_loaded_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_game.py").write_text("LIMIT = 3\n")
    (tmp_path / "my_game.py").write_text("from neighbour_of_game import LIMIT\n\n\nclass Game:\n    limit = LIMIT\n")
    assert load_environment(f"{tmp_path}/my_game.py:Game").limit == 3
    monkeypatch.chdir(tmp_path)
    assert load_environment("my_game:Game").limit == 3
    for name in ("my_game", ":Game", "my_game:", "missing.py:Game"):
        with pytest.raises(ConfigurationError):
            load_environment(name)
