"""Images in the table of completions."""

import sys
from types import SimpleNamespace

import pytest

from agentrl.training.completions import CompletionLog, cell, pictures_of, report_rows, select_rows
from tests.vision.helpers import hermes, play, question
from tests.vision.test_training import forced, look, script, trainer_of

FAMILY = "qwen3_vl"


def test_an_episode_shows_its_pictures_in_wandb_and_their_number_elsewhere(monkeypatch):
    [trajectory], _ = play(FAMILY, [question(1)], [[hermes(2), "x"]])
    log = CompletionLog(["p"], ["c"], {}, [0.0], {"images": [pictures_of(trajectory)]})
    rows = select_rows(log, limit=None, unique_prompts=False)
    assert cell(rows[0]["images"]) == "2 images"
    tables = []
    wandb = SimpleNamespace(run=True, Image=lambda picture: picture.size, log=tables.append, Table=lambda **kw: kw)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trainer = SimpleNamespace(args=SimpleNamespace(report_to=["wandb"]), callback_handler=SimpleNamespace(callbacks=[]))
    report_rows(rows, 1, trainer)
    assert tables[0]["completions"]["data"][0][-1] == [(24, 16), (24, 16)]


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.slow
def test_log_multimodal_decides_whether_images_are_logged(tmp_path, logged, monkeypatch):
    kept = []
    monkeypatch.setattr("agentrl.training.reporting.report_rows", lambda rows, *_: kept.extend(rows))
    trainer = trainer_of(tmp_path, tools=[look], config={"log_completions": True, "log_multimodal": logged})
    with forced(script):
        trainer.train()
    assert all(("images" in row) == logged for row in kept)
    assert kept
