"""KL estimates and entropy."""

from __future__ import annotations

import math

import torch

from agentrl.objectives.losses import clipped_surrogate, log_ratios
from agentrl.objectives.regularizers import entropy, kl_k3


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
