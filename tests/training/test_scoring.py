"""Scores equal what the model's own logits give, in every layout, wrapper and sampling mode."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
)

from agentrl.generation.base import SamplingParams
from agentrl.objectives.aggregation import Denominators, token_loss
from agentrl.objectives.losses import clipped_surrogate, log_ratios
from agentrl.testing.models import tiny_model
from agentrl.training import scoring
from agentrl.training.batching import Layout, collate, split
from agentrl.training.scoring import score
from agentrl.types import Outcome, Task, Trajectory

PLAIN = SamplingParams(max_tokens=8)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def trajectory(prompt: list[int], completion: list[int], mask: list[int]) -> Trajectory:
    return Trajectory(
        task=Task("group", 0, 0),
        prompt="",
        prompt_ids=prompt,
        completion="",
        completion_ids=completion,
        loss_mask=mask,
        logprobs=[0.0] * len(mask),
        outcome=Outcome.FINISHED,
    )


ROWS = [
    trajectory([5, 6, 7], [8, 9, 2, 10, 11, 12, 2], [1, 1, 1, 0, 0, 1, 1]),
    trajectory([3], [4, 5], [1, 1]),
    trajectory([9, 9, 9, 9, 4], [7, 5, 9, 6, 0], [1, 1, 1, 0, 0]),
    trajectory([5, 6, 7], [4, 9, 6], [1, 0, 1]),  # the prompt of the first row
]


def build(family: str) -> nn.Module:
    special = {
        "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 2.0}),
        "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
        "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 4.0}),
        # Multiplies by what Granite divides by: a head that this project does not know.
        "hyperclovax": (HyperCLOVAXForCausalLM, HyperCLOVAXConfig, {"logits_scaling": 4.0}),
    }
    if family not in special:
        return tiny_model(family)
    model_class, config_class, extra = special[family]
    torch.manual_seed(0)
    return model_class(config_class(**SMALL, **extra)).eval()


def own_logits(model: nn.Module, rows: list[Trajectory] = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at each target, from one full forward per row, and the target ids."""
    logits, ids = [], []
    for row in rows:
        row_logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0]
        for c, sampled in enumerate(row.loss_mask):
            if sampled:
                logits.append(row_logits[len(row.prompt_ids) + c - 1])
                ids.append(row.completion_ids[c])
    return torch.stack(logits), torch.tensor(ids)


def gather(logps_NV: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    return logps_NV.gather(1, ids_N[:, None])[:, 0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "gemma2", "cohere", "granite"])
def test_equals_the_models_own_logits(family, layout):
    model = build(family)
    if layout is Layout.SHARED and model.config._attn_implementation != "sdpa":
        pytest.skip("Gemma 2 caps its attention, which sdpa cannot")
    logits, ids = own_logits(model)
    logps = (logits / 0.7).log_softmax(-1)
    batch = collate(ROWS, pad_token_id=2, layout=layout)
    scores = score(model, batch, SamplingParams(max_tokens=8, temperature=0.7), chunk_logits=4 * 64)
    assert scoring._tail_known[model]
    assert_close(scores.logps_N, gather(logps, ids))
    assert_close(scores.entropy_N, -(logps.exp() * logps).sum(-1))


def test_unknown_head_falls_back_to_full_logits(caplog):
    model = build("hyperclovax")
    logits, ids = own_logits(model)
    batch = collate(ROWS, pad_token_id=2)
    for _ in range(2):
        assert_close(score(model, batch, PLAIN, chunk_logits=4 * 64).logps_N, gather(logits.log_softmax(-1), ids))
    assert [record.message.split(" ")[0] for record in caplog.records] == ["HyperCLOVAXForCausalLM"]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_equal_those_of_the_full_logits(layout, temperature):
    """Of logprobs and entropies, each token with a weight of its own."""
    model = build("qwen3").train()
    twin = copy.deepcopy(model)
    logits, ids = own_logits(twin)
    logps = (logits / temperature).log_softmax(-1)
    weights = torch.linspace(-1, 1, len(ids))
    ((gather(logps, ids) + 0.1 * -(logps.exp() * logps).sum(-1)) * weights).sum().backward()
    sampling = SamplingParams(max_tokens=8, temperature=temperature)
    batch = collate(ROWS, pad_token_id=2, layout=layout)
    scores = score(model, batch, sampling, chunk_logits=3 * 64, entropy_grad=True)
    ((scores.logps_N + 0.1 * scores.entropy_N) * weights).sum().backward()
    for (name, ours), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        scale = expected.grad.abs().max()
        torch.testing.assert_close(ours.grad / scale, expected.grad / scale, atol=1e-5, rtol=1e-5, msg=name)


def test_gradient_checkpointing_changes_nothing():
    model = build("qwen3").train()
    batch = collate(ROWS, pad_token_id=2)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        score(model, batch, PLAIN, chunk_logits=3 * 64).logps_N.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.gradient_checkpointing_enable()
    for plain, recomputed in zip(*gradients, strict=True):
        assert_close(recomputed, plain)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_n03_e02_padding_is_not_attended_to(family):
    model = build(family)
    row = trajectory([5, 6, 2], [2, 8, 9], [1, 1, 1])
    alone = score(model, collate([row], pad_token_id=2), PLAIN).logps_N
    beside = collate([row, trajectory([4] * 9, [3], [0])], pad_token_id=2, pad_to_multiple_of=16)
    assert_close(score(model, beside, PLAIN).logps_N, alone)


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.SHARED])
def test_packed_rows_do_not_see_each_other(layout):
    model = build("llama")
    first, other = collate(ROWS, pad_token_id=0, layout=layout), copy.deepcopy(ROWS)
    other[0].completion_ids = [40 + c for c in range(7)]
    second = collate(other, pad_token_id=0, layout=layout)
    later = first.row_N > 0
    changed = score(model, second, PLAIN).logps_N
    assert torch.equal(score(model, first, PLAIN).logps_N[later], changed[later])


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", Layout)
def test_scores_the_distribution_that_was_sampled_from(settings, layout):
    model = build("llama")
    logits, ids = own_logits(model)
    sampling = SamplingParams(max_tokens=8, **settings)
    before = [
        row.prompt_ids + row.completion_ids[:c] for row in ROWS for c, sampled in enumerate(row.loss_mask) if sampled
    ]
    expected = [
        one_by_one(row_logits, seen, target, sampling)
        for row_logits, seen, target in zip(logits, before, ids.tolist(), strict=True)
    ]
    scores = score(model, collate(ROWS, pad_token_id=0, layout=layout), sampling, chunk_logits=4 * 64)
    assert_close(scores.logps_N, torch.tensor([logp for logp, _ in expected]))
    assert_close(scores.entropy_N, torch.tensor([h for _, h in expected]))
    assert scores.logps_N.requires_grad
    scores.logps_N.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def one_by_one(logits_V: torch.Tensor, seen: list[int], target: int, sampling: SamplingParams) -> tuple[float, float]:
    """Logprob of the target and entropy, in plain Python, the target always in the support."""
    scores = logits_V.tolist()
    for token in set(seen):
        factor = sampling.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    scores = torch.tensor(scores, dtype=torch.float64) / sampling.temperature
    ranked = sorted(range(len(scores)), key=lambda v: -scores[v])
    kept = ranked[: sampling.top_k or len(ranked)]
    p = scores[kept].softmax(0).tolist()
    mass, nucleus = 0.0, []
    for token, probability in zip(kept, p, strict=True):
        if mass >= sampling.top_p and nucleus:
            break
        nucleus.append(token)
        mass += probability
    floor = (sampling.min_p or 0.0) * scores[ranked[0]].exp()
    support = sorted({v for v in nucleus if scores[v].exp() >= floor} | {target})
    logps = scores[support].log_softmax(0)
    return logps[support.index(target)].item(), -(logps.exp() * logps).sum().item()


def test_entropy_is_optional_and_detached_unless_asked():
    model = build("llama")
    batch = collate(ROWS, pad_token_id=0)
    assert score(model, batch, PLAIN, with_entropy=False).entropy_N.numel() == 0
    assert not score(model, batch, PLAIN).entropy_N.requires_grad
    assert score(model, batch, PLAIN, entropy_grad=True).entropy_N.requires_grad
    with torch.no_grad():
        assert not score(model, batch, PLAIN, entropy_grad=True).logps_N.requires_grad


def test_the_head_never_sees_more_than_a_chunk_or_a_position_per_row(monkeypatch):
    model = build("qwen3").train()
    batch = collate(ROWS, pad_token_id=0, pad_to_multiple_of=64)
    seen: list[int] = []
    forward = model.lm_head.forward
    monkeypatch.setattr(
        model.lm_head, "forward", lambda hidden: (seen.append(hidden[..., 0].numel()), forward(hidden))[1]
    )
    for checks in (batch.rows, 0):  # on the first use the head is checked
        seen.clear()
        score(model, batch, PLAIN, chunk_logits=5 * 64).logps_N.sum().backward()
        assert max(seen) == 5
        # Forward, recomputation of all chunks but the last, what the model is left.
        assert sum(seen) == 2 * batch.tokens - batch.tokens % 5 + batch.rows + checks


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata)
        return output

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def long_row(turns: int, vocab_size: int) -> Trajectory:
    """Turns of 4 sampled tokens, each followed by 16 tool tokens: 80% of the completion."""
    ids = torch.randint(3, vocab_size, (20 * turns,), generator=torch.Generator().manual_seed(0)).tolist()
    return trajectory([1, 2, 3], ids, ([1] * 4 + [0] * 16) * turns)


def peak_bytes(turns: int, vocab_size: int, **options: object) -> tuple[int, int]:
    """The peak of a forward and a backward pass, and the bytes kept between them, but for the gradients."""
    model = tiny_model("qwen3", vocab_size=vocab_size, max_position_embeddings=4096).train()
    batch = collate([long_row(turns, vocab_size)], pad_token_id=0, layout=Layout.SHARED)
    score(model, batch, PLAIN).logps_N.sum().backward()  # gradients are there from now on
    with LiveBytes() as live:
        scores = score(model, batch, PLAIN, chunk_logits=2**15, **options)
        kept = live.now
        (scores.logps_N.sum() + scores.entropy_N.sum()).backward()
    return live.peak, kept


@pytest.mark.parametrize("options", [{}, {"entropy_grad": True}], ids=str)
def test_peak_memory_does_not_grow_with_vocabulary_times_length(options):
    """It is a sum of what the length takes and what the vocabulary takes; were there a product, growth would differ."""
    peaks = {(turns, v): peak_bytes(turns, v, **options) for turns in (8, 32) for v in (2_000, 20_000)}
    growth = [[peaks[32, v][i] - peaks[8, v][i] for i in range(2)] for v in (2_000, 20_000)]
    more_logits = 24 * 4 * (20_000 - 2_000) * 4  # those of the targets of 24 more turns, once
    assert abs(growth[1][0] - growth[0][0]) < 0.02 * more_logits
    assert abs(growth[1][1] - growth[0][1]) < 0.02 * more_logits


def test_no_hook_is_left_behind():
    model = build("llama")
    batch = collate(ROWS, pad_token_id=0)
    score(model, batch, PLAIN)
    model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(model, batch, PLAIN)
    assert not model._forward_hooks
    assert not model.lm_head._forward_pre_hooks
    assert not model.lm_head._forward_hooks


def test_the_head_is_called_once_whatever_the_chunks_and_its_output_carries_the_gradient():
    """Sharded weights are fetched by hooks: around the head's call, and when the gradient of its output arrives."""
    model = build("qwen3").train()
    calls, gradients = [], []

    def watch(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        calls.append(len(output))
        output[1].register_hook(gradients.append)

    model.lm_head.register_forward_hook(watch)
    score(model, collate(ROWS, pad_token_id=0), PLAIN, chunk_logits=64).logps_N.sum().backward()
    assert len(calls) == len(gradients) == 1


def test_models_are_not_kept_alive():
    known = len(scoring._tail_known)
    model = build("llama")
    score(model, collate(ROWS, pad_token_id=0), PLAIN)
    del model
    gc.collect()
    assert len(scoring._tail_known) <= known


def adapted(family: str, *, tied: bool = True, **settings: object) -> nn.Module:
    torch.manual_seed(1)
    model = tiny_model(family, tie_word_embeddings=tied)
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **settings))
    return model.train()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=["layers", "whole head", "lora on head"],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_adapters(settings, tied):
    model = adapted("qwen3", tied=tied, **settings)
    logits, ids = own_logits(model)
    scores = score(model, collate(ROWS, pad_token_id=0), PLAIN, chunk_logits=4 * 64)
    assert scoring._tail_known[model]
    assert_close(scores.logps_N, gather(logits.log_softmax(-1), ids))
    scores.logps_N.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_autocast_reaches_the_head():
    model = build("llama")
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)  # as accelerate does
    logits, ids = own_logits(model)
    assert logits.dtype == torch.bfloat16
    scores = score(model, collate(ROWS, pad_token_id=0), PLAIN, chunk_logits=4 * 64)
    assert scoring._tail_known[model]
    assert scores.logps_N.dtype == torch.float32
    torch.testing.assert_close(scores.logps_N, gather(logits.float().log_softmax(-1), ids), atol=0.2, rtol=0.05)
    scores.logps_N.sum().backward()


@pytest.mark.parametrize("trained", [True, False], ids=["targets", "none"])
def test_ddp_reduces_every_parameter(trained, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = build("llama").train()
        plain = copy.deepcopy(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        batch = collate(ROWS, pad_token_id=0, trained=[trained] * 4)
        for _ in range(2):  # DDP complains in the second forward about what the first backward left out
            model.zero_grad()
            score(wrapped, batch, PLAIN, chunk_logits=4 * 64).logps_N.sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    score(plain, batch, PLAIN).logps_N.sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, expected.grad)
        assert trained or not ours.grad.any()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_gradient_of_the_model_does_not_depend_on_the_split(loss_type):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (1, 4, 2, 6, 3, 5, 2, 4):
        ids = torch.randint(3, 64, (length + 2,), generator=generator).tolist()
        rows.append(trajectory(ids[:2], ids[2:], [1] * length))
    advantages = torch.randn(8, generator=generator).tolist()
    trained = [True] * 5 + [False] + [True] * 2
    counts = Denominators(rows=7, tokens=22)
    gradients = []
    for size in (8, 4, 2, 1):
        model = build("qwen3").train()
        for part in split(range(8), size):
            batch = collate(
                [rows[r] for r in part],
                pad_token_id=0,
                advantages=[advantages[r] for r in part],
                trained=[trained[r] for r in part],
                layout=Layout.PACKED if size == 4 else Layout.PADDED,
            )
            ratio_N = log_ratios(score(model, batch, PLAIN).logps_N, None, batch.row_N, batch.rows)
            loss_N = clipped_surrogate(ratio_N, batch.advantages_R[batch.row_N], 0.2, 0.2).loss
            token_loss(loss_N, batch.row_N, batch.rows, loss_type, counts, max_completion_length=8).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    scale = gradients[0].abs().max()
    for other in gradients[1:]:
        torch.testing.assert_close(other / scale, gradients[0] / scale, atol=1e-6, rtol=0)
