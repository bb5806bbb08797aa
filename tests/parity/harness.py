"""The same training run here and in TRL: one tiny float32 model, one set of rollouts, SGD on the CPU.

Both sides get their rollouts from `Rollouts`, a function of prompt, member and optimizer step, so that neither samples.
TRL has no vLLM here; where a case is about the correction of the sampler's logprobs, its trainer is told that the
rollouts come from vLLM, which is all that its own code asks. TRL shuffles the rows of a generation batch; that is
switched off, because with `num_iterations` or `steps_per_generation` above 1 it decides which rows a step trains on.
"""

from __future__ import annotations

import math
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import agentrl
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import EOS, FIX_VOCAB_SIZE, fix_tokenizer
from tests.training.runs import distance

Side = Literal["agentrl", "trl"]
Rewards = Sequence[Callable[..., list[float | None]]]

BASE: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "num_iterations": 2,  # so that ratios move away from 1
    "max_steps": 3,
    "max_completion_length": 10,
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 1e6,  # measures the norm and clips nothing
    "bf16": False,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


CUTTING = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "num_iterations",
        "max_steps",
        "learning_rate",
    }
)
"""Options that say how often and on what a run steps, and nothing about the objective."""


@dataclass(frozen=True)
class Rollouts:
    """What is played.

    Attributes:
        ragged: Completions have 3 to 10 tokens; else 7.
        truncated: The last member of a group does not end.
        masked: Two tokens of each completion are not the model's (`env_mask`).
        noise: The sampler's logprobs are the initial model's, plus up to this many nats either way.
    """

    ragged: bool = True
    truncated: bool = False
    masked: bool = False
    noise: float = 0.0

    def play(self, prompts: Sequence[str], step: int, generations: int, family: str) -> dict[str, list[list[Any]]]:
        """The rollouts of a generation batch, as a rollout function gives them."""
        played: dict[str, list[list[Any]]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        masks = []
        for row, prompt in enumerate(prompts):
            draw = random.Random(f"{prompt} {row % generations} {step}")
            prompt_ids = _ids(random.Random(prompt), 3 + len(prompt))
            ends = not (self.truncated and row % generations == generations - 1)
            ids = _ids(draw, draw.randint(3, 10) if self.ragged else 7)
            ids = [*ids[:-1], EOS] if ends else ids
            scores = initial_logps(family, tuple(prompt_ids), tuple(ids))
            played["prompt_ids"].append(prompt_ids)
            played["completion_ids"].append(ids)
            played["logprobs"].append([score + draw.uniform(-self.noise, self.noise) for score in scores])
            masks.append([0 if self.masked and place in (1, 2) and len(ids) > 3 else 1 for place in range(len(ids))])
        return played | ({"env_mask": masks} if self.masked else {})


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(132, 226) for _ in range(count)]


def by_ids(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that depends on the sampled ids only, and is never the mean of its group.

    An advantage of 0 is one of 1e-8 to who computes it in another order, and clip ratios ask for its sign.
    """
    return [(sum(ids) % 97) / 100 for ids in completion_ids]


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A second one."""
    return [0.1 * (len(ids) % 4) + (ids[0] % 37) / 100 for ids in completion_ids]


def sometimes(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """One that applies to two members of each group."""
    return [None if row % 4 in (1, 2) else (sum(ids) % 61) / 50 for row, ids in enumerate(completion_ids)]


def model_of(family: str) -> PreTrainedModel:
    """The initial policy."""
    if family != "qwen3_moe":
        return tiny_model(family, vocab_size=FIX_VOCAB_SIZE, initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=FIX_VOCAB_SIZE,
                hidden_size=32,
                intermediate_size=32,
                moe_intermediate_size=16,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_hidden_layers=2,
                num_experts=4,
                num_experts_per_tok=2,
                initializer_range=0.1,
            )
        ).eval()


@cache
def _initial(family: str) -> PreTrainedModel:
    return model_of(family)


@cache
def initial_logps(family: str, prompt_ids: tuple[int, ...], ids: tuple[int, ...]) -> list[float]:
    """Logprobs of a completion under the initial policy, by a plain forward pass."""
    with torch.no_grad():
        logits = _initial(family)(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), list(ids)].tolist()


@dataclass(frozen=True)
class Case:
    """A run to compare.

    Attributes:
        name: What it is about.
        options: Fields of the configuration, over those of `BASE`.
        algorithm: "grpo" or "rloo".
        rollouts: What is played.
        rewards: Reward functions.
        family: The model.
        corrects: Whether the sampler's logprobs correct the loss.
        apart: Metrics that TRL defines otherwise; what they are here has a test of its own.
        unlike: Options of the run that this one must not equal, or it would show nothing; None: those of `BASE`, with
            what says how steps are cut.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "grpo"
    rollouts: Rollouts = Rollouts()
    rewards: Rewards = (by_ids,)
    family: str = "llama"
    corrects: bool = False
    apart: frozenset[str] = frozenset()
    unlike: dict[str, Any] | None = None

    @property
    def without(self) -> Case:
        """The run that this one must not equal."""
        cut = {name: value for name, value in self.options.items() if name in CUTTING}
        return replace(self, options=cut if self.unlike is None else cut | self.unlike, corrects=False)


@dataclass(frozen=True)
class Trained:
    """What a run leaves: its weights and its logs, one an optimizer step."""

    weights: dict[str, Tensor]
    logs: list[dict[str, float]]


def run(side: Side, case: Case, **options: Any) -> Trained:
    """Train; `options` win over those of the case."""
    settings = BASE | case.options | options
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = (_trl_trainer if side == "trl" else _agentrl_trainer)(case, folder, settings)
        trainer.train()
    return Trained(
        {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        [log for log in trainer.state.log_history if "loss" in log],
    )


def _parts(case: Case) -> dict[str, Any]:
    """Arguments that both sides take."""
    return {
        "model": model_of(case.family),
        "reward_funcs": list(case.rewards),
        "train_dataset": datasets.Dataset.from_dict({"prompt": ["a", "bcd", "ef", "ghij"]}),
        "processing_class": fix_tokenizer(),
    }


def _play(case: Case, settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    def play(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        return case.rollouts.play(prompts, trainer.state.global_step, settings["num_generations"], case.family)

    return play


def _agentrl_trainer(case: Case, folder: str, settings: dict[str, Any]) -> Any:
    if case.algorithm == "rloo":
        args = agentrl.RLOOConfig(folder, **settings)
        return agentrl.RLOOTrainer(args=args, rollout_func=_play(case, settings), **_parts(case))
    args = agentrl.GRPOConfig(folder, **settings, vllm_importance_sampling_correction=case.corrects)
    return agentrl.GRPOTrainer(args=args, rollout_func=_play(case, settings), **_parts(case))


def _trl_trainer(case: Case, folder: str, settings: dict[str, Any]) -> Any:
    import trl

    play, parts = _play(case, settings), _parts(case)
    # TRL loads the reference by the name of the policy.
    parts["model"].save_pretrained(f"{folder}/initial")
    parts["model"].config._name_or_path = f"{folder}/initial"
    if case.algorithm == "rloo":
        trainer = trl.RLOOTrainer(args=trl.RLOOConfig(folder, **settings), **parts)
        played: dict[str, Any] = {}

        def prompt_ids(prompts: Sequence[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
            played.update(play(prompts, trainer))
            return played["prompt_ids"], None, {}

        trainer._tokenize_prompts = prompt_ids  # RLOO has no rollout_func
        trainer._generate_single_turn = lambda *_: played["completion_ids"]
        return _unshuffled(trainer)
    args = trl.GRPOConfig(folder, **settings, vllm_importance_sampling_correction=case.corrects)
    trainer = trl.GRPOTrainer(args=args, rollout_func=play, **parts)
    if case.corrects:
        trainer.use_vllm = True
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1
    return _unshuffled(trainer)


def _unshuffled(trainer: Any) -> Any:
    """Keep TRL from shuffling the rows of a generation batch."""
    prepare = trainer._prepare_inputs

    def prepare_in_order(batch: Any) -> Any:
        with mock.patch(f"{type(trainer).__module__}.shuffle_sequence_dict", lambda rows: rows):
            return prepare(batch)

    trainer._prepare_inputs = prepare_in_order
    return trainer


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart.

    Attributes:
        weights: The largest difference of a weight.
        logs: Of each metric that both log, the largest difference over the steps, relative where above 1.
        moved: How far the weights went from where they began, at most.
        missing: Metrics that TRL logs and we do not.
    """

    weights: float
    logs: dict[str, float]
    moved: float
    missing: frozenset[str]

    @property
    def worst(self) -> tuple[str, float]:
        """The metric that differs most, and by how much."""
        return max(self.logs.items(), key=lambda item: item[1])


TIMES = frozenset({"step_time", "epoch", "learning_rate"})
"""Metrics that say nothing about the objective."""


def difference(case: Case, ours: Trained, theirs: Trained) -> Difference:
    """Compare two runs of a case."""
    start = model_of(case.family).state_dict()
    assert len(ours.logs) == len(theirs.logs)
    logs: dict[str, float] = {}
    missing: set[str] = set()
    for mine, its in zip(ours.logs, theirs.logs, strict=True):
        missing |= its.keys() - mine.keys() - TIMES
        for name in (mine.keys() & its.keys()) - TIMES - case.apart:
            logs[name] = max(logs.get(name, 0.0), _apart(mine[name], its[name]))
    return Difference(
        distance(ours.weights, theirs.weights),
        logs,
        distance(ours.weights, start),
        frozenset(missing),
    )


def _apart(mine: float | None, its: float | None) -> float:
    if mine is None or its is None:
        return 0.0 if mine is its else math.inf
    return abs(mine - its) / max(1.0, abs(its))
