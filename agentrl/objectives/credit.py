"""Credit by turn: which rewards a turn of a trajectory is answerable for, and what it is compared with.

An environment may give a reward with each turn. A turn is then credited with what came from it on, its return:

    G_k = r_k + discount * G_{k+1}

where the last turn's r holds the rewards of the whole trajectory too. Turn k of a trajectory is compared with turn k of
the other members of its group; a member that ended before turn k stands in with its last turn. Any function of the
others is a baseline that leaves the gradient's mean alone, and with this one a group without rewards by turn has, at
discount 1, in every turn the advantage that it has as whole trajectories.

Advantages by turn are those of Zeng et al. 2025, Reinforcing Multi-Turn Reasoning in LLM Agents,
https://arxiv.org/abs/2505.11821, and returns to go within a group those of process supervision in Shao et al. 2024,
DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.3 (there undiscounted); the stand-in is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def returns_to_go(turn_rewards: Sequence[Sequence[float]], outcome_R: Tensor, discount: float) -> Tensor:
    """Return of each turn.

    Args:
        turn_rewards: One number a turn for each of R trajectories, not counting `outcome_R`; trajectories may
            have any number of turns, none included.
        outcome_R: Reward of each trajectory as a whole, NaN for none, (R,).
        discount: Factor for each turn between a reward and the turn credited with it, in [0, 1].

    Returns:
        (R, K) float64, where K is the largest number of turns (at least 1). Columns after a trajectory's last turn
        repeat that turn's. NaN all along a trajectory without an outcome.
    """
    width = max([1, *map(len, turn_rewards)])
    rows = []
    for rewards, outcome in zip(turn_rewards, outcome_R.double().tolist(), strict=True):
        returns: list[float] = []
        coming = outcome
        for index, reward in enumerate(reversed(rewards)):
            coming = reward + (coming if index == 0 else discount * coming)
            returns.insert(0, coming)
        last = returns[-1] if returns else outcome
        rows.append(returns + [last] * (width - len(returns)))
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), width)
