"""From rewards to advantages: how much better a row did than its group.

Everything is a vector over the R rows of one generation batch, over all processes. Rows may come in any order
and groups may have any sizes: `group_R` holds an integer per row, equal for the members of a group. NaN is
the reward of a row that nobody could score. Such a row is left out of every baseline and deviation and gets
advantage 0: that nobody scored it says nothing about what the model did. Deviations are unbiased (ddof 1),
and 0 where fewer than two values exist. Sums run in float64, so that equal rewards give exactly equal means
and groups without a spread give exact zeros; results are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.objectives.segments import row_sums

SCALES = ("group", "batch", "none")
"""What GRPO divides the centred rewards by: the deviation of the group, of the batch, or nothing."""

EPSILON = 1e-4
"""Added to a deviation before dividing by it."""

ZERO_STD = 1e-6
"""A group whose rewards deviate by no more than this has, as good as, equal rewards."""


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """The rewards of a generation batch in numbers.

    Attributes:
        mean: Mean over the scored rows, 0 when none is scored.
        std: Deviation over the scored rows of the whole batch.
        frac_zero_std: Share of all rows whose group has rewards without a spread. Groups with fewer than two
            scored rows count: like groups with equal rewards, they teach nothing.
    """

    mean: float
    std: float
    frac_zero_std: float


def combine_rewards(rewards_RF: Tensor, weights_F: Tensor) -> Tensor:
    """Weighted sum over the reward functions that scored the row.

    Args:
        rewards_RF: Reward of row r by function f, NaN where the function gave none, (R, F).
        weights_F: Weight of each function, (F,).

    Returns:
        (R,) float32; NaN where no function gave a reward.
    """
    scored_RF = ~rewards_RF.isnan()
    weighted_RF = torch.where(scored_RF, rewards_RF.double() * weights_F.double(), 0.0)
    return torch.where(scored_RF.any(dim=1), weighted_RF.sum(dim=1), torch.nan).float()


def grpo_advantages(total_R: Tensor, group_R: Tensor, scale: str = "group", eps: float = EPSILON) -> Tensor:
    """Advantages of Group Relative Policy Optimization.

        A_i = (r_i - mean(r of the group)) / (std + eps)

    where std is the deviation of the group (Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300,
    section 4.1), of the batch (Liu et al. 2025, Part I: Tricks or Traps?, https://arxiv.org/abs/2508.08221),
    or the division is left out (Liu et al. 2025, Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Args:
        total_R: Reward of each row, NaN for none, (R,).
        group_R: Group of each row, integers, (R,).
        scale: One of `SCALES`.
        eps: Added to the deviation.

    Returns:
        (R,) float32, 0 for rows without a reward.

    Raises:
        ValueError: `scale` is not one of `SCALES`.
    """
    if scale not in SCALES:
        raise ValueError(f"unknown scaling of rewards {scale!r}; scale_rewards is one of {', '.join(SCALES)}")
    centred_R, count_R = _centre(total_R, group_R)
    if scale == "group":
        centred_R = centred_R / (_group_std(centred_R, count_R, group_R) + eps)
    elif scale == "batch":
        centred_R = centred_R / (_std(_scored(total_R)) + eps)
    return centred_R.float()


def rloo_advantages(total_R: Tensor, group_R: Tensor, normalize: bool = False) -> Tensor:
    """Advantages of REINFORCE Leave-One-Out.

        A_i = r_i - mean(r_j of the group, j != i)

    (Ahmadian et al. 2024, Back to Basics, https://arxiv.org/abs/2402.14740). A row that is the only
    scored one of its group has nothing to be compared with: its advantage is 0.

    Args:
        total_R: Reward of each row, NaN for none, (R,).
        group_R: Group of each row, integers, (R,).
        normalize: Shift and scale the advantages of the scored rows to mean 0 and deviation 1 over the batch.

    Returns:
        (R,) float32, 0 for rows without a reward.
    """
    # r_i - (sum - r_i) / (n - 1) = (r_i - sum / n) n / (n - 1)
    centred_R, count_R = _centre(total_R, group_R)
    advantages_R = centred_R * count_R / (count_R - 1).clamp(min=1)
    if normalize:
        advantages_R = _whitened(advantages_R, ~total_R.isnan(), EPSILON)
    return advantages_R.float()


def gdpo_advantages(rewards_RF: Tensor, weights_F: Tensor, group_R: Tensor, eps: float = EPSILON) -> Tensor:
    """Advantages of Group reward-Decoupled normalization Policy Optimization: normalise, then sum, then normalise.

        s_i = sum_f w_f (r_if - mean(r_f of the group)) / (std(r_f of the group) + eps)
        A_i = (s_i - mean(s of the batch)) / (std(s of the batch) + eps)

    (Liu et al. 2026, GDPO, https://arxiv.org/abs/2601.05242): each reward keeps its own say, whatever its scale,
    and combinations of rewards with the same sum stay different.

    Args:
        rewards_RF: Reward of row r by function f, NaN where the function gave none, (R, F). Such an entry adds
            nothing to the row's sum and is left out of its function's mean and deviation.
        weights_F: Weight of each function, (F,).
        group_R: Group of each row, integers, (R,).
        eps: Added to the deviations.

    Returns:
        (R,) float32, 0 for rows that no function scored; they are left out of the batch's mean and deviation.
    """
    scaled = []
    for reward_R in rewards_RF.unbind(dim=1):
        centred_R, count_R = _centre(reward_R, group_R)
        scaled.append(centred_R / (_group_std(centred_R, count_R, group_R) + eps))
    sum_R = (torch.stack(scaled, dim=1) * weights_F.double()).sum(dim=1)
    scored_R = ~rewards_RF.isnan().all(dim=1)
    return _whitened(sum_R, scored_R, eps).float()


def flat_rows(values_RC: Tensor, group_R: Tensor) -> Tensor:
    """Whether the group of each row has no spread in any column: then it teaches nothing.

    Args:
        values_RC: What the members of a group are compared by, NaN for none, (R, C): their rewards, say. A
            column with fewer than two values in a group has no spread there.
        group_R: Group of each row, integers, (R,).

    Returns:
        bool (R,), the same for all members of a group.
    """
    flat_R = torch.ones(len(group_R), dtype=torch.bool)
    for value_R in values_RC.unbind(dim=1):
        flat_R &= _group_std(*_centre(value_R, group_R), group_R) <= ZERO_STD
    return flat_R


def reward_statistics(total_R: Tensor, group_R: Tensor, values_RC: Tensor | None = None) -> RewardStatistics:
    """Describe the rewards of a generation batch.

    Args:
        total_R: Reward of each row, NaN for none, (R,).
        group_R: Group of each row, integers, (R,).
        values_RC: What the members of a group are compared by, as in `flat_rows`; None: by the total.
    """
    flat_R = flat_rows(total_R[:, None] if values_RC is None else values_RC, group_R)
    scored = _scored(total_R)
    return RewardStatistics(
        mean=scored.mean().item() if scored.numel() else 0.0,
        std=_std(scored).item(),
        frac_zero_std=flat_R.double().mean().item() if flat_R.numel() else 0.0,
    )


def _scored(total_R: Tensor) -> Tensor:
    """The rewards of the scored rows in float64."""
    return total_R[~total_R.isnan()].double()


def _centre(total_R: Tensor, group_R: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards less the mean of their group (0 if unscored), and scored rows of the group; float64 (R,)."""
    scored_R = ~total_R.isnan()
    reward_R = torch.where(scored_R, total_R.double(), 0.0)
    count_R = _over_group(scored_R.double(), group_R)
    mean_R = _over_group(reward_R, group_R) / count_R.clamp(min=1)
    return torch.where(scored_R, reward_R - mean_R, 0.0), count_R


def _over_group(values_R: Tensor, group_R: Tensor) -> Tensor:
    """Sum over the group of each row, (R,)."""
    groups, index_R = group_R.unique(return_inverse=True)
    return row_sums(values_R, index_R, len(groups))[index_R]


def _group_std(centred_R: Tensor, count_R: Tensor, group_R: Tensor) -> Tensor:
    """Deviation within the group of each row, (R,); unscored rows have centred value 0 and do not count."""
    return (_over_group(centred_R.square(), group_R) / (count_R - 1).clamp(min=1)).sqrt()


def _whitened(values_R: Tensor, scored_R: Tensor, eps: float) -> Tensor:
    """The values of the scored rows with mean 0 and deviation 1 over the batch; 0 elsewhere, (R,)."""
    scored = values_R[scored_R]
    whitened_R = torch.zeros_like(values_R)
    whitened_R[scored_R] = (scored - scored.mean()) / (_std(scored) + eps)
    return whitened_R


def _std(values: Tensor) -> Tensor:
    """Unbiased deviation, 0 for fewer than two values."""
    return values.std() if values.numel() > 1 else values.new_zeros(())
