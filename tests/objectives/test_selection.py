"""Which tokens a policy loss keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.objectives.selection import entropy_threshold, on_policy_tokens


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_i10_the_threshold_is_over_trained_tokens_only():
    """Padding and tool tokens are not in the vector, so they count nowhere; with them the threshold would be 0.2."""
    entropy = vector(0.1, 0.9, 0.5, 0.7, 0.3)
    threshold = entropy_threshold(entropy, 0.5)
    assert threshold == 0.5
    assert entropy[entropy >= threshold].tolist() == [0.9, 0.5, 0.7]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.29, 0.3, 0.5, 0.7, 0.8, 1.0])
def test_the_tokens_kept_are_those_from_the_quantile_on(share, count):
    entropy = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    kept = entropy >= entropy_threshold(entropy, share)
    quantile = np.quantile(entropy.numpy(), 1 - share)
    assert kept.tolist() == (entropy.numpy() >= quantile - 1e-12).tolist()


def test_the_ends_of_the_range():
    entropy = vector(0.3, 2.0, 0.1)
    assert (entropy >= entropy_threshold(entropy, 0.0)).tolist() == [False, True, False]
    assert (entropy >= entropy_threshold(entropy, 1.0)).all()
    assert entropy_threshold(vector(), 0.5).item() == float("inf")


class TestOffPolicyMasking:
    row = torch.tensor([0, 0, 1, 1, 3])
    sampler = vector(-1.0, -1.0, -1.0, -1.0, -1.0)

    def kept(self, logps: torch.Tensor, advantages_R: torch.Tensor, threshold: float = 0.5) -> list[bool]:
        return on_policy_tokens(logps, self.sampler, advantages_R[self.row], self.row, 4, threshold).tolist()

    def test_only_bad_and_far_rows_are_left_out(self):
        logps = vector(-1.0, -2.2, -1.0, -1.8, -5.0)  # drift 0.6, 0.4, 4
        assert self.kept(logps, vector(-1, -1, 0, 1)) == [False, False, True, True, True]
        assert self.kept(logps, vector(1, -1, 0, 0)) == [True, True, True, True, True]
        assert self.kept(logps, vector(-1, -1, 0, -1)) == [False, False, True, True, False]

    def test_the_threshold_itself_is_kept(self):
        logps = vector(-1.0, -2.0, -1.0, -1.0, -1.0)
        assert self.kept(logps, vector(-1, -1, 0, -1)) == [True] * 5

    def test_a_row_that_became_likelier_is_kept(self):
        assert self.kept(vector(0, 0, 0, 0, 0), vector(-1, -1, 0, -1)) == [True] * 5
