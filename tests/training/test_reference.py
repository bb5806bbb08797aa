"""The reference is the policy before training, and stays it."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from agentrl.testing.models import tiny_model
from agentrl.training.reference import make_reference

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
