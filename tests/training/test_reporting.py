"""What a run reports to the real tensorboard, trackio and wandb: figures and rollouts, read back from their files."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from agentrl import GRPOTrainer
from agentrl.training.completions import as_markdown
from tests.training.helpers import chat_rows, constant, make


@pytest.fixture(params=["tensorboard", "trackio", "wandb"])
def reported(request, tmp_path, monkeypatch):
    """Train two steps and give the figures and the text of the rollouts that the tool has kept."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    config = {"report_to": [request.param], "log_completions": True}
    trainer = make(GRPOTrainer, tmp_path, config=config, train_dataset=chat_rows(), reward_funcs=constant)
    trainer.train()
    folder = os.environ["TRACKIO_DIR"] if request.param == "trackio" else tmp_path
    return {"tensorboard": of_tensorboard, "trackio": of_trackio, "wandb": of_wandb}[request.param](Path(folder))


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    [file] = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    texts = [make_ndarray(event.tensor_proto).item() for event in events.Tensors("completions/text_summary")]
    return {event.step: event.value for event in events.Scalars("train/reward")}, b"".join(texts).decode()


def of_trackio(folder):
    [file] = (path for path in folder.rglob("*") if path.is_file() and path.suffix in (".db", ".sqlite"))
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    logs = [(step, json.loads(metrics)) for step, metrics in rows]
    return {step: log["train/reward"] for step, log in logs if "train/reward" in log}, json.dumps(logs)


def of_wandb(folder):
    import wandb

    rewards = {2: wandb.run.summary["train/reward"]}
    wandb.finish()
    return rewards, "".join(path.read_text() for path in folder.rglob("*.table.json"))


def test_figures_and_rollouts_reach_the_tool(reported):
    rewards, text = reported
    assert all(reward == 1.5 for reward in rewards.values())  # rows 0 to 3 earn as much
    assert rewards
    for question in ("q0", "q1", "q2", "q3"):
        assert question in text


def test_what_a_model_wrote_is_no_markup_in_tensorboard():
    """Blocks of code are fenced by more backticks than any text has."""
    from tensorboard.plugin_util import markdown_to_safe_html

    said = "```\n# not a heading <b>\n````\n[not a link](http://127.0.0.1)"
    html = markdown_to_safe_html(as_markdown([{"prompt": "p", "completion": said, "advantage": 0.5}]))
    assert "<h1" not in html
    assert "<a " not in html
    assert "# not a heading &lt;b&gt;\n````\n[not a link](http://127.0.0.1)" in html
    assert "advantage: 0.500" in html
