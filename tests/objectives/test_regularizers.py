"""KL estimates and entropy."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.objectives.aggregation import Denominators
from agentrl.objectives.losses import clipped_surrogate, log_ratios
from agentrl.objectives.regularizers import adapted_coefficient, entropy, entropy_bonus, kl_k3


def test_i07_kl_has_a_gradient():
    logps = torch.tensor([-1.0], requires_grad=True)
    row = torch.tensor([0])
    policy = clipped_surrogate(log_ratios(logps, None, row, 1), torch.tensor([0.0]), 0.2, 0.2)
    (policy.loss + 0.1 * kl_k3(logps, torch.tensor([-2.0]))).sum().backward()
    torch.testing.assert_close(logps.grad, torch.tensor([0.06321]), atol=1e-5, rtol=0)


def test_kl_is_exact_in_expectation():
    policy, reference = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_k3(policy, reference)).sum(), expected)
    assert (kl_k3(policy, reference) >= 0).all()


def test_bias_correction_makes_the_gradient_that_of_the_kl():
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    reference = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    # What on-policy sampling estimates: the mean over the policy, whose probabilities are constants to it.
    weights, ratio = policy.detach().exp(), (policy - policy.detach()).exp()
    (corrected,) = torch.autograd.grad((weights * kl_k3(policy, reference, ratio)).sum(), logits, retain_graph=True)
    (plain,) = torch.autograd.grad((weights * kl_k3(policy, reference)).sum(), logits)
    torch.testing.assert_close(corrected, exact)
    assert not torch.allclose(plain, exact)


def test_kl_and_entropy_against_finite_differences():
    logps = torch.tensor([-1.0, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -0.1], dtype=torch.float64)
    ratio = torch.tensor([1.3, 0.8], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p, r: kl_k3(p, reference, r), (logps, ratio))
    logits = torch.tensor([[1.0, -0.5, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entropy, logits)


def test_entropy_values():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(entropy(logits), torch.tensor([math.log(2), math.log(4)]))


def test_entropy_gradient_is_finite_outside_the_support():
    logits = torch.tensor([[1.0, 0.0, 3.0]], requires_grad=True)
    entropy(logits.masked_fill(torch.tensor([False, False, True]), -math.inf)).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] == 0


class TestEntropyBonus:
    entropies = torch.tensor([0.5, 1.5, 4.0, 2.0, 0.0], dtype=torch.float64)

    def test_the_parts_of_a_step_add_up_to_the_mean_of_its_tokens(self):
        """However the tokens are split over micro-batches and processes; two processes are averaged afterwards."""
        whole = entropy_bonus(self.entropies, Denominators(rows=3, tokens=5))
        assert whole.item() == pytest.approx(8.0 / 5)
        for cut in range(6):
            counts = Denominators(rows=3, tokens=5, micro_batches=2, world_size=2)
            parts = [entropy_bonus(part, counts) for part in (self.entropies[:cut], self.entropies[cut:])]
            assert (sum(parts) / 2).item() == pytest.approx(8.0 / 5)

    def test_a_selection_is_a_mean_over_the_selected(self):
        selected = torch.tensor([True, False, True, False, False])
        bonus = entropy_bonus(self.entropies, Denominators(rows=3, tokens=5), selected)
        assert bonus.item() == pytest.approx((0.5 + 4.0) / 2)

    def test_without_tokens_it_is_zero_and_has_a_graph(self):
        """I04."""
        nothing = torch.zeros(0, requires_grad=True)
        bonus = entropy_bonus(nothing, Denominators(rows=0, tokens=0))
        assert bonus.item() == 0
        bonus.backward()

    def test_its_gradient_against_finite_differences(self):
        logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        counts = Denominators(rows=2, tokens=9)
        selected = torch.tensor([True, True, False, True])
        assert torch.autograd.gradcheck(lambda x: entropy_bonus(entropy(x), counts), logits)
        assert torch.autograd.gradcheck(lambda x: entropy_bonus(entropy(x), counts, selected), logits)


@pytest.mark.parametrize(
    ("coefficient", "entropy", "expected"),
    [(0.1, 0.9, 0.15), (0.1, 1.0, 0.15), (0.1, 1.1, 0.05), (0.28, 0.0, 0.3), (0.03, 2.0, 0.01), (0.01, 2.0, 0.01)],
)
def test_the_coefficient_moves_one_step_within_its_bounds(coefficient, entropy, expected):
    moved = adapted_coefficient(coefficient, entropy, target=1.0, delta=0.05, lowest=0.01, highest=0.3)
    assert moved == pytest.approx(expected)
