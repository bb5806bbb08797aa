"""A model is packed only where its rows keep the numbers that they have alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from agentrl.generation.base import SamplingParams
from agentrl.testing.models import TINY_FAMILIES, tiny_model
from agentrl.training import layouts
from agentrl.training.batching import Layout, collate
from agentrl.training.layouts import choose_layout
from agentrl.training.scoring import score
from agentrl.types import Outcome, Task, Trajectory

PLAIN = SamplingParams(max_tokens=8)
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}


def trajectory(prompt: list[int], completion: list[int]) -> Trajectory:
    mask = [1, 1, 0, 1] * len(completion)
    return Trajectory(
        task=Task("group", 0, 0),
        prompt="",
        prompt_ids=prompt,
        completion="",
        completion_ids=completion,
        loss_mask=mask[: len(completion)],
        logprobs=[0.0] * len(completion),
        outcome=Outcome.FINISHED,
    )


def ragged_rows() -> list[Trajectory]:
    """Rows longer and shorter than the sliding windows of 8; four have one prompt, three of those go on alike."""
    ids = torch.randint(3, 64, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = ids[:11]
    return [
        trajectory(prompt, ids[11:36]),
        trajectory(ids[36:39], ids[39:44]),
        trajectory(prompt, ids[44:47]),
        trajectory(ids[47:64], ids[64:80]),
        trajectory(prompt, ids[11:25] + ids[80:100]),
        trajectory(prompt, ids[11:23] + ids[100:104]),
    ]


def alone(model: nn.Module, rows: list[Trajectory]) -> torch.Tensor:
    return torch.cat([score(model, collate([row], pad_token_id=0), PLAIN).logps_N for row in rows])


LAYOUTS = [(Layout.SHARED, "sdpa"), (Layout.PACKED, "sdpa"), (Layout.PACKED, "eager"), (Layout.PADDED, "eager")]


@pytest.mark.parametrize(("layout", "attention"), LAYOUTS)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_rows_numbers_do_not_depend_on_the_layout(family, layout, attention):
    """Logprobs, entropies and gradients in float32, with sliding windows and a prompt that rows share."""
    gradients = []
    for kind in (None, layout):
        model = tiny_model(family, attn_implementation=attention)  # in evaluation mode: GPT-2 has dropout
        if kind is None:
            logps_N = alone(model, ragged_rows())
        else:
            logps_N = score(model, collate(ragged_rows(), pad_token_id=0, layout=kind), PLAIN).logps_N
        (logps_N * torch.linspace(-1, 1, len(logps_N))).sum().backward()
        gradients.append([logps_N.detach(), *(p.grad / p.grad.abs().max() for p in model.parameters())])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_recomputed_layers_attend_within_the_same_segments():
    """Gradient checkpointing looks the attention function up again, after the forward pass is over."""
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model("gemma3").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        score(model, collate(ragged_rows(), pad_token_id=0, layout=Layout.SHARED), PLAIN).logps_N.sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_sdpa_shares_prompts_and_eager_pads(family):
    assert choose_layout(tiny_model(family)) is Layout.SHARED
    assert choose_layout(tiny_model(family, attn_implementation="eager")) is Layout.PADDED


def test_rows_are_padded_where_prompts_must_not_be_shared():
    """The router loss counts the tokens of a micro-batch, those of a prompt as often as it occurs."""
    assert choose_layout(tiny_model("qwen3"), share=False) is Layout.PADDED


def test_the_trial_leaves_the_model_in_its_mode():
    model = tiny_model("qwen3").train()
    choose_layout(model)
    assert model.training


LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN3_NEXT = {**SMALL, **HEADS, **LINEAR, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LLAMA4 = {**SMALL, **HEADS, "intermediate_size_mlp": 64, "attention_chunk_size": 8, "num_local_experts": 2}


@pytest.mark.parametrize(
    ("model_class", "config", "reason"),
    [
        (MambaForCausalLM, MambaConfig(**SMALL), None),
        (
            Qwen3NextForCausalLM,
            Qwen3NextConfig(
                **QWEN3_NEXT, shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"]
            ),
            "layer 0 keeps a LinearAttentionLayer, not keys and values by position",
        ),
        (Llama4ForCausalLM, Llama4TextConfig(**LLAMA4), "chunked attention"),
    ],
    ids=["mamba", "qwen3-next", "llama4"],
)
def test_what_packing_cannot_serve_is_padded(model_class, config, reason, caplog):
    torch.manual_seed(0)
    assert choose_layout(model_class(config)) is Layout.PADDED
    assert reason is None or reason in caplog.text


def test_positions_with_an_offset_are_kept():
    """OPT counts its positions from 2."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32
    )
    model = OPTForCausalLM(config).eval()
    layout = choose_layout(model)
    batch = collate(ragged_rows(), pad_token_id=0, layout=layout)
    torch.testing.assert_close(score(model, batch, PLAIN).logps_N, alone(model, ragged_rows()), atol=1e-5, rtol=1e-5)


def test_the_trial_finds_rows_that_see_each_other(caplog, monkeypatch):
    """As if the structure told nothing: a model whose next token depends on the one before in the flat row."""

    class Leaking(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.config, self.device = inner, inner.config, inner.device

        def forward(self, input_ids: torch.Tensor, **options: object) -> object:
            output = self.inner(input_ids, **options)
            output.logits = output.logits + 0.1 * output.logits.roll(1, dims=1)
            return output

    assert choose_layout(Leaking(tiny_model("llama"))) is Layout.PADDED
    assert "in a trial their logits were" in caplog.text


def test_the_trial_finds_layers_that_do_not_tell_their_window(caplog):
    model = tiny_model("mistral")
    for layer in model.model.layers:
        layer.self_attn.config = tiny_model("mistral", sliding_window=None).config
    assert choose_layout(model) is Layout.PADDED
    assert "tell attention the windows [None, None]; expected [8, 8]" in caplog.text


def test_a_trial_that_fails_means_padding(caplog, monkeypatch):
    monkeypatch.setattr(layouts, "_target_logits", lambda *_: 1 / 0)
    assert choose_layout(tiny_model("llama")) is Layout.PADDED
    assert "ZeroDivisionError" in caplog.text


def test_segments_are_refused_where_attention_is_not_told_them():
    model = tiny_model("llama", attn_implementation="eager")
    with pytest.raises(ValueError, match="segments need attn_implementation='sdpa', not 'eager'"):
        score(model, collate(ragged_rows(), pad_token_id=0, layout=Layout.SHARED), PLAIN)
