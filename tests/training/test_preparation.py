"""Dropout off, and the language-model head in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentrl.errors import ConfigurationError
from agentrl.generation.base import SamplingParams
from agentrl.testing.models import tiny_model
from agentrl.training.batching import collate
from agentrl.training.preparation import cast_head, disable_dropout
from agentrl.training.scoring import score
from agentrl.types import Outcome, Task, Trajectory
from tests.training.runs import local, logged, make_trainer, small_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def head(**options: Any) -> Any:
    return tiny_model("llama", tie_word_embeddings=False, dtype=torch.bfloat16, **options).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("qwen2", {"attention_dropout": 0.5}),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_dropout_training_mode_is_evaluation_mode(family, options, attention):
    """Attention keeps its probability outside of any dropout module."""
    model = tiny_model(family, attn_implementation=attention, **options)
    expected = model(IDS).logits
    model.train()
    assert not torch.allclose(model(IDS).logits, expected)
    disable_dropout(model)
    torch.testing.assert_close(model(IDS).logits, expected)


def test_the_dropout_of_adapters_is_disabled_too():
    config = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(tiny_model("llama"), config)
    expected = model.eval()(IDS).logits
    disable_dropout(model)
    torch.testing.assert_close(model.train()(IDS).logits, expected)


def test_policy_and_reference_have_no_dropout(tmp_path):
    model = small_model(attention_dropout=0.5)
    trainer = make_trainer("grpo", tmp_path, model=model, disable_dropout=True, beta=0.1, generator=local, max_steps=1)
    reference = trainer.collector.baselines.reference.copy
    torch.testing.assert_close(reference.train()(IDS).logits, reference.eval()(IDS).logits)
    trainer.train()
    assert logged(trainer, "kl") == [pytest.approx(0.0, abs=1e-6)]


def test_the_head_computes_in_float32_under_its_old_name():
    """Logits are the float32 product of the hidden states and the weights, also under autocast and in copies."""
    model = head()
    names = list(model.state_dict())
    before = model.lm_head.weight.detach().clone()
    cast_head(model)
    assert list(model.state_dict()) == names
    assert model.lm_head.weight.dtype is torch.float32
    assert torch.equal(model.lm_head.weight, before.float())
    assert model.model.embed_tokens.weight.dtype is torch.bfloat16
    for policy in (model, copy.deepcopy(model)):
        hidden = policy.model(IDS).last_hidden_state
        expected = hidden.float() @ before.float().T
        assert torch.equal(policy(IDS).logits, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = policy.model(IDS).last_hidden_state
            logits = policy(IDS).logits
        assert logits.dtype is torch.float32
        assert torch.equal(logits, hidden.float() @ before.float().T)


def test_scoring_goes_through_the_float32_head():
    model = head()
    cast_head(model)
    row = Trajectory(Task("g", 0, 0), "p", [5, 6, 7], "c", [8, 9, 10], [1] * 3, [0.0] * 3, Outcome.FINISHED)
    scores = score(model, collate([row], pad_token_id=0), SamplingParams(max_tokens=1))
    expected = model(IDS).logits[0].log_softmax(-1)[torch.arange(2, 5), IDS[0, 3:]]
    torch.testing.assert_close(scores.logps_N, expected, atol=1e-6, rtol=0)
    scores.logps_N.sum().backward()
    assert model.lm_head.weight.grad.dtype is torch.float32


def test_generator_trainer_and_reference_agree(tmp_path):
    """Invariant 3, in bfloat16 with a float32 head."""
    model = small_model(tie_word_embeddings=False).to(torch.bfloat16)
    options = {"generator": local, "cast_lm_head_to_fp32": True, "beta": 0.1, "max_steps": 1}
    trainer = make_trainer("grpo", tmp_path, model=model, **options)
    assert trainer.collector.baselines.reference.copy.lm_head.weight.dtype is torch.float32
    trainer.train()
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 1e-4
    assert logged(trainer, "kl") == [pytest.approx(0.0, abs=1e-6)]


def test_a_tied_head_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cast_lm_head_to_fp32.*tie_word_embeddings.*dtype"):
        make_trainer("grpo", tmp_path, model=small_model(tie_word_embeddings=True), cast_lm_head_to_fp32=True)


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_head_with_adapters_is_refused(options, tmp_path):
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options})
    with pytest.raises(ConfigurationError, match=r"cast_lm_head_to_fp32.*adapter"):
        make_trainer(
            "grpo",
            tmp_path,
            model=small_model(tie_word_embeddings=False),
            keywords={"peft_config": config},
            cast_lm_head_to_fp32=True,
        )


def test_adapters_elsewhere_are_fine(tmp_path):
    model = get_peft_model(head(), LoraConfig(r=2, target_modules=["q_proj"]))
    cast_head(model)
    assert model.get_base_model().lm_head.weight.dtype is torch.float32
    assert not model.get_base_model().lm_head.weight.requires_grad
    assert model(IDS).logits.dtype is torch.float32
