"""What a trainer's weights become is what the formula says: two steps of SGD, the second one off-policy.

The episodes are fixed; the model's own logprobs go through the loops of `tests/objectives/reference.py` (or for RLOO
through the ones here), whose finite differences are carried on to the weights by autograd.
"""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.generation.base import SamplingParams
from agentrl.objectives.aggregation import AGGREGATIONS
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import EOS
from agentrl.training import playing
from agentrl.types import FinishReason, Sample
from tests.objectives import reference
from tests.objectives.reference import Row, Settings
from tests.training.runs import distance, first_fast, local, logged, make_trainer, rows, small_model, step_logs, weights
from tests.training.worlds import run_world

RATE = 0.5
PROMPT = [132, 140, 151]
DRAW = random.Random(5)
COMPLETIONS = [[DRAW.randrange(132, 226) for _ in range(length)] + [EOS] for length in (2, 4, 1, 3, 5, 2, 3, 4)]
REWARDS = [1.0, 0.0, 0.5, None, 2.0, -1.0, 0.0, 0.5]
"""Of two groups of four; one row is not scored."""
NOISE = [[DRAW.gauss(0, 0.2) for _ in ids] for ids in COMPLETIONS]
"""By how much the sampler's logprobs are off."""


@dataclass
class Scored:
    """The logprobs of a completion with their graph, and the entropies."""

    logps: torch.Tensor
    entropy: list[float]


def score(model: torch.nn.Module, ids: list[int]) -> Scored:
    logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    logps = logits.log_softmax(-1)
    entropy = [-sum(p * math.log(p) for p in position) for position in logps.exp().tolist()]
    return Scored(logps.gather(1, torch.tensor(ids)[:, None])[:, 0], entropy)


def learn(gradients: Callable[[list[Scored], slice], list[list[float]]]) -> dict[str, torch.Tensor]:
    """Make the two steps by hand; the gradient of each logprob comes from the caller."""
    model = small_model()
    for span in (slice(0, 4), slice(4, 8)):
        scored = [score(model, ids) for ids in COMPLETIONS[span]]
        model.zero_grad()
        terms = zip(scored, gradients(scored, span), strict=True)
        sum((row.logps * torch.tensor(g)).sum() for row, g in terms).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(algorithm: str, folder: Path, **options: Any) -> Any:
    """Let the trainer make them."""
    start = small_model()
    with torch.no_grad():
        sampled = [score(start, ids).logps.tolist() for ids in COMPLETIONS]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        noisy = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sampled, NOISE, strict=True)]
        return {"prompt_ids": [PROMPT] * len(prompts), "completion_ids": COMPLETIONS, "logprobs": noisy}

    trainer = make_trainer(
        algorithm,
        folder,
        reward=lambda completions, **_: REWARDS,
        dataset=rows(2),
        keywords={"rollout_func": rollout},
        num_generations=4,
        steps_per_generation=2,
        optim="sgd",
        learning_rate=RATE,
        max_grad_norm=0.0,
        **options,
    )
    trainer.train()
    return trainer


def old_logps() -> list[list[float]]:
    with torch.no_grad():
        return [score(small_model(), ids).logps.tolist() for ids in COMPLETIONS]


OBJECTIVES = {
    "dapo": Settings(loss_type="dapo", mode="sequence_mask"),
    "cispo": Settings(loss_type="cispo", epsilon_high=1.1, mode="token_truncate", c_max=1.2),
    "vespo": Settings(loss_type="vespo", mode="sequence_truncate", c_min=0.8, c_max=1.5),
    "luspo": Settings(
        loss_type="luspo", level="sequence", epsilon=0.01, epsilon_high=0.02, mode="token_mask", c_max=1.3
    ),
    "sapo": Settings(loss_type="sapo", off_policy=0.01, beta=0.2),
    "grpo": Settings(loss_type="grpo", level="sequence", epsilon=0.05, epsilon_high=0.05, beta=0.2),
    "bnpo": Settings(loss_type="bnpo", epsilon=0.05, epsilon_high=0.08, delta=1.1),
    "dr_grpo": Settings(loss_type="dr_grpo", top_entropy=0.4, length=6, mode="sequence_mask"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_grpo_learns_what_the_formula_says(loss_type, tmp_path):
    settings = OBJECTIVES[loss_type]
    old = old_logps()
    advantages = []
    for group in (REWARDS[:4], REWARDS[4:]):
        known = [reward for reward in group if reward is not None]
        mean, std = statistics.mean(known), statistics.stdev(known)
        advantages += [0.0 if reward is None else (reward - mean) / (std + 1e-4) for reward in group]

    def gradients(scored: list[Scored], span: slice) -> list[list[float]]:
        lines = []
        for index, row in zip(range(8)[span], scored, strict=True):
            if REWARDS[index] is None:
                lines.append(Row([], [], [], [], [], 0.0))
                continue
            sampler = [a + b for a, b in zip(old[index], NOISE[index], strict=True)]
            logps = row.logps.tolist()
            lines.append(Row(logps, old[index], sampler, old[index], row.entropy, advantages[index]))
        [found] = reference.gradient([lines], settings)
        return [g or [0.0] * len(row.logps) for g, row in zip(found, scored, strict=True)]

    clips = loss_type not in ("sapo", "vespo")
    trainer = train(
        "grpo",
        tmp_path,
        loss_type=loss_type,
        importance_sampling_level=settings.level,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high if clips else None,
        delta=settings.delta,
        beta=settings.beta,
        max_completion_length=6,
        vllm_importance_sampling_correction=settings.mode is not None,
        vllm_importance_sampling_mode=settings.mode or "sequence_mask",
        vllm_importance_sampling_clip_min=settings.c_min,
        vllm_importance_sampling_clip_max=settings.c_max,
        off_policy_mask_threshold=settings.off_policy,
        top_entropy_quantile=settings.top_entropy,
    )
    expected = learn(gradients)
    assert distance(expected, small_model().state_dict()) > 1e-3
    assert distance(weights(trainer), expected) < 3e-6
    noise = [abs(value) for row, r in zip(NOISE, REWARDS, strict=True) if r is not None for value in row]
    difference = logged(trainer, "sampling/sampling_logp_difference/mean")
    assert difference[0] * 10 + difference[1] * 18 == pytest.approx(sum(noise), abs=1e-3)


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_learns_what_the_formula_says(normalize, tmp_path):
    """Reward clipping, the leave-one-out baseline, normalisation over the batch and the clipped ratio of rows."""
    old, clip, low, high = old_logps(), (-0.5, 1.5), 0.05, 0.1
    clipped = [None if reward is None else min(max(reward, clip[0]), clip[1]) for reward in REWARDS]
    advantages: list[float | None] = []
    for group in (clipped[:4], clipped[4:]):
        for i, reward in enumerate(group):
            others = [other for j, other in enumerate(group) if j != i and other is not None]
            advantages.append(None if reward is None else reward - statistics.mean(others))
    known = [a for a in advantages if a is not None]
    if normalize:
        mean, std = statistics.mean(known), statistics.stdev(known)
        advantages = [None if a is None else (a - mean) / (std + 1e-4) for a in advantages]

    def loss(logps: list[list[float]], span: slice) -> float:
        total, count = 0.0, 0
        for index, row in zip(range(8)[span], logps, strict=True):
            if (a := advantages[index]) is not None:
                ratio = math.exp(sum(row) - sum(old[index]))
                total -= min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
                count += 1
        return total / count

    def gradients(scored: list[Scored], span: slice) -> list[list[float]]:
        logps = [row.logps.tolist() for row in scored]
        found = []
        for r, row in enumerate(logps):
            found.append([])
            for t in range(len(row)):
                ends = [
                    loss([*logps[:r], [*row[:t], row[t] + h, *row[t + 1 :]], *logps[r + 1 :]], span)
                    for h in (1e-6, -1e-6)
                ]
                found[-1].append((ends[0] - ends[1]) / 2e-6)
        return found

    trainer = train(
        "rloo",
        tmp_path,
        beta=0.0,
        epsilon=low,
        epsilon_high=high,
        reward_clip_range=clip,
        normalize_advantages=normalize,
    )
    expected = learn(gradients)
    assert distance(expected, small_model().state_dict()) > 1e-3
    assert distance(weights(trainer), expected) < 3e-6


def test_the_entropy_bonus_is_over_the_tokens_of_the_policy_loss(tmp_path):
    """With top_entropy_quantile 0 it is the one entropy of each step that is highest among the trained tokens."""
    options = {"entropy_coef": 0.7, "top_entropy_quantile": 0.0, "vllm_importance_sampling_correction": False}
    trainer = train("grpo", tmp_path, max_completion_length=6, **options)
    highest = max(h for ids in (COMPLETIONS[i] for i in (0, 1, 2)) for h in score(small_model(), ids).entropy)
    first = step_logs(trainer)[0]
    assert first["policy_loss"] - first["loss"] == pytest.approx(0.7 * highest, abs=1e-4)


# What the model itself sampled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate"])
def test_exact_sampling_has_weight_1(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(playing, "samples_the_policy", lambda *_: False)  # correct it all the same
    trainer = make_trainer("grpo", tmp_path, generator=local, vllm_importance_sampling_mode=mode)
    trainer.train()
    for end in ("min", "mean", "max"):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{end}") == pytest.approx([1.0, 1.0], abs=1e-4)


def test_the_local_generator_in_float32_is_not_corrected(tmp_path):
    """Its rounding depends on how rows share batches, so weights made of it would make equal runs differ."""
    trainer = make_trainer("grpo", tmp_path, generator=local)
    trainer.train()
    assert not any("importance_sampling_ratio" in name for log in step_logs(trainer) for name in log)


def test_dropout_is_no_difference_between_sampler_and_trainer(tmp_path, monkeypatch):
    """Nothing is dropped while sampling: the trainer compares a pass without dropout, and trains one with it."""
    monkeypatch.setattr(playing, "samples_the_policy", lambda *_: False)
    options = {"model": small_model(attention_dropout=0.5), "generator": local, "max_steps": 1, "epsilon": 0.0}
    trainer = make_trainer("grpo", tmp_path, **options)
    trainer.train()
    for end in ("min", "mean", "max"):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{end}") == pytest.approx([1.0], abs=1e-4)
    assert logged(trainer, "clip_ratio/region_mean") == [0.0], "on-policy the ratio is 1, whatever is dropped"


def test_rollouts_without_logprobs_are_not_corrected(tmp_path):
    """J04: what is missing, as a whole or for some tokens, is no difference and no NaN."""

    def train_with(folder: Path, logprobs: Any, **options: Any) -> dict[str, torch.Tensor]:
        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            return {"prompt_ids": [PROMPT] * 4, "completion_ids": COMPLETIONS[:4], "logprobs": logprobs}

        trainer = make_trainer(
            "grpo", folder, keywords={"rollout_func": rollout}, max_steps=1, optim="sgd", learning_rate=RATE, **options
        )
        trainer.train()
        assert all(math.isfinite(log["loss"]) for log in step_logs(trainer))
        return weights(trainer)

    plain = train_with(tmp_path / "0", None, vllm_importance_sampling_correction=False)
    assert distance(train_with(tmp_path / "1", None), plain) == 0
    assert distance(train_with(tmp_path / "2", [None] * 4), plain) == 0
    single = [[None] * len(ids) for ids in COMPLETIONS[:4]]
    assert distance(train_with(tmp_path / "3", single), plain) == 0


# Several processes ----------------------------------------------------------------------------------------------


def noisy(model: Any = None) -> ScriptedGenerator:
    """The same rows and logprobs for any number of processes."""

    def turn(_: str, __: list[int], params: SamplingParams) -> Sample:
        draw = random.Random(params.seed)
        ids = [draw.randrange(132, 226) for _ in range(draw.randint(1, 5))] + [EOS]
        return Sample(ids, [-5.5 + draw.gauss(0, 0.2) for _ in ids], FinishReason.STOP)

    return ScriptedGenerator(turn)


def train_restricted(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The second group of the first step has no reward: of two processes one has nothing to train on."""

    def reward(completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float | None]:
        return [None if r == 1 else sum(ids) % 97 / 10 for r, ids in zip(row, completion_ids, strict=True)]

    trainer = make_trainer(
        "grpo",
        folder,
        reward=reward,
        dataset=rows(8),
        generator=noisy,
        shuffle_dataset=False,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        **options,
    )
    trainer.train()
    return {"weights": weights(trainer), "logs": step_logs(trainer), "rank": os.environ.get("RANK")}


RESTRICTED = {
    "entropy": {"loss_type": "cispo", "top_entropy_quantile": 0.0, "vllm_importance_sampling_mode": "token_truncate"},
    "off-policy": {
        "loss_type": "vespo",
        "off_policy_mask_threshold": 0.05,
        "vllm_importance_sampling_mode": "sequence_truncate",
    },
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", first_fast(RESTRICTED, 1))
def test_i09_i10_two_processes_restrict_and_weigh_as_one(name, tmp_path):
    """The entropy threshold is over the tokens of both; a process without trained tokens takes part in it."""
    options = RESTRICTED[name]
    one = train_restricted(tmp_path / "one", {**options, "per_device_train_batch_size": 4})
    options = {**options, "per_device_train_batch_size": 2}
    two = run_world(train_restricted, tmp_path / "two", tmp_path / "two", options)
    for result in two:
        assert distance(result["weights"], one["weights"]) < 1e-6
        for ours, whole in zip(result["logs"], one["logs"], strict=True):
            names = [name for name in whole if "sampling" in name or "ratio" in name or "phi" in name]
            assert {"sampling/importance_sampling_ratio/mean", "sampling/sampling_logp_difference/mean"} <= set(names)
            for metric in names:
                assert ours[metric] == pytest.approx(whole[metric], abs=1e-5), metric
