"""What a trainer makes of rollouts that failed: nothing to learn from, in plain numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.errors import RolloutError
from agentrl.objectives.advantages import grpo_advantages, rloo_advantages
from tests.training.helpers import TRAINERS, Game, logged, make

CONFIG = {"environment_retries": 1, "environment_retry_delay": 0.0, "max_failure_rate": 1.0, "max_steps": 1}


def parameters(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("advantages", [grpo_advantages, rloo_advantages])
def test_h01_a_group_with_fewer_than_two_real_rewards_has_no_advantages(advantages: Any) -> None:
    nan = float("nan")
    total_R = torch.tensor([1.0, nan, nan, nan, 3.0, 1.0])
    group_R = torch.tensor([0, 0, 1, 1, 2, 2])
    advantages_R = advantages(total_R, group_R)
    assert advantages_R[:4].tolist() == [0.0] * 4
    assert (advantages_R[4:] != 0).all()


@pytest.mark.parametrize("cls", TRAINERS)
def test_h13_groups_that_lost_a_member_move_no_weight(cls: type, tmp_path: Any) -> None:
    """Half of each pair is lost, so nobody is left to compare with; the losses are counted, the weights stay."""

    class Odd(Game):
        instances: list[Game] = []  # noqa: RUF012

        def reset(self, **kwargs: Any) -> str:
            super().reset()
            if self.instances.index(self) == 0:
                return "go"
            raise ConnectionError("gone")

        def get_reward(self) -> float:
            return 5.0

    trainer = make(cls, tmp_path, environment_factory=Odd, config=CONFIG | {"beta": 0.0})
    before = parameters(trainer)
    trainer.train()
    assert logged(trainer, "outcomes/env_failure") == [0.75]
    assert logged(trainer, "outcomes/retries") == [0.75]
    assert logged(trainer, "frac_reward_zero_std") == [1.0]
    assert logged(trainer, "reward") == [5.0], "the mean is over real rewards"
    assert logged(trainer, "grad_norm") == [0.0]
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_a_trainer_stops_when_too_many_rollouts_fail(tmp_path: Any) -> None:
    class Dead(Game):
        instances: list[Game] = []  # noqa: RUF012

        def reset(self, **kwargs: Any) -> str:
            raise ConnectionError("no route to host")

    config = CONFIG | {"max_failure_rate": 0.5}
    trainer = make(TRAINERS[0], tmp_path, environment_factory=Dead, config=config)
    with pytest.raises(RolloutError, match=r"after 2 attempts each.*max_failure_rate=0.5.*no route to host"):
        trainer.train()
    assert all(instance.closed == 1 for instance in Dead.instances)


def test_g08_ctrl_c_in_training_closes_every_environment(tmp_path: Any) -> None:
    class Interrupted(Game):
        instances: list[Game] = []  # noqa: RUF012

        def reset(self, **kwargs: Any) -> str:
            raise KeyboardInterrupt

    trainer = make(TRAINERS[0], tmp_path, environment_factory=Interrupted, config=CONFIG)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [instance.closed for instance in Interrupted.instances] == [1] * len(Interrupted.instances)
