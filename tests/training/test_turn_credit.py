"""Rewards of turns: where they come from, and what advantage each token gets."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from agentrl import EpisodeDone, StepReward
from agentrl.errors import ConfigurationError, RewardError
from agentrl.generation.base import SamplingParams
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import fix_tokenizer
from agentrl.training.arguments import GRPOConfig
from agentrl.training.windows import Window
from agentrl.types import Trajectory
from tests.rollout.helpers import call, turn
from tests.training.runs import TRAINERS, distance, logged, make_config, small_model, weights


class Walk:
    """Each step is rewarded at once, the end by how often it was taken."""

    outcome: Any = staticmethod(lambda walk: float(walk.steps))

    def reset(self, **_: Any) -> None:
        self.steps = 0

    def get_reward(self) -> Any:
        return self.outcome(self)

    def go(self, far: float) -> Any:
        """Take a step.

        Args:
            far: How far.
        """
        self.steps += 1
        return StepReward(f"at {far}", far)

    def stop(self) -> str:
        """End the walk."""
        raise EpisodeDone(StepReward("over", 2.5))


def go(*steps: float) -> list[int]:
    return turn("".join(call("go", f'{{"far": {step}}}') for step in steps))


FINAL = turn("done")
SCRIPTS = [
    [go(1), go(2, 0.5), FINAL],  # rewards of its turns 1, 2.5, 0; outcome 3
    [go(3), FINAL],  # 3, 0; outcome 1
    [FINAL],  # 0; outcome 0
    [go(0), turn(call("stop"))],  # 0, 2.5; outcome 1
]
RECEIVED = [[1.0, 2.5, 3.0], [3.0, 1.0], [0.0], [0.0, 3.5]]
"""By turn, with the outcome in the last one."""


def play(*scripts: list[list[list[int]]]) -> ScriptedGenerator:
    """Plays back one script for each run of the engine: the turns of its rollouts, in row order."""
    taken: Counter[str] = Counter()

    def sample(session: str, _: list[int], __: SamplingParams) -> list[int]:
        run, row, _attempt = map(int, session.split("/"))
        taken[session] += 1
        return scripts[run - 1][row][taken[session] - 1]

    return ScriptedGenerator(sample)


def walk_trainer(
    folder: Path,
    *,
    algorithm: str = "grpo",
    environment: Any = Walk,
    scripts: Any = SCRIPTS,
    again: Any = (),
    **options: Any,
) -> Any:
    options = {"max_steps": 1, "num_generations": 2, "max_completion_length": 400, "beta": 0.0, **options}
    prompt = [{"role": "user", "content": "walk"}]
    windows: list[Window] = []
    played: list[list[Trajectory]] = []
    trainer = TRAINERS[algorithm](
        small_model(max_position_embeddings=1024),
        None,
        make_config(algorithm, folder, **options),
        Dataset.from_dict({"prompt": [prompt, prompt]}),
        processing_class=fix_tokenizer("t0"),
        environment_factory=environment,
        generator=lambda _: play(scripts, *again),
    )
    collect, run = trainer.collector.collect, trainer.collector.engine.run
    trainer.collector.collect = lambda *a, **k: windows.append(collect(*a, **k)) or windows[-1]  # type: ignore[method-assign]
    trainer.collector.engine.run = lambda *a, **k: played.append(run(*a, **k)) or played[-1]  # type: ignore[method-assign]
    trainer.windows, trainer.played = windows, played
    return trainer


def advantages_by_loop(received: list[list[float]], discount: float, scale: str) -> list[list[float]]:
    """As documented: each turn's return against that of the same turn of the group, ended ones with their last."""
    returns = [
        [sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
        for rewards in received
    ]
    result = []
    for row, mine in enumerate(returns):
        group = returns[row // 2 * 2 : row // 2 * 2 + 2]
        advantages = []
        for k, value in enumerate(mine):
            members = [other[min(k, len(other) - 1)] for other in group]
            divisor = statistics.stdev(members) + 1e-4 if scale == "group" else 1.0
            advantages.append((value - statistics.fmean(members)) / divisor)
        result.append(advantages)
    return result


@pytest.mark.parametrize(("discount", "scale"), [(1.0, "group"), (0.5, "none")])
def test_each_token_gets_the_advantage_of_its_turn(discount, scale, tmp_path):
    """A10: also at the last turn of a row and across micro-batches; suffix tokens get none."""
    trainer = walk_trainer(
        tmp_path,
        turn_discount=discount,
        scale_rewards=scale,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
    )
    trainer.train()
    [window], [trajectories] = trainer.windows, trainer.played
    expected = advantages_by_loop(RECEIVED, discount, scale)
    for batch, trajectory, advantages in zip(window.batches, trajectories, expected, strict=True):
        assert_row_invariants(trajectory)
        wanted = [a for t, a in zip(trajectory.turns, advantages, strict=True) for _ in range(t.start, t.stop)]
        assert batch.target_advantages.tolist() == pytest.approx(wanted, abs=1e-4)
        assert batch.tokens == sum(trajectory.loss_mask)


def test_the_update_is_that_of_the_tokens_advantages(tmp_path):
    """On-policy: the gradient of -sum of A_t log pi_t over the tokens, by autograd on plain full rows."""
    options = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "turn_discount": 0.9}
    trainer = walk_trainer(tmp_path, **options)
    trainer.train()
    model = small_model(max_position_embeddings=1024)
    terms = []
    for trajectory, advantages in zip(trainer.played[0], advantages_by_loop(RECEIVED, 0.9, "group"), strict=True):
        ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
        logps = model(ids).logits[0].log_softmax(-1)
        for t, advantage in zip(trajectory.turns, advantages, strict=True):
            for position in range(len(trajectory.prompt_ids) + t.start, len(trajectory.prompt_ids) + t.stop):
                terms.append(-advantage * logps[position - 1, ids[0, position]])
    torch.stack(terms).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    assert distance(weights(trainer), dict(model.state_dict())) < 1e-5


def test_metrics_have_the_whole_and_the_turns(tmp_path):
    trainer = walk_trainer(tmp_path)
    trainer.train()
    totals = [sum(rewards) for rewards in RECEIVED]
    assert logged(trainer, "reward") == [pytest.approx(statistics.fmean(totals))]
    assert logged(trainer, "reward_std") == [pytest.approx(statistics.stdev(totals))]
    assert logged(trainer, "rewards/Walk/mean") == [pytest.approx(5 / 4)]
    by_turn = [3.5, 3.0, 2.5]  # the walk without a step was not rewarded by turn
    assert logged(trainer, "rewards/turns/mean") == [pytest.approx(statistics.fmean(by_turn))]
    assert logged(trainer, "rewards/turns/std") == [pytest.approx(statistics.stdev(by_turn))]


def test_get_reward_may_list_one_reward_a_turn(tmp_path):
    class Listing(Walk):
        def get_reward(self, turns: int) -> list[float]:
            return [float(k) for k in range(turns)]

        def go(self, far: float) -> str:
            """Take a step.

            Args:
                far: How far.
            """
            return "on"

    trainer = walk_trainer(tmp_path, environment=Listing, scripts=[*SCRIPTS[:3], [go(0), FINAL]], scale_rewards="none")
    trainer.train()
    expected = advantages_by_loop([[0.0, 1.0, 2.0], [0.0, 1.0], [0.0], [0.0, 1.0]], 1.0, "none")
    [batch] = trainer.windows[0].batches
    wanted = [
        a
        for trajectory, advantages in zip(trainer.played[0], expected, strict=True)
        for t, a in zip(trajectory.turns, advantages, strict=True)
        for _ in range(t.start, t.stop)
    ]
    assert batch.target_advantages.tolist() == pytest.approx(wanted, abs=1e-5)
    assert logged(trainer, "rewards/Listing/mean") == [None]
    assert logged(trainer, "reward") == [pytest.approx((3 + 1 + 0 + 1) / 4)]


class Plain(Walk):
    """The same without rewards of turns."""

    def go(self, far: float) -> str:
        """Take a step.

        Args:
            far: How far.
        """
        self.steps += 1
        return f"at {far}"


class Zero(Walk):
    """The same with rewards of turns that are all zero."""

    def go(self, far: float) -> StepReward:
        """Take a step.

        Args:
            far: How far.
        """
        self.steps += 1
        return StepReward(f"at {far}", 0.0)


PLAIN = [*SCRIPTS[:3], [go(0), FINAL]]


def test_one_reward_a_trajectory_is_what_it_was(tmp_path):
    """Without rewards of turns nothing differs within a row, and a discount changes nothing, bit for bit."""
    runs = []
    for discount in (1.0, 0.3):
        trainer = walk_trainer(tmp_path, environment=Plain, scripts=PLAIN, turn_discount=discount)
        trainer.train()
        [batch] = trainer.windows[0].batches
        assert batch.turn_advantages_N is None
        assert torch.equal(batch.target_advantages, batch.advantages_R[batch.row_N])
        runs.append((weights(trainer), batch.advantages_R.tolist()))
    assert runs[0][1] == runs[1][1] == pytest.approx([0.70707, -0.70707, -0.7070, 0.7070], abs=1e-3)
    assert distance(runs[0][0], runs[1][0]) == 0.0
    zero = walk_trainer(tmp_path, environment=Zero, scripts=PLAIN)
    zero.train()
    assert torch.equal(zero.windows[0].batches[0].target_advantages, batch.target_advantages), "0 says nothing either"


def test_rows_that_cannot_be_scored_get_none(tmp_path):
    """H01: no reward at all leaves a row out; rewards of turns alone are rewards too."""

    class Silent(Walk):
        outcome = staticmethod(lambda walk: None)

    trainer = walk_trainer(tmp_path, environment=Silent, scale_rewards="none")
    trainer.train()
    [batch] = trainer.windows[0].batches
    assert 2 not in batch.row_N.tolist()
    first_row = batch.target_advantages[batch.row_N == 0]
    expected = advantages_by_loop([[1.0, 2.5, 0.0], [3.0, 0.0]], 1.0, "none")[0]
    assert first_row[0].item() == pytest.approx(expected[0])
    assert (batch.target_advantages[batch.row_N == 3] == 0).all(), "alone in its group"


@pytest.mark.parametrize(
    ("algorithm", "options", "reason"),
    [
        ("rloo", {}, "a whole rollout is one action"),
        ("grpo", {"importance_sampling_level": "sequence"}, "gives all tokens of a rollout one ratio"),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}, "normalises the rewards of whole rollouts"),
    ],
)
def test_where_a_row_is_one_action_rewards_of_turns_are_refused(algorithm, options, reason, tmp_path):
    trainer = walk_trainer(tmp_path, algorithm=algorithm, **options)
    with pytest.raises(RewardError, match=reason):
        trainer.train()


@pytest.mark.parametrize("reward", [math.nan, math.inf, "much", None, [1.0]])
def test_a_step_reward_that_is_no_number_ends_the_run(reward, tmp_path):
    """It is the environment's mistake, so it is not told to the model as a failed call."""

    class Wrong(Walk):
        def go(self, far: float) -> StepReward:
            """Take a step.

            Args:
                far: How far.
            """
            return StepReward("x", reward)

    trainer = walk_trainer(tmp_path, environment=Wrong)
    with pytest.raises(RewardError, match=r"tool 'go'.*finite number"):
        trainer.train()


def test_a_list_of_the_wrong_length_ends_the_run(tmp_path):
    class Short(Walk):
        outcome = staticmethod(lambda walk: [1.0])

    trainer = walk_trainer(tmp_path, environment=Short)
    with pytest.raises(RewardError, match=r"Short.get_reward gave back 1 reward.s. for [23] sampled turns.*StepReward"):
        trainer.train()


def test_dynamic_sampling_sees_the_returns_of_turns(tmp_path):
    """Equal totals earned in different turns are a signal."""

    class Counting(Walk):
        outcome = staticmethod(lambda walk: 0.0)

    scripts = [[go(1), go(0), FINAL], [go(0), go(1), FINAL], [go(1), FINAL], [go(1), FINAL]]
    options = {"scripts": scripts, "again": [[[FINAL], [FINAL]]], "dynamic_sampling_max_rounds": 1}
    trainer = walk_trainer(tmp_path, environment=Counting, **options)
    trainer.train()
    assert logged(trainer, "dynamic_sampling/groups_redrawn") == [1]
    assert logged(trainer, "frac_reward_zero_std") == [0.5]


@pytest.mark.parametrize("discount", [-0.1, 1.1])
def test_a_wrong_discount_is_refused(discount, tmp_path):
    with pytest.raises(ConfigurationError, match=r"^turn_discount="):
        GRPOConfig(str(tmp_path), turn_discount=discount)
