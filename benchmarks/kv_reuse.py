"""What keeping keys and values between turns saves, against prefilling the whole conversation at each turn.

A group of 8 rollouts plays 6 turns; after each turn comes a tool result of about 200 tokens. One side is the
local generator. The other side does what TRL's trainer does: `model.generate` on the left-padded batch of
whole conversations. Both sample the same number of tokens a turn (no id stops) and alternate in the same
process, so that other load on the machine meets both alike. Printed are wall times, CPU times (all threads)
and how many tokens the local generator prefilled for each token that it had to.

    python benchmarks/kv_reuse.py            # a random model of SmolLM2-135M's size
    python benchmarks/kv_reuse.py --small    # a model of 3M parameters, under a minute
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.generation.base import SamplingParams
from agentrl.generation.local import LocalGenerator

ROLLOUTS, TURNS, PROMPT, RESULT = 8, 6, 200, 200


@dataclass
class Cost:
    wall: float = 0.0
    cpu: float = 0.0

    def measure(self, turn: Callable[[], list[list[int]]]) -> list[list[int]]:
        wall, cpu = time.perf_counter(), time.process_time()
        sampled = turn()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        return sampled


def build(small: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    if small:
        shape = {
            "hidden_size": 192,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "vocab_size": 4096,
        }
    else:
        shape = {
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
        }
    return LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=4096, tie_word_embeddings=True)).eval()


def whole_conversations(model: LlamaForCausalLM, rows: list[list[int]], new_tokens: int) -> list[list[int]]:
    width = max(map(len, rows))
    input_ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        output = model.generate(
            input_ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return output[:, width:].tolist()


def kept_conversations(generator: LocalGenerator, rows: list[list[int]], new_tokens: int, turn: int) -> list[list[int]]:
    async def sample() -> list[list[int]]:
        samples = await asyncio.gather(
            *(
                generator.sample(str(i), row, SamplingParams(max_tokens=new_tokens, seed=turn * ROLLOUTS + i))
                for i, row in enumerate(rows)
            )
        )
        return [sample.ids for sample in samples]

    return asyncio.run(sample())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model and shorter turns")
    parser.add_argument("--new-tokens", type=int, help="tokens sampled a turn (default 64, small 32)")
    arguments = parser.parse_args()
    new_tokens = arguments.new_tokens or (32 if arguments.small else 64)
    model = build(arguments.small)
    vocab_size = model.config.vocab_size
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    print(
        f"{model.num_parameters() / 1e6:.1f}M parameters, {torch.get_num_threads()} threads, "
        f"{ROLLOUTS} rollouts, {TURNS} turns, {new_tokens} new tokens a turn"
    )
    prompt = tokens(PROMPT)
    whole = [list(prompt) for _ in range(ROLLOUTS)]
    kept = [list(prompt) for _ in range(ROLLOUTS)]
    needed = PROMPT
    generator = LocalGenerator(model)
    whole_cost, kept_cost = Cost(), Cost()
    whole_conversations(model, [prompt[:8]] * ROLLOUTS, 2)  # warm up
    for turn in range(TURNS):
        before = whole_cost.wall, kept_cost.wall
        for rows, sampled in (
            (whole, whole_cost.measure(lambda: whole_conversations(model, whole, new_tokens))),
            (
                kept,
                kept_cost.measure(lambda turn=turn: kept_conversations(generator, kept, new_tokens, turn)),
            ),
        ):
            for row, ids in zip(rows, sampled, strict=True):
                row.extend(ids)
        print(
            f"turn {turn + 1}: rows of {max(map(len, kept))} tokens, "
            f"whole {whole_cost.wall - before[0]:.1f} s, kept {kept_cost.wall - before[1]:.1f} s",
            flush=True,
        )
        if turn + 1 < TURNS:
            for i in range(ROLLOUTS):
                result = tokens(rng.randint(RESULT - 50, RESULT + 50))
                needed += len(result)
                whole[i].extend(result)
                kept[i].extend(result)
    generator.close()
    prefilled = generator.stats.prefilled_tokens
    print(f"prefilled {prefilled} tokens of {needed} unique ones: {prefilled / needed:.3f}")
    for name, whole_s, kept_s in (
        ("wall", whole_cost.wall, kept_cost.wall),
        ("CPU", whole_cost.cpu, kept_cost.cpu),
    ):
        print(f"{name} time {whole_s:.1f} s / {kept_s:.1f} s = {whole_s / kept_s:.2f}x")


if __name__ == "__main__":
    main()
