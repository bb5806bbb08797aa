"""`agentrl train` and `agentrl options` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli.train import Algorithm, fields_of
from agentrl.errors import ConfigurationError
from tests.cli.typing_commands import COUNTER, run, save_model

SMALL = ["--use_cpu", "--num_generations", 2, "--per-device-train-batch-size", 4, "--max_completion_length", 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "clicks.py").write_text(COUNTER)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(4)))
    save_model(folder / "model")
    return folder


def test_a_run_trains_is_summed_up_and_resumes(folder):
    """The folder comes first; what is left off goes on where it was."""
    out = folder / "out"
    arguments = ["train", "--env", f"{folder}/clicks.py:Counter", "--model", folder / "model", *SMALL]
    arguments += ["--output_dir", out, "--logging_steps", 1, "--save_steps", 1]
    code, text, status = run(*arguments, "--max_steps", 1)
    assert code == 0, status
    assert text == f"run: {out}\n"
    assert "step 1/1  reward" in status
    assert "in the first tenth" in status
    code, text, _ = run(*arguments, "--max_steps", 2, "--resume", "--json", "--quiet")
    assert code == 0
    report = json.loads(text)
    assert report["step"] == 2
    assert "reward" in report
    assert (out / "model.safetensors").exists()
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}


def test_a_file_says_what_options_may_override(folder):
    config = {"model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "algorithm": "rloo"}
    config |= {"reward": f"{folder}/clicks.py:length", "max_steps": 5, "beta": 0.0, "use_cpu": True}
    config |= {"per_device_train_batch_size": 4, "max_completion_length": 4, "output_dir": str(folder / "rloo")}
    (folder / "run.yaml").write_text(json.dumps(config))
    code, text, complaint = run("train", "--config", folder / "run.yaml", "--max-steps", 1, "--json", "--quiet")
    assert code == 0, complaint
    report = json.loads(text)
    assert report["step"] == 1
    assert report["output_dir"] == str(folder / "rloo")


def test_options_are_read_with_the_types_of_their_fields():
    given = ["--learning-rate", "1e-4", "--no_shuffle_dataset", "--model_init_kwargs", '{"dtype": "bfloat16"}']
    fields = fields_of(Algorithm.GRPO, [*given, "--top_k=5"], {"top_k": 1, "min_p": 0.1})
    assert fields == {
        "learning_rate": 1e-4,
        "shuffle_dataset": False,
        "model_init_kwargs": '{"dtype": "bfloat16"}',
        "top_k": 5,
        "min_p": 0.1,
    }
    with pytest.raises(ConfigurationError, match="no option --learning_rat; did you mean --learning_rate"):
        fields_of(Algorithm.GRPO, ["--learning_rat", "1"], {})
    with pytest.raises(ConfigurationError, match="no option --normalize_advantages"):
        fields_of(Algorithm.GRPO, [], {"normalize_advantages": True})
    with pytest.raises(ConfigurationError, match="max_steps"):
        fields_of(Algorithm.GRPO, ["--max_steps", "many"], {})
    with pytest.raises(ConfigurationError, match="'stray'"):
        fields_of(Algorithm.GRPO, ["stray"], {})


def test_what_is_mistyped_exits_with_2(folder):
    env, model = ["--env", f"{folder}/clicks.py:Counter"], ["--model", folder / "model"]
    for arguments, said in [
        (env, "name a model"),
        ([*env, *model, "--max_step", 1], "did you mean --max_steps"),
        ([*env, *model, *SMALL, "--max_steps", 1, "--top_p", 3], "top_p"),
        ([*env, *model, "--config", folder / "none.yaml"], "cannot be read"),
        ([*model, *SMALL, "--max_steps", 1], "reward"),
    ]:
        code, _, complaint = run("train", *arguments, "--output_dir", folder / "never")
        assert (code, said in complaint) == (2, True), complaint


def test_options_are_listed_by_word():
    code, text, _ = run("options", "entropy_coef", "--json")
    names = {row["name"]: row for row in json.loads(text)}
    assert code == 0
    assert names["entropy_coef"]["default"] == 0.0
    assert "learning_rate" not in names
    assert "--normalize_advantages (False)" in run("options", "normalize", "--algorithm", "rloo")[1]


def test_several_environments_and_tools_are_named_as_in_python(folder):
    """A dict of environments routes its own rows; tools are functions of the prompts' data set."""
    (folder / "many.py").write_text(
        "from clicks import Counter\n\nBOTH = {'one': Counter, 'two': Counter}\n\n\n"
        'def add(a: int, b: int) -> int:\n    """Add.\n\n    Args:\n        a: One.\n        b: Other.\n    """\n'
        "    return a + b\n"
    )
    asked = [{"prompt": [{"role": "user", "content": question}]} for question in ("2 + 3?", "3 + 4?")]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    few = ["--max_steps", 1, "--logging_steps", 1, "--json", "--quiet", "--model", folder / "model", *SMALL]
    played = ["train", "--env", f"{folder}/many.py:BOTH", *few, "--output_dir", folder / "both"]
    code, text, complaint = run(*played)
    assert code == 0, complaint
    assert json.loads(text)["step"] == 1
    rows = ["--dataset", folder / "asked.jsonl", "--reward", f"{folder}/clicks.py:length"]
    code, text, complaint = run("train", *rows, "--tool", f"{folder}/many.py:add", *few, "--output_dir", folder / "t")
    assert code == 0, complaint
    assert "tools/call_frequency" in json.loads(text)


def test_bars_are_for_terminals(folder):
    """The log of a run that nobody watches has its figures, and nothing in between."""
    out = ["--output_dir", folder / "calm", "--logging_steps", 1, "--max_steps", 1]
    rows = ["--dataset", folder / "rows.jsonl", "--reward", f"{folder}/clicks.py:length"]
    code, _, status = run("train", *rows, "--model", folder / "model", *SMALL, *out)
    assert code == 0
    assert "%|" not in status
