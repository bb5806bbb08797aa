"""Random conversations on a generator, and the logprobs that a plain forward pass gives them."""

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import dataclass, field

import torch

from agentrl.generation.base import Generator, SamplingParams
from agentrl.generation.sampling import first_occurrence, process_logits, seen_before


@dataclass
class Played:
    """A sampled turn: the whole row, where the turn starts in it, its logprobs and how it was drawn."""

    row: list[int]
    start: int
    logprobs: list[float]
    params: SamplingParams


@dataclass
class Conversations:
    """Plays random conversations on a generator and keeps every turn."""

    turns: list[Played] = field(default_factory=list)

    async def play(self, generator: Generator, name: str, prompt: list[int], seed: int, **sampling) -> None:
        rng = random.Random(seed)
        row = list(prompt)
        for _ in range(rng.randint(1, 4)):
            params = SamplingParams(
                max_tokens=rng.randint(1, 9),
                stop_ids=frozenset({5, 6}),
                seed=rng.randint(0, 10**9),
                **sampling,
            )
            sample = await generator.sample(name, row, params)
            self.turns.append(Played(row + sample.ids, len(row), sample.logprobs, params))
            row = row + sample.ids + [rng.randint(3, 63) for _ in range(rng.randint(1, 12))]
            await asyncio.sleep(rng.random() * 0.005)
        if rng.random() < 0.5:
            generator.release(name)


def run(*awaitables: Awaitable):
    async def gather():
        return await asyncio.wait_for(asyncio.gather(*awaitables), 300)

    return asyncio.run(gather())


def score(model, turn: Played) -> torch.Tensor:
    """Logprobs of a turn by one plain forward pass over the whole row."""
    ids_T = torch.tensor(turn.row)
    with torch.no_grad():
        logits_TV = model(ids_T[None], attention_mask=torch.ones_like(ids_T[None]), use_cache=False).logits[0]
    position_N = torch.arange(turn.start, len(turn.row))
    params = turn.params
    logprobs_NV = process_logits(
        logits_TV[position_N - 1],
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seen_NV=seen_before(first_occurrence(ids_T, logits_TV.shape[-1]), position_N),
    )
    return logprobs_NV.gather(-1, ids_T[position_N][:, None])[:, 0]


def worst_error(model, turns: list[Played]) -> float:
    return max((score(model, turn) - torch.tensor(turn.logprobs)).abs().max().item() for turn in turns)
