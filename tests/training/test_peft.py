"""Adapters: they alone train, rollouts come from them, and the model below is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from agentrl.errors import ConfigurationError
from agentrl.training.trainer import RolloutTrainer
from tests.training.runs import distance, first_fast, local, logged, make_trainer, rows, small_model, step_logs, weights
from tests.training.worlds import run_world


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], **options})


def peft_trainer(kind: str, folder: Path, **options: Any) -> RolloutTrainer:
    """A trainer that is given `peft_config` ("config"), or a model with adapters already ("model")."""
    config = options.pop("lora", lora())
    keywords = options.pop("keywords", {})
    torch.manual_seed(0)
    if kind == "config":
        keywords = {**keywords, "peft_config": config}
        model: Any = small_model()
    else:
        model = get_peft_model(small_model(), config)
    algorithm = options.pop("algorithm", "grpo")
    options = {"generator": local, "learning_rate": 3e-2, **options}
    return make_trainer(algorithm, folder, model=model, keywords=keywords, **options)


KINDS = pytest.mark.parametrize("kind", ["config", "model"])


@KINDS
@pytest.mark.parametrize("algorithm", first_fast(["grpo", "rloo"], 1))
def test_only_the_adapters_train(kind, algorithm, tmp_path):
    trainer = peft_trainer(kind, tmp_path, algorithm=algorithm, beta=0.1)
    assert isinstance(trainer.model, PeftModel)
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    for name in before:
        if "lora_" in name:
            assert not torch.equal(before[name], after[name]), name
        else:
            assert torch.equal(before[name], after[name]), name
    assert {n for n, p in trainer.model.named_parameters() if p.requires_grad} == {n for n in before if "lora_" in n}


def test_adapters_with_peft_config_on_a_model_that_has_some_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="drop peft_config"):
        peft_trainer("model", tmp_path, keywords={"peft_config": lora()})


@KINDS
def test_n07_rollouts_come_from_the_adapters_as_they_are(kind, tmp_path):
    """Logprobs of sampler and trainer agree at each step, although the adapters have moved far from the base."""
    trainer = peft_trainer(kind, tmp_path, max_steps=4)
    trainer.train()
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == 4
    assert max(differences) < 1e-4
    ids = torch.tensor([[105, 106, 107, 108]])
    trainer.model.eval()
    with torch.no_grad(), trainer.model.disable_adapter():
        base = trainer.model(ids).logits.log_softmax(-1)
    with torch.no_grad():
        moved = (trainer.model(ids).logits.log_softmax(-1) - base).abs().max()
    assert moved > 0.05, "an engine on the base model would not have been noticed"


def test_n07_a_step_changes_what_the_generator_says(tmp_path):
    """The same tokens of the same evaluation get other logprobs after training."""
    trainer = peft_trainer("config", tmp_path, keywords={"eval_dataset": rows(2)}, temperature=1.0)
    reported: list[list[float]] = []
    play = trainer.collector._play

    def noting(*arguments: Any) -> Any:
        trajectories = play(*arguments)
        reported.append([logp for trajectory in trajectories for logp in trajectory.logprobs])
        return trajectories

    trainer.collector._play = noting  # type: ignore[method-assign]
    trainer.evaluate()
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    # Which rows share a batch depends on when they arrive, and rounding depends on the batch.
    assert reported[0] == pytest.approx(reported[1], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(reported[0], reported[-1], strict=False)) > 1e-3


@KINDS
def test_the_reference_is_the_model_below_the_adapters(kind, tmp_path):
    """At the first step a new adapter is the base, so the KL is 0; then it grows. No second model is held."""
    trainer = peft_trainer(kind, tmp_path, beta=0.1, max_steps=4)
    assert trainer.collector.baselines.reference is not None
    assert trainer.collector.baselines.reference.copy is None
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert all(value > 1e-5 for value in kl[1:])


def test_the_reference_of_trained_adapters_is_where_they_started(tmp_path):
    """Adapters trained before are not pulled back to the base model: KL is 0 at the first step, then grows."""
    model = get_peft_model(small_model(), lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    trainer = make_trainer("grpo", tmp_path, model=model, generator=local, beta=0.1, max_steps=3)
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert all(value > 1e-5 for value in kl[1:])


def test_a_checkpoint_holds_the_adapters_and_training_goes_on_from_it(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "dataset": rows(6)}
    whole = peft_trainer("config", tmp_path / "whole", max_steps=4, **options)
    whole.train()
    saved = {path.name for path in (tmp_path / "whole" / "checkpoint-2").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= saved
    assert "model.safetensors" not in saved
    peft_trainer("config", tmp_path / "parts", max_steps=2, **options).train()
    resumed = peft_trainer("config", tmp_path / "parts", max_steps=4, **options)
    resumed.train(resume_from_checkpoint=True)
    assert distance(weights(whole), weights(resumed)) < 1e-6
    assert logged(whole, "reward") == logged(resumed, "reward")
    loaded = PeftModel.from_pretrained(small_model(), tmp_path / "whole" / "checkpoint-4")
    ids = torch.tensor([[105, 106, 107, 108]])
    whole.model.eval()
    torch.testing.assert_close(loaded.eval()(ids).logits, whole.model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", first_fast(["config", "model"], 1))
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradient_checkpointing_learns_the_same(kind, reentrant, tmp_path):
    """Re-entrant checkpoints need inputs that require gradients, which frozen embeddings do not give."""
    kwargs = None if reentrant is None else {"use_reentrant": reentrant}
    options = {"max_steps": 2, "optim": "sgd"}
    plain = peft_trainer(kind, tmp_path, gradient_checkpointing=False, **options)
    plain.train()
    saving = peft_trainer(kind, tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs, **options)
    saving.train()
    assert min(logged(saving, "grad_norm")) > 0
    assert distance(weights(plain), weights(saving)) < 1e-6


def test_the_best_adapters_are_loaded_and_sampled_from(tmp_path):
    values = {1: 0.9, 2: 0.1}

    def reward(prompts: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if prompts[0] == "unseen":
            return [values[trainer_state.global_step]] * len(prompts)
        return [float(i) for i in range(len(prompts))]

    trainer = peft_trainer(
        "config",
        tmp_path,
        reward=reward,
        keywords={"eval_dataset": Dataset.from_dict({"prompt": ["unseen"]})},
        metric_for_best_model="eval_reward",
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        per_device_eval_batch_size=2,
    )
    trainer.train()
    best = PeftModel.from_pretrained(small_model(), tmp_path / "checkpoint-1").state_dict()
    ours = weights(trainer)
    assert all(torch.equal(ours[name], value) for name, value in best.items() if "lora_" in name)
    assert trainer.evaluate()["eval_sampling/sampling_logp_difference/max"] < 1e-4


def unused_copies(model: PreTrainedModel | nn.Module) -> list[bool]:
    """Whether the originals of `modules_to_save` require gradients."""
    return [p.requires_grad for name, p in model.named_parameters() if "original_module" in name]


def train_with_a_trained_head(folder: Path, checkpointing: bool, flat: bool) -> dict[str, Any]:
    """Two steps with LoRA and `modules_to_save`; with `flat` all advantages of the second one are 0."""

    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        even = flat and trainer_state.global_step == 1
        return [0.0 if even else float(i) for i in range(len(completions))]

    trainer = peft_trainer(
        "config",
        folder,
        lora=lora(modules_to_save=["lm_head"]),
        reward=reward,
        per_device_train_batch_size=2,
        gradient_checkpointing=checkpointing,
        beta=0.1,
        max_steps=2,
    )
    before = weights(trainer)
    trainer.train()
    return {
        "logs": step_logs(trainer),
        "weights": weights(trainer),
        "unused": unused_copies(trainer.model),
        "moved": distance(before, weights(trainer)),
    }


@pytest.mark.parametrize("checkpointing", first_fast([True, False], 1))
def test_n06_unused_copies_of_a_trained_head_do_not_stop_two_processes(checkpointing, tmp_path):
    arguments = (tmp_path, checkpointing, True)
    first, second = run_world(train_with_a_trained_head, tmp_path / "a", *arguments)
    again, _ = run_world(train_with_a_trained_head, tmp_path / "b", *arguments)
    assert first["logs"] == second["logs"]
    assert [log["loss"] for log in first["logs"]] == [log["loss"] for log in again["logs"]]
    assert first["unused"]
    assert not any(first["unused"])
    assert first["moved"] > 0
    assert distance(first["weights"], second["weights"]) == 0.0


def test_n06_a_head_that_trains_whole_is_sampled_from_and_switched_off_in_the_reference(tmp_path):
    trainer = peft_trainer("config", tmp_path, lora=lora(modules_to_save=["lm_head"]), beta=0.1, max_steps=3)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-7)
    assert logged(trainer, "kl")[2] > 1e-5
    assert not any(unused_copies(trainer.model))


def test_adapters_on_the_head_are_sampled_from_and_scored_with(tmp_path):
    trainer = peft_trainer("config", tmp_path, lora=lora(target_modules=["q_proj", "lm_head"]), beta=0.1, max_steps=3)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "kl")[2] > 1e-5
    head = [p for name, p in trainer.model.named_parameters() if "lm_head.lora_B" in name]
    assert head[0].abs().max() > 0


@pytest.mark.parametrize("kind", ["config", "model"])
def test_adapters_of_virtual_tokens_are_refused(kind, tmp_path):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    model = small_model() if kind == "config" else get_peft_model(small_model(), config)
    keywords = {"peft_config": config} if kind == "config" else {}
    with pytest.raises(ConfigurationError, match="virtual tokens"):
        make_trainer("grpo", tmp_path, model=model, keywords=keywords)


def test_merged_adapters_are_the_trained_model_and_train_on(tmp_path):
    """N07: W + scale * (B @ A), up to rounding, under names without a trace of the adapters."""
    trainer = peft_trainer("config", tmp_path)
    trainer.train()
    ids = torch.tensor([[105, 106, 107, 108]])
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(ids).logits
    merged = trainer.model.merge_and_unload()
    assert merged.state_dict().keys() == small_model().state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-5)
    again = make_trainer("grpo", tmp_path, model=merged.requires_grad_(True), generator=local, beta=0.1)
    again.train()
    assert logged(again, "kl")[0] == pytest.approx(0.0, abs=1e-7)
    assert max(logged(again, "sampling/sampling_logp_difference/max")) < 1e-4


EIGHT, FOUR = {"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("bits", "exact"), [(FOUR, 1e-4), pytest.param(EIGHT, 0.2, marks=pytest.mark.slow)], ids=["4", "8"]
)
def test_adapters_train_on_a_quantized_model(bits, exact, tmp_path):
    """QLoRA, on the CPU too. 8-bit products round by the batch they are in, so sampler and trainer differ a little."""
    pytest.importorskip("bitsandbytes")
    small_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    trainer = make_trainer(
        "grpo",
        tmp_path,
        model=str(tmp_path / "base"),
        generator=local,
        beta=0.1,
        learning_rate=3e-2,
        max_steps=3,
        keywords={
            "quantization_config": BitsAndBytesConfig(**bits, bnb_4bit_compute_dtype=torch.float32),
            "peft_config": lora(),
        },
    )
    below = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "base_layer" in name}
    assert {p.dtype for p in below.values()} <= {torch.uint8, torch.int8}
    trainer.train()
    assert {n for n, p in trainer.model.named_parameters() if p.requires_grad and "lora_" not in n} == set()
    assert all(torch.equal(p, below[name]) for name, p in trainer.model.named_parameters() if name in below)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < exact
    assert min(logged(trainer, "grad_norm")) > 0
    assert logged(trainer, "kl")[2] > 1e-3
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
