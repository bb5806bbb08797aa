"""Scripts from TRL's documentation run with only the import changed, and models and data replaced by local ones."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import datasets
import pytest

import agentrl
from agentrl.training.trainer import RolloutTrainer
from tests.docs import trl_scripts
from tests.docs.test_snippets import model_folder, short_runs  # noqa: F401 (fixtures)

SCRIPTS = {
    "quick-grpo": trl_scripts.QUICK.format(algorithm="GRPO"),
    "quick-rloo": trl_scripts.QUICK.format(algorithm="RLOO"),
    "several-rewards-grpo": trl_scripts.SEVERAL_REWARDS.format(algorithm="GRPO"),
    "several-rewards-rloo": trl_scripts.SEVERAL_REWARDS.format(algorithm="RLOO"),
    "logged-grpo": trl_scripts.LOGGED.format(algorithm="GRPO"),
    "environment": trl_scripts.ENVIRONMENT,
    "environments": trl_scripts.ENVIRONMENTS,
    "environment-with-data": trl_scripts.ENVIRONMENT_WITH_DATA,
    "tools": trl_scripts.TOOLS,
    "async-rewards-grpo": trl_scripts.REWARDS.format(algorithm="GRPO"),
    "async-rewards-rloo": trl_scripts.REWARDS.format(algorithm="RLOO"),
}


REST = {
    "tools": 'model="Qwen/Qwen3-0.6B", train_dataset=chats, reward_funcs=reward_func,\n',
    "async": 'model="Qwen/Qwen3-0.6B", train_dataset=dataset,\n',
}
"""What takes the place of the dots in a script."""


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(str(completion))) for completion in completions]


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_trl_runs_with_the_import_changed(name, model_folder, monkeypatch):  # noqa: F811
    rows = datasets.Dataset.from_dict({"prompt": [f"question {i}" for i in range(4)], "ground_truth": ["1"] * 4})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    # trl.rewards stays what it is: any function with its signature works. Its own one needs math-verify.
    monkeypatch.setitem(sys.modules, "trl.rewards", types.SimpleNamespace(accuracy_reward=length))
    script = SCRIPTS[name].replace("from trl import", "from agentrl import")
    script = script.replace("...,\n", REST[name.partition("-")[0]]) if "...,\n" in script else script
    script = re.sub(r"Qwen/[\w.-]+", model_folder, script)
    chats = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i} x {i}?"}] for i in range(4)]})
    given = {"reward_func": length, "dataset": rows, "chats": chats}
    helpers = {"check_math_solution": lambda *_: True, "test_code_solution": lambda *_: False}
    namespace: dict[str, Any] = {"__name__": "__main__", **given, **helpers}
    exec(script, namespace)
    trainer = namespace["trainer"]
    assert isinstance(trainer, RolloutTrainer)
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("config", trl_scripts.CONFIGS)
def test_a_configuration_for_trl_is_taken(config, tmp_path):
    rest = f'output_dir="{tmp_path}", report_to="none",'
    args = eval(config.replace("...,", rest), {name: getattr(agentrl, name) for name in ("GRPOConfig", "RLOOConfig")})
    assert args.output_dir == str(tmp_path)
