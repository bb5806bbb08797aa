"""Where we differ from TRL on purpose: the right value from another computation, and why it is the right one.

docs/objectives.md says of R and N that they count what is trained on in the whole optimizer step. TRL counts rows that
teach nothing too, and takes means over micro-batches where a formula has a mean over rows or tokens.
"""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

import pytest

pytest.importorskip("trl", reason="the peer; in the extra bench")

from tests.parity.cases import CUT, TOP
from tests.parity.harness import BASE, Case, Rollouts, Trained, by_ids, difference, run, sometimes
from tests.training.runs import distance

SAME = 1e-5
ONCE: dict[str, Any] = {"num_iterations": 1}


def nothing_for_two(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """The first function alone: two members of each group have no reward at all."""
    return sometimes(completion_ids)


MASKED: dict[str, Any] = {"mask_truncated_completions": True}
FEWER_ROWS = [
    (Case("truncated", MASKED | {"loss_type": "grpo"}, rollouts=Rollouts(truncated=True)), 8 / 6),
    (Case("unscored", {"loss_type": "grpo"}, rewards=(nothing_for_two,)), 8 / 4),
    (Case("rloo", MASKED | {"learning_rate": 0.1}, "rloo", Rollouts(truncated=True)), 8 / 6),
]


@pytest.mark.parametrize(("case", "factor"), FEWER_ROWS, ids=[case.name for case, _ in FEWER_ROWS])
def test_rows_that_teach_nothing_are_not_counted(case: Case, factor: float):
    """The mean is over the rows that were trained on, or masking rows would shrink the step.

    TRL divides by all rows. With plain SGD its own update becomes the right one when its learning rate is multiplied
    by rows / trained rows; the gradient's norm is larger here by that factor.
    """
    rate = (BASE | case.options)["learning_rate"]
    ours, theirs = run("agentrl", case), run("trl", case, learning_rate=rate * factor)
    assert distance(ours.weights, theirs.weights) < SAME
    for mine, its in zip(ours.logs, theirs.logs, strict=True):
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"] * factor, rel=SAME)
        assert mine.get("reward", 0.0) == pytest.approx(its.get("reward", 0.0), rel=SAME)


SPLIT_INVARIANT = [
    Case("dapo", {"loss_type": "dapo", "beta": 0.2}),
    Case("grpo", {"loss_type": "grpo", "beta": 0.2}),
    Case("dr_grpo", {"loss_type": "dr_grpo"}),
    Case("cispo", {"loss_type": "cispo", "epsilon_high": 1.1}),
    Case("sapo", {"loss_type": "sapo"}),
    Case("luspo", {"loss_type": "luspo", "learning_rate": 0.05}),
    Case("vespo", {"loss_type": "vespo", "learning_rate": 0.02}),
    Case("entropy_coef", {"entropy_coef": 0.5}),
    Case("rloo", {"learning_rate": 0.1}, "rloo", apart=frozenset({"kl"})),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name == "entropy_coef" else [pytest.mark.slow])
        for case in SPLIT_INVARIANT
    ],
)
def test_cutting_a_step_into_ragged_micro_batches_changes_nothing(case: Case):
    """Two micro-batches of four ragged rows give what TRL gives for one of eight: weights, loss and all metrics.

    TRL's entropy bonus and metrics are means over micro-batches, which weigh a token by how short its micro-batch is.
    """
    found = difference(case, run("agentrl", case, **CUT), run("trl", case))
    assert found.weights < SAME
    assert {name: apart for name, apart in found.logs.items() if apart > SAME} == {}


def test_tokens_are_those_of_the_optimizer_step():
    """dapo with two optimizer steps a generation batch: each divides by its own tokens, not by half of the batch's.

    At the first step every ratio is 1, so the loss is the sum of -A |o| over its four rows, over their tokens.
    """
    case = Case("own tokens", {"per_device_train_batch_size": 4, "steps_per_generation": 2, **ONCE})
    played = case.rollouts.play(["a"] * 4 + ["bcd"] * 4, 0, 4, case.family)["completion_ids"]
    loss = run("agentrl", case).logs[0]["loss"]
    assert loss == pytest.approx(_loss_at_ratio_1(played[:4], tokens=sum(map(len, played[:4]))), abs=SAME)
    assert loss != pytest.approx(_loss_at_ratio_1(played[:4], tokens=sum(map(len, played)) / 2), abs=SAME)


def _loss_at_ratio_1(group: list[list[int]], *, tokens: float) -> float:
    rewards = [reward for reward in by_ids(group) if reward is not None]
    advantages = [(reward - fmean(rewards)) / (stdev(rewards) + 1e-4) for reward in rewards]
    return -sum(a * len(ids) for a, ids in zip(advantages, group, strict=True)) / tokens


def test_selection_and_bonus_are_over_what_a_micro_batch_holds():
    """top_entropy_quantile depends on the micro-batch, here as in TRL: equal rows in equal places agree when cut."""
    case = Case("top", TOP | CUT | {"loss_type": "bnpo"}, rollouts=Rollouts(ragged=False))
    assert difference(case, run("agentrl", case), run("trl", case)).weights < SAME


def test_kl_of_rloo_is_that_of_rollouts():
    """The documented divergence of RLOO is a sum over the completion, and `kl` is its mean over completions.

    TRL logs the mean over tokens: ours over the mean length.
    """
    case = Case("kl", {"beta": 0.5, "learning_rate": 0.1, **ONCE}, "rloo")
    ours, theirs = run("agentrl", case), run("trl", case)
    pairs = _column(ours, "kl"), _column(theirs, "kl"), _column(theirs, "completions/mean_length")
    for mine, its, length in zip(*pairs, strict=True):
        assert mine == pytest.approx(its * length, rel=SAME, abs=SAME)
    assert max(map(abs, _column(ours, "kl"))) > 0.01


def test_flat_groups_of_rloo_are_told_by_their_clipped_rewards():
    """`frac_reward_zero_std` is about rewards: a KL penalty that tells equally rewarded rows apart does not count."""
    case = Case("flat", {"beta": 0.5, "reward_clip_range": (2.0, 3.0), "learning_rate": 0.1, **ONCE}, "rloo")
    assert _column(run("agentrl", case), "frac_reward_zero_std") == [1.0] * 3


def _column(trained: Trained, name: str) -> list[float]:
    return [log[name] for log in trained.logs]
