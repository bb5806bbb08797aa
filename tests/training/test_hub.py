"""Sharing a model: what the real hub client sends to a hub on this machine."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pyarrow.parquet
import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl import GRPOConfig
from agentrl.errors import ConfigurationError
from agentrl.training.model_card import model_card
from tests.training.hub import Hub, local_hub
from tests.training.runs import distance, make_trainer, weights

TOKEN = "hf_of_nobody"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub(monkeypatch) as made:
        yield made


def test_save_model_writes_what_from_pretrained_reads(tmp_path):
    trainer = make_trainer("grpo", tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert distance(weights(trainer), dict(model.state_dict())) == 0.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.get_vocab() == trainer.processing_class.get_vocab()


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_push_to_hub_sends_model_tokenizer_and_card(algorithm, hub, tmp_path):
    folder = tmp_path / "counting"
    trainer = make_trainer(algorithm, folder, hub_token=TOKEN, hub_private_repo=True, max_steps=1)
    trainer.train()
    trainer.push_to_hub(dataset_name="someone/questions", tags=["counting"], license="apache-2.0")
    files = hub.files["models/me/counting"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()
    assert hub.private == {"models/me/counting": True}
    assert hub.commits == [("models/me/counting", "End of training")]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert json.loads(files["config.json"])["model_type"] == "llama"
    card = ModelCard(files["README.md"].decode())
    assert card.data.tags == ["agentrl", algorithm, "reinforcement-learning", "counting"]
    assert (card.data.datasets, card.data.license) == (["someone/questions"], "apache-2.0")
    assert card.data.model_name == "counting"
    paper = {"grpo": "2402.03300", "rloo": "2402.14740"}[algorithm]
    assert f"https://arxiv.org/abs/{paper}" in card.text
    assert "```bibtex" in card.text


def test_checkpoints_are_pushed_with_what_is_in_flight(hub, tmp_path):
    """`hub_strategy="checkpoint"`: a run can be resumed from the hub, in the middle of a window too."""
    trainer = make_trainer(
        "grpo",
        tmp_path / "run",
        push_to_hub=True,
        hub_model_id="me/shared",
        hub_strategy="checkpoint",
        hub_token=TOKEN,
        save_strategy="steps",
        save_steps=1,
        num_iterations=2,
        max_steps=1,
    )
    trainer.train()
    trainer._finish_current_push()
    files = hub.files["models/me/shared"]
    assert (tmp_path / "run" / "_rollouts.db").exists()
    assert [name for name in files if ".db" in name] == [], "what was played stays on this machine"
    assert {"last-checkpoint/rollouts-0.safetensors", "last-checkpoint/trainer_state.json"} <= files.keys()
    assert {message for _, message in hub.commits} >= {"Training in progress, step 1, checkpoint"}


def test_adapters_are_pushed_without_the_model_below(hub, tmp_path):
    keywords = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    trainer = make_trainer("grpo", tmp_path / "adapters", keywords=keywords, hub_token=TOKEN)
    trainer.push_to_hub()
    files = hub.files["models/me/adapters"]
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    assert ModelCard(files["README.md"].decode()).data.library_name == "peft"


def test_a_card_names_only_what_is_on_the_hub(tmp_path):
    """A folder of this machine says nothing to others, and may say too much."""
    card = model_card(algorithm="GRPO", model_name="m", base_model="someone/base", dataset_name=["a/b", "c/d"])
    assert card.data.base_model == "someone/base"
    assert "https://huggingface.co/datasets/c/d" in card.text
    for private in (str(tmp_path), "folder", "../up", "", None):
        assert model_card(algorithm="GRPO", model_name="m", base_model=private).data.base_model is None


def test_completions_go_to_a_dataset_repository(hub, tmp_path, capsys):
    def reward(completion_ids: list[list[int]], log_extra: object, **_: object) -> list[float | None]:
        log_extra("size", [len(ids) for ids in completion_ids])  # type: ignore[operator]
        return [None, *map(float, range(1, len(completion_ids)))]

    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=reward,
        log_completions=True,
        log_completions_hub_repo="said",
        num_completions_to_print=1,
        hub_token=TOKEN,
        hub_private_repo=True,
    )
    trainer.train()
    assert hub.private == {"datasets/me/said": True}
    files = hub.files["datasets/me/said"]
    assert sorted(files) == ["completions/000001.parquet", "completions/000002.parquet"]
    table = pyarrow.parquet.read_table(io.BytesIO(files["completions/000002.parquet"])).to_pydict()
    assert table["step"] == [2] * 4
    assert table["reward reward"] == [None, 1.0, 2.0, 3.0]
    assert len(table["prompt"]) == len(table["completion"]) == 4
    assert all(size.isdigit() for size in table["size"])


def test_a_hub_that_fails_does_not_stop_the_training(hub, tmp_path, caplog, capsys):
    options = {"log_completions": True, "log_completions_hub_repo": "owner/said", "hub_token": TOKEN}
    trainer = make_trainer("grpo", tmp_path, **options)
    hub.broken = True
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert "completions/000001.parquet could not be uploaded to owner/said" in caplog.text


def test_a_repository_for_completions_that_are_not_collected_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"log_completions_hub_repo='me/said'.*log_completions=True"):
        GRPOConfig(str(tmp_path), log_completions_hub_repo="me/said")
