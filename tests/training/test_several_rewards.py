"""`multi_objective_aggregation` in the trainer."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigurationError
from agentrl.training.arguments import GRPOConfig
from tests.objectives.test_advantages import loop_gdpo
from tests.training.runs import logged, make_trainer

FIRST = [1.0, 0.0, 0.0, 1.0]
SECOND = [0.0, 1.0, None, 1.0]


def first(completions: list[str], **_: Any) -> list[float]:
    return FIRST


def second(completions: list[str], **_: Any) -> list[float | None]:
    return SECOND


def gdpo(folder: Any, **options: Any) -> Any:
    return make_trainer(
        "grpo", folder, reward=[first, second], multi_objective_aggregation="normalize_then_sum", max_steps=1, **options
    )


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_gdpo_normalises_each_reward_and_then_the_sum(weights, tmp_path):
    trainer = gdpo(tmp_path, reward_weights=weights)
    windows = []
    collect = trainer.collector.collect
    trainer.collector.collect = lambda *a, **k: windows.append(collect(*a, **k)) or windows[-1]
    trainer.train()
    rewards = [[a, float("nan") if b is None else b] for a, b in zip(FIRST, SECOND, strict=True)]
    expected = loop_gdpo(rewards, weights or [1.0, 1.0], [0, 0, 1, 1])
    assert windows[0].batches[0].advantages_R.tolist() == pytest.approx(expected, abs=1e-4)
    one, other = weights or (1.0, 1.0)
    assert logged(trainer, "reward") == [pytest.approx((one + other + 0 + one + other) / 4)], "H03: not normalised"


def test_a_group_with_equal_sums_but_other_rewards_teaches_something(tmp_path):
    """Group 0 has totals 1 and 1; to the sum it is flat."""
    summed = make_trainer("grpo", tmp_path, reward=[first, second], max_steps=1)
    decoupled = gdpo(tmp_path)
    for trainer, flat in ((summed, 0.5), (decoupled, 0.0)):
        trainer.train()
        assert logged(trainer, "frac_reward_zero_std") == [flat]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("multi_objective_aggregation", {"multi_objective_aggregation": "max"}),
        ("scale_rewards", {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}),
    ],
)
def test_wrong_values_are_refused_by_name(name, options, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        GRPOConfig(str(tmp_path), **options)
