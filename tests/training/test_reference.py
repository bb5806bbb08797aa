"""The reference is the policy before training, and stays it unless it is told to follow."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from agentrl.errors import ConfigurationError
from agentrl.testing.models import tiny_model
from agentrl.training.arguments import GRPOConfig
from agentrl.training.reference import make_reference
from tests.training.runs import distance, logged, make_trainer, rows, weights, whole_and_resumed

IDS = torch.tensor([[5, 6, 7, 8]])


def test_no_reference_without_a_kl_term():
    assert make_reference(tiny_model("llama"), 0.0) is None


def test_a_copy_stays_when_the_policy_moves():
    model = tiny_model("llama").train()
    before = model(IDS).logits.detach()
    reference = make_reference(model, 0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    with reference.active(model) as module:
        logits = module(IDS).logits
    assert module is not model
    assert torch.equal(logits, before)
    assert not logits.requires_grad
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.training


def test_adapters_are_put_back_only_inside():
    model = tiny_model("llama")
    before = model(IDS).logits.detach()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)).train()
    reference = make_reference(model, 0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.fill_(0.3)
    with reference.active(model) as module:
        torch.testing.assert_close(module(IDS).logits, before)
        assert not module(IDS).logits.requires_grad
    assert model.training
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)
    assert not torch.allclose(model(IDS).logits, before)
    filled = [p for name, p in model.named_parameters() if "lora_" in name]
    assert all(bool((p == 0.3).all()) for p in filled)


class Record(TrainerCallback):
    """Keeps the weights of the policy after each step."""

    def __init__(self) -> None:
        self.policies: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.policies.append({name: p.detach().clone() for name, p in kwargs["model"].named_parameters()})


SYNC = {"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 2}


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_synchronised_reference_is_the_documented_mixture(algorithm, tmp_path):
    record = Record()
    trainer = make_trainer(algorithm, tmp_path, max_steps=5, keywords={"callbacks": [record]}, dataset=rows(6), **SYNC)
    expected = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for step in (2, 4):
        policy = record.policies[step - 1]
        expected = {name: 0.6 * policy[name] + (1 - 0.6) * expected[name] for name in expected}
    mixed = dict(trainer.collector.baselines.reference.copy.named_parameters())
    assert distance(mixed, expected) < 1e-6
    assert distance(mixed, record.policies[-1]) > 1e-4
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)


def test_a_synchronised_reference_is_part_of_a_checkpoint(tmp_path):
    whole, resumed = whole_and_resumed(tmp_path, at=3, steps=5, **SYNC)
    states = [dict(trainer.collector.baselines.reference.copy.state_dict()) for trainer in (whole, resumed)]
    assert distance(*states) == 0.0
    assert distance(weights(whole), weights(resumed)) == 0.0
    assert logged(resumed, "kl")[3:] == logged(whole, "kl")[3:]


def test_a_checkpoint_without_the_reference_is_refused(tmp_path):
    make_trainer("grpo", tmp_path, beta=0.1, save_strategy="steps", save_steps=2).train()
    later = make_trainer("grpo", tmp_path, max_steps=4, **SYNC)
    with pytest.raises(ConfigurationError, match=r"without sync_ref_model.*sync_ref_model=False"):
        later.train(resume_from_checkpoint=True)


def test_synchronising_adapters_is_refused(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ConfigurationError, match="sync_ref_model: the policy is trained through adapters"):
        make_trainer("grpo", tmp_path, keywords={"peft_config": config}, **SYNC)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("beta", {"sync_ref_model": True, "beta": 0.0}),
        ("ref_model_mixup_alpha", {"ref_model_mixup_alpha": 1.5}),
        ("ref_model_sync_steps", {"ref_model_sync_steps": 0}),
    ],
)
def test_wrong_values_are_refused_by_name(name, options, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        GRPOConfig(str(tmp_path), **options)
