"""Episodes of several rows: one advantage, one place in the denominators, every sampled token trained once."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl import GRPOTrainer, RLOOTrainer
from agentrl.errors import ConfigurationError
from agentrl.generation.base import SamplingParams
from agentrl.objectives.aggregation import AGGREGATIONS, Denominators, token_loss
from agentrl.objectives.losses import clipped_surrogate, log_ratios, rloo_loss
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.training.batching import Layout, collate, split
from agentrl.training.scoring import score
from agentrl.types import FinishReason, Outcome, Row, Sample, Task, Trajectory
from tests.training.helpers import Game, logged, make

ADVANTAGES = [0.5, -1.0, 0.25]
MODEL = tiny_model("llama")


def episode(member: int, *rows: Row) -> Trajectory:
    first, *forks = rows
    fields = (first.prompt_ids, "", first.completion_ids, first.loss_mask, first.logprobs)
    return Trajectory(Task("g", member, 0), "", *fields, Outcome.FINISHED, forks=forks)


def row(prompt: list[int], completion: list[int], mask: list[int]) -> Row:
    return Row(prompt, completion, mask, [-0.5 * sampled for sampled in mask])


EPISODES = [
    episode(0, row([11, 12], [13, 14, 15, 16], [0, 0, 1, 1]), row([17], [18, 19, 20], [1, 1, 0])),
    episode(1, row([21, 22, 23], [24], [1])),
    episode(2, row([31], [32, 33], [1, 1]), row([34, 35], [36], [1]), row([37, 38], [39, 40], [0, 1])),
]


def plain_logps(part: Row, sampling: SamplingParams, model=MODEL) -> list[float]:
    """Logprobs of a row's sampled tokens from a plain forward, the penalty in a Python loop."""
    ids = part.prompt_ids + part.completion_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    logps = []
    for position in (len(part.prompt_ids) + c for c, sampled in enumerate(part.loss_mask) if sampled):
        scores = logits[position - 1].clone()
        for seen in set(ids[:position]):
            penalty = sampling.repetition_penalty
            scores[seen] = scores[seen] / penalty if scores[seen] > 0 else scores[seen] * penalty
        logps.append((scores / sampling.temperature).log_softmax(-1)[ids[position]].item())
    return logps


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.PACKED])
def test_every_sampled_token_is_one_target_with_its_episode_s_advantage_a10(layout):
    batch = collate(EPISODES, pad_token_id=0, advantages=ADVANTAGES, layout=layout)
    before = batch.input_ids.flatten()[batch.target_index_N].tolist()
    found = list(zip(before, batch.target_ids_N.tolist(), batch.advantages_R[batch.row_N].tolist(), strict=True))
    assert found == [
        *[(14, 15, 0.5), (15, 16, 0.5), (17, 18, 0.5), (18, 19, 0.5)],
        (23, 24, -1.0),
        *[(31, 32, 0.25), (32, 33, 0.25), (35, 36, 0.25), (39, 40, 0.25)],
    ]
    assert (batch.rows, batch.trained_rows, len(batch.sequences_at)) == (3, 3, 6)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.PACKED])
def test_each_row_is_scored_in_its_own_context(layout, penalty):
    sampling = SamplingParams(1, repetition_penalty=penalty)
    scores = score(MODEL, collate(EPISODES, pad_token_id=0, layout=layout), sampling)
    expected = [value for episode in EPISODES for part in episode.rows for value in plain_logps(part, sampling)]
    torch.testing.assert_close(scores.logps_N.detach(), torch.tensor(expected, dtype=torch.float32))


def batch_loss(episodes, advantages, loss_type, counts):
    batch = collate(episodes, pad_token_id=0, advantages=advantages)
    logps_N = score(MODEL, batch, SamplingParams(1)).logps_N
    ratio_N = log_ratios(logps_N, batch.sampler_logps_N, batch.row_N, batch.rows)
    loss_N = clipped_surrogate(ratio_N, batch.advantages_R[batch.row_N], 0.2, 0.2).loss
    return token_loss(loss_N, batch.row_N, batch.rows, loss_type, counts, max_completion_length=7)


@pytest.mark.parametrize("loss_type", [name for name in AGGREGATIONS if name != "bnpo"])
def test_losses_count_episodes_however_many_rows_they_have_l09(loss_type):
    """Against a double loop over episodes and their tokens; cut into micro-batches, the sum is the same."""
    tokens = sum(episode.sampled_length for episode in EPISODES)
    total = 0.0
    for episode, advantage in zip(EPISODES, ADVANTAGES, strict=True):
        losses = []
        for logp in (value for part in episode.rows for value in plain_logps(part, SamplingParams(1))):
            ratio = math.exp(logp + 0.5)
            losses.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
        by_row, by_token = len(losses) * len(EPISODES), tokens
        divided = {"grpo": by_row, "sapo": by_row, "dapo": by_token, "cispo": by_token, "vespo": by_token}
        divided |= {"dr_grpo": 7 * len(EPISODES), "luspo": len(EPISODES)}
        total += sum(losses) / divided[loss_type]
    counts = Denominators(rows=3, tokens=tokens, micro_batches=1, world_size=1)
    parts = zip(split(EPISODES, 2), split(ADVANTAGES, 2), strict=True)
    found = sum(batch_loss(*part, loss_type, counts).item() for part in parts)
    assert found == pytest.approx(total, rel=1e-5)


def test_rloo_takes_a_whole_episode_as_one_action():
    batch = collate(EPISODES, pad_token_id=0, advantages=ADVANTAGES)
    logps_N = score(MODEL, batch, SamplingParams(1)).logps_N.detach()
    old_N = logps_N - 0.01  # inside the clip range
    surrogate = rloo_loss(logps_N, old_N, batch.advantages_R, batch.row_N, 0.2, 0.2)
    sizes = [episode.sampled_length for episode in EPISODES]
    expected = [-math.exp(0.01 * size) * a for size, a in zip(sizes, ADVANTAGES, strict=True)]
    torch.testing.assert_close(surrogate.loss, torch.tensor(expected))


# Whole runs ---------------------------------------------------------------------------------------------------

TOKENIZER = qwen_like_tokenizer("compact")
TOKENIZER.chat_template = TOKENIZER.chat_template.replace(
    "'\\n' + (message.content or '')",
    "'\\n' + ((message.content or '') if loop.last else (message.content or '').split('</think>')[-1])",
)
TOKENIZER.response_template = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
THOUGHTFUL = TOKENIZER.encode('<think>so</think><tool_call>{"name": "press", "arguments": {}}</tool_call><|im_end|>')


class Thoughtful:
    """Samples from the model but begins each rollout with reasoning and a call, scored by the model."""

    def __init__(self, generator, model, sampling):
        self.inner, self.model, self.sampling = generator, model, sampling
        self.stats, self.max_context = generator.stats, generator.max_context
        self.given: dict[str, list[list[int]]] = {}

    async def sample(self, session, ids, params):
        given = self.given.setdefault(session, [])
        given.append(list(ids))
        if len(given) > 1:
            return await self.inner.sample(session, ids, params)
        mask = [1] * len(THOUGHTFUL)
        logprobs = plain_logps(Row(list(ids), THOUGHTFUL, mask, []), self.sampling, self.model)
        return Sample(list(THOUGHTFUL), logprobs, FinishReason.STOP)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def trained(cls, tmp_path, reasoning, **config):
    model = tiny_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=1024)
    settings = {"max_completion_length": 160, "reasoning": reasoning, "max_steps": 1} | config
    trainer = make(cls, tmp_path, model=model, processing_class=TOKENIZER, environment_factory=Game, config=settings)
    collector = trainer.collector
    generator = Thoughtful(collector.generator, trainer.model, collector.sampling)
    collector.engine.generator = generator
    trainer.train()
    return trainer, generator


@pytest.mark.parametrize(
    ("cls", "config"), [(GRPOTrainer, {}), (RLOOTrainer, {"repetition_penalty": 1.3, "temperature": 0.8})]
)
def test_a_run_with_forks_is_on_policy_in_every_row(cls, config, tmp_path):
    """Invariant 3, with the KV of a rewritten context: ratio 1 on both rows of each episode."""
    trainer, generator = trained(cls, tmp_path, "fork", **config)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert min(logged(trainer, "completions/mean_turns")) == 2.0
    for first, second in generator.given.values():
        assert second[: len(first) + len(THOUGHTFUL)] != [*first, *THOUGHTFUL]
        assert "so</think>" not in TOKENIZER.decode(second)


def test_keep_is_the_default_and_gives_the_same_episode_in_one_row(tmp_path):
    trainer, generator = trained(GRPOTrainer, tmp_path, "keep")
    assert trainer.args.reasoning == type(trainer.args)(str(tmp_path)).reasoning
    for first, second in generator.given.values():
        assert second[: len(first) + len(THOUGHTFUL)] == [*first, *THOUGHTFUL]


def test_reward_functions_get_the_ids_of_all_rows(tmp_path):
    seen = []

    def reward(completion_ids, **_):
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    model = tiny_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=1024)
    trainer = make(
        GRPOTrainer,
        tmp_path,
        model=model,
        processing_class=TOKENIZER,
        environment_factory=Game,
        reward_funcs=reward,
        config={"max_completion_length": 160, "reasoning": "fork", "max_steps": 1},
    )
    collector = trainer.collector
    collector.engine.generator = Thoughtful(collector.generator, trainer.model, collector.sampling)
    trainer.train()
    assert all(ids[: len(THOUGHTFUL)] == THOUGHTFUL and len(ids) > len(THOUGHTFUL) for ids in seen)


def test_forks_are_refused_where_nothing_could_fork(tmp_path):
    with pytest.raises(ConfigurationError, match="reasoning='fork'"):
        make(GRPOTrainer, tmp_path, config={"reasoning": "fork"})
    with pytest.raises(ConfigurationError, match="one of"):
        make(GRPOTrainer, tmp_path, config={"reasoning": "drop"})
