"""The auxiliary loss of mixture-of-experts models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.errors import ConfigurationError
from agentrl.generation.base import SamplingParams
from agentrl.testing.tokenizers import FIX_VOCAB_SIZE
from agentrl.training.batching import collate
from agentrl.training.scoring import score
from agentrl.types import Outcome, Task, Trajectory
from tests.training.runs import distance, logged, make_trainer, small_model, weights

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 1}
SHAPE: dict[str, Any] = {
    "vocab_size": FIX_VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def experts(family: str = "qwen3_moe", **options: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, **options)).eval()
        fields = {**SHAPE, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, **options}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields)).eval()


def plain_router_loss(model: Any, rows: list[list[int]]) -> Tensor:
    """E x sum over experts of f P over the tokens of rows, each run alone, so without padding."""
    logits = [layer for row in rows for layer in model(torch.tensor([row]), output_router_logits=True).router_logits]
    probabilities = torch.cat(logits).softmax(-1)
    chosen = torch.zeros_like(probabilities)
    for token, top in enumerate(probabilities.topk(2).indices.tolist()):
        for expert in top:
            chosen[token, expert] = 1.0
    return 4 * (chosen.mean(0) * probabilities.mean(0)).sum()


def row(prompt: list[int], sampled: list[int]) -> Trajectory:
    return Trajectory(
        Task("g", 0, 0), "p", prompt, "c", sampled, [1] * len(sampled), [0.0] * len(sampled), Outcome.FINISHED
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_it_is_the_loss_over_all_tokens_but_padding(family):
    model = experts(family)
    rows = [row([5, 6, 7], [8, 9]), row([10], [11, 12, 13, 14, 15, 16])]
    batch = collate(rows, pad_token_id=0)
    scores = score(model, batch, SamplingParams(max_tokens=1), router_loss=True)
    plain = plain_router_loss(model, [t.prompt_ids + t.completion_ids for t in rows])
    assert scores.router_loss.item() == pytest.approx(plain.item(), abs=1e-5)
    without = score(model, batch, SamplingParams(max_tokens=1))
    assert without.router_loss is None
    assert torch.equal(without.logps_N, scores.logps_N)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_update_is_that_of_the_mean_over_micro_batches(algorithm, tmp_path):
    """I05: not divided again by gradient accumulation, also for RLOO. Rewards are equal, so nothing else moves."""
    trainer = make_trainer(
        algorithm,
        tmp_path,
        model=experts(),
        reward=lambda completions, **_: [1.0] * len(completions),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        router_aux_loss_coef=0.3,
        beta=0.0,
        **SGD,
    )
    trainer.train()
    model = experts()
    calls = trainer.collector.generator.calls
    losses = [plain_router_loss(model, [[*call.ids, *call.sample.ids]]) for call in calls]
    mean = torch.stack(losses).mean()
    (0.3 * mean).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    assert distance(weights(trainer), dict(model.state_dict())) < 1e-5
    assert logged(trainer, "aux_loss") == [pytest.approx(mean.item(), abs=1e-5)]
    assert logged(trainer, "loss") == [pytest.approx(0.3 * mean.item(), abs=1e-5)]


def test_gradient_checkpointing_changes_nothing(tmp_path):
    runs = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            "grpo", tmp_path, model=experts(), router_aux_loss_coef=0.3, gradient_checkpointing=checkpointing, **SGD
        )
        trainer.train()
        runs.append(weights(trainer))
    assert distance(*runs) < 1e-6


def test_micro_batches_without_trained_tokens_take_no_part(tmp_path):
    """I09: rows that nothing scored are left out, their micro-batches add nothing and are not counted."""
    trainer = make_trainer(
        "grpo",
        tmp_path,
        model=experts(),
        reward=lambda completions, **_: [1.0, 1.0, None, None],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        router_aux_loss_coef=0.3,
        **SGD,
    )
    trainer.train()
    model = experts()
    calls = trainer.collector.generator.calls[:2]
    mean = torch.stack([plain_router_loss(model, [[*call.ids, *call.sample.ids]]) for call in calls]).mean()
    assert logged(trainer, "aux_loss") == [pytest.approx(mean.item(), abs=1e-5)]
    assert logged(trainer, "loss") == [pytest.approx(0.3 * mean.item(), abs=1e-5)]


def test_the_model_config_gives_the_default(tmp_path):
    declared = make_trainer("grpo", tmp_path, model=experts(router_aux_loss_coef=0.25))
    assert declared.regularization.router_coef == 0.25
    off = make_trainer("grpo", tmp_path, model=experts(), router_aux_loss_coef=0.0, max_steps=1)
    off.train()
    assert logged(off, "aux_loss") == [None]


def test_a_dense_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"router_aux_loss_coef=0.1: LlamaForCausalLM.*mixture-of-experts"):
        make_trainer("grpo", tmp_path, model=small_model(), router_aux_loss_coef=0.1)
    assert make_trainer("rloo", tmp_path, model=small_model()).regularization.router_coef == 0.0
