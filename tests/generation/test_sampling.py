"""The sampling distribution: equal to transformers' processors, same form for decoding and scoring."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentrl.generation.sampling import (
    draw,
    first_occurrence,
    needs_processing,
    process_logits,
    seen_before,
    truncates,
)

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 2.0, "top_p": 0.95},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 0.5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
]


def reference(ids_NT, logits_NV, settings):
    makers = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    used = [make(settings[name]) for name, make in makers.items() if name in settings]
    return LogitsProcessorList(used)(ids_NT, logits_NV.clone()).log_softmax(-1)


@pytest.mark.parametrize("vocab_size", [300, 3000])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_processors_of_transformers(settings, vocab_size):
    torch.manual_seed(0)
    logits_NV = torch.randn(20, vocab_size) * 3
    ids_NT = torch.randint(0, vocab_size, (20, 40))
    first_NV = torch.stack([first_occurrence(ids_T, vocab_size) for ids_T in ids_NT])
    got = process_logits(logits_NV, seen_NV=seen_before(first_NV, torch.full((20,), 40)), **settings)
    torch.testing.assert_close(got, reference(ids_NT, logits_NV, settings), atol=1e-6, rtol=0)


def test_every_position_of_a_row_sees_what_stands_before_it():
    ids_T = torch.tensor([4, 7, 4, 2, 7])
    seen = seen_before(first_occurrence(ids_T, 9), torch.arange(1, 6))
    for position in range(1, 6):
        assert set(seen[position - 1].nonzero().flatten().tolist()) == set(ids_T[:position].tolist())


def test_j02_truncated_support_is_scored_as_it_was_drawn():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert process_logits(logits, top_p=0.7)[0, 0].item() == pytest.approx(math.log(0.625), abs=1e-6)


def test_j03_temperature():
    logits = torch.tensor([[2.0, 0.0]])
    assert process_logits(logits, temperature=0.5)[0, 0].item() == pytest.approx(-0.018150, abs=1e-6)


def test_kept_ids_stay_in_the_support():
    logits = torch.tensor([[3.0, 2.0, -1.0, -2.0]], requires_grad=True)
    assert process_logits(logits, top_k=1)[0, 3].item() == -math.inf
    kept = process_logits(logits, top_k=1, keep_N=torch.tensor([3]))
    torch.testing.assert_close(kept[0, [0, 3]], torch.tensor([3.0, -2.0]).log_softmax(-1))
    kept[0, 3].backward()
    assert logits.grad.isfinite().all()


def test_bfloat16_logits_are_processed_in_float32():
    assert process_logits(torch.randn(2, 5, dtype=torch.bfloat16), top_p=0.9).dtype == torch.float32


def test_a_penalty_without_seen_ids_is_an_error():
    with pytest.raises(ValueError, match="seen_NV"):
        process_logits(torch.zeros(1, 4), repetition_penalty=1.2)


def test_fast_paths():
    assert not needs_processing(top_k=0, top_p=1.0, min_p=None, repetition_penalty=1.0)
    assert needs_processing(repetition_penalty=1.1)
    assert not truncates(min_p=0.0)
    assert truncates(top_k=3)


@pytest.mark.parametrize("vocab_size", [2, 255, 256, 257, 1000])
def test_draws_invert_the_cumulative_distribution(vocab_size):
    torch.manual_seed(0)
    logprobs_V = (torch.randn(vocab_size) * 2).log_softmax(-1)
    uniforms_N = torch.rand(4000, dtype=torch.float64)
    cdf_V = logprobs_V.double().exp().cumsum(-1)
    expected = torch.searchsorted(cdf_V / cdf_V[-1], uniforms_N, right=True)
    assert torch.equal(draw(logprobs_V.expand(4000, -1), uniforms_N.tolist()), expected)


def test_draws_never_give_a_token_without_probability():
    logits = torch.full((2, 600), -torch.inf)
    logits[:, 300:302] = 0.0
    assert draw(logits.log_softmax(-1), [0.0, 1.0 - 2**-53]).tolist() == [300, 301]
