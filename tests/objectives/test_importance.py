"""Weights between sampler and trainer."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.generation.sampling import process_logits
from agentrl.objectives.importance import (
    CORRECTION_MODES,
    log_weights_of_rows,
    sampling_weights,
    weights_of_tokens,
)

ROW = torch.tensor([0, 0, 1, 3, 3, 3])
RATIOS = torch.tensor([2.0, 0.5, 4.0, 0.25, 1.0, 2.0], dtype=torch.float64)
"""Per row 1, 4, (no token), 0.5."""


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", (None, 3.0), [2, 0.5, 3, 0.25, 1, 2]),
        ("token_truncate", (0.5, 3.0), [2, 0.5, 3, 0.5, 1, 2]),
        ("token_mask", (None, 3.0), [2, 0.5, 0, 0.25, 1, 2]),
        ("token_mask", (0.5, None), [2, 0.5, 4, 0, 1, 2]),
        ("sequence_truncate", (None, 3.0), [1, 3, 1, 0.5]),
        ("sequence_truncate", (0.8, None), [1, 4, 1, 0.8]),
        ("sequence_mask", (None, 3.0), [1, 0, 1, 0.5]),
        ("sequence_mask", (0.8, 5.0), [1, 4, 1, 0]),
        ("sequence_mask", (None, None), [1, 4, 1, 0.5]),
    ],
)
def test_ratios_are_bounded_or_masked(mode, bounds, expected):
    weights = sampling_weights(RATIOS.log(), ROW, 4, mode, *bounds)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_a_token_and_its_row_get_their_weights(mode):
    weights = sampling_weights(RATIOS.log(), ROW, 4, mode, None, 3.0)
    of_tokens = weights_of_tokens(weights, ROW, mode).tolist()
    of_rows = log_weights_of_rows(weights, ROW, 4, mode).exp().tolist()
    if mode.startswith("sequence"):
        masked = 0.0 if mode.endswith("mask") else 3.0
        assert of_tokens == pytest.approx([1, 1, masked, 0.5, 0.5, 0.5])
        assert of_rows == pytest.approx([1, masked, 1, 0.5])
    else:
        products = [of_tokens[0] * of_tokens[1], of_tokens[2], 1, math.prod(of_tokens[3:])]
        assert of_rows == pytest.approx(products)


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_what_the_sampler_does_not_know_counts_as_equal(mode):
    """An unknown logprob says nothing about a difference: its factor is 1, and no NaN leaves its token."""
    log_ratio = RATIOS.log().clone()
    log_ratio[1] = math.nan
    weights = sampling_weights(log_ratio, ROW, 4, mode, None, 3.0)
    assert weights_of_tokens(weights, ROW, mode)[:2].tolist() == pytest.approx(
        [2, 2] if mode.startswith("sequence") else [2, 1]
    )


def test_an_overflow_is_out_of_any_bounds():
    far = torch.tensor([800.0, 800.0])
    row = torch.tensor([0, 1])
    assert sampling_weights(far, row, 2, "sequence_mask").tolist() == [0, 0]
    assert sampling_weights(far, row, 2, "token_truncate", None, 3.0).tolist() == [3, 3]


def test_weights_have_no_gradient():
    logps = torch.tensor([-1.0], requires_grad=True)
    assert not sampling_weights(logps + 1.2, torch.tensor([0]), 1, "token_truncate", None, 3.0).requires_grad


def test_nothing_trained():
    empty = torch.zeros(0)
    assert sampling_weights(empty, empty.long(), 2, "token_mask").tolist() == []
    assert sampling_weights(empty, empty.long(), 2, "sequence_mask").tolist() == [1, 1]


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match=r"mode 'row_mask'.*token_truncate"):
        sampling_weights(RATIOS.log(), ROW, 4, "row_mask")


def test_j02_truncated_sampling_has_ratio_1_on_both_sides():
    """Sampler and trainer normalise over the same kept tokens; against the whole vocabulary it would be 0.8."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    sampler = process_logits(logits, top_p=0.79)
    assert sampler[0].exp().tolist() == pytest.approx([0.625, 0.375, 0.0])
    trainer = process_logits(logits, top_p=0.79, keep_N=torch.tensor([0]))
    row = torch.tensor([0])
    assert sampling_weights(trainer[:, 0] - sampler[:, 0], row, 1, "token_mask").item() == pytest.approx(1.0)
    whole = logits.log_softmax(-1)
    assert sampling_weights(whole[:, 0] - sampler[:, 0], row, 1, "token_mask").item() == pytest.approx(0.8)


def test_j03_temperature_has_ratio_1_on_both_sides():
    logits = torch.tensor([[2.0, 0.0]])
    sampler = process_logits(logits, temperature=0.5)
    trainer = process_logits(logits, temperature=0.5, keep_N=torch.tensor([0]))
    assert sampler[0, 0].item() == pytest.approx(-0.018150, abs=1e-6)
    row = torch.tensor([0])
    assert sampling_weights(trainer[:, 0] - sampler[:, 0], row, 1, "token_mask").item() == pytest.approx(1.0)
    mixed = sampler[:, 0] - logits.log_softmax(-1)[:, 0]
    assert sampling_weights(mixed, row, 1, "token_mask").item() == pytest.approx(1.1149, abs=1e-4)
