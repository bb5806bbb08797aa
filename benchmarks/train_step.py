"""Time and memory of a training step on ragged agent trajectories, here and in TRL's trainer.

Rollouts are made beforehand and handed to both sides through `rollout_func`: a group of 8 rows with one prompt of 100
to 800 tokens, and completions of 4 to 8 turns, of which 80% are tool tokens (`env_mask`). So a step is laying out,
scoring, the backward pass and AdamW. The vocabulary has 150,000 ids; the layers have half as many weights as the LM
head.

Each side runs in a process of its own, so that its peak of resident memory is its own; sides take turns. Printed are
the seconds of each step by the clock and those of the processor (the best of the rounds), the peak, how far it is
above the memory before training, and the ratios. Beside other work only the processor's seconds mean something, and
only with OMP_NUM_THREADS=1. That both sides did the same work shows in the gradient's norms, which must agree.

    python benchmarks/train_step.py --peer [--rounds 2] [--rows 4] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

GROUP = 8
PROMPTS = (300, 100, 450, 800)
"""Tokens of each step's prompt; the first step warms up."""


@dataclass(frozen=True)
class Size:
    """The model and the rollouts."""

    vocabulary: int = 150_000
    hidden: int = 256
    layers: int = 24
    prompts: tuple[int, ...] = PROMPTS
    turns: tuple[int, int] = (4, 8)
    sampled: tuple[int, int] = (8, 24)


QUICK = Size(vocabulary=2000, hidden=64, layers=2, prompts=(10, 20), turns=(2, 3), sampled=(2, 4))


def make_rollouts(step: int, size: Size, ids: int) -> dict[str, list[list[Any]]]:
    """The group of a step, as a rollout function returns it."""
    draw = random.Random(step)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, ids) for _ in range(count)]

    prompt = tokens(size.prompts[step])
    rollouts: dict[str, list[list[Any]]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for _ in range(GROUP):
        turns = [draw.randint(*size.sampled) for _ in range(draw.randint(*size.turns))]
        result = 4 * sum(turns) // (len(turns) - 1)  # none follows the last turn
        mask = [bit for turn in turns for bit in [1] * turn + [0] * result][:-result]
        rollouts["prompt_ids"].append(prompt)
        rollouts["completion_ids"].append(tokens(len(mask)))
        rollouts["logprobs"].append([-10.0] * len(mask))
        rollouts["env_mask"].append(mask)
    return rollouts


def train(side: str, size: Size, rows: int) -> dict[str, Any]:
    """Train in this process and tell what it took."""
    import datasets
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

    from agentrl.testing.tokenizers import qwen_like_tokenizer

    if side == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from agentrl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    tokenizer = qwen_like_tokenizer("compact")
    heads = size.hidden // 64
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 2, 1),
            head_dim=64,
            tie_word_embeddings=True,
        )
    )
    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    def play(prompts: list[str], trainer: Any) -> dict[str, list[list[Any]]]:
        return make_rollouts(trainer.state.global_step, size, len(tokenizer))

    def reward(completion_ids: Sequence[list[int]], **_: Any) -> list[float]:
        return [float(len(ids) % 7) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            max_steps=len(size.prompts),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=GROUP // rows,
            num_generations=GROUP,
            max_completion_length=4096,
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            use_cpu=True,
            vllm_importance_sampling_correction=False,  # the logprobs of the rollouts are made up
        )
        trainer: Any = GRPOTrainer(
            model=model,
            args=arguments,
            reward_funcs=reward,
            train_dataset=datasets.Dataset.from_dict({"prompt": [str(step) for step in range(len(size.prompts))]}),
            processing_class=tokenizer,
            rollout_func=play,
            callbacks=[Clock()],
        )
        resident = _resident()
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "wall": [after[0] - before[0] for before, after in pairwise(ends)],
        "cpu": [after[1] - before[1] for before, after in pairwise(ends)],
        "peak": peak,
        "growth": peak - resident,
        "norms": [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log],
    }


def _resident() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(side: str, options: Sequence[str]) -> dict[str, Any]:
    """Run a side in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--side", side, *options]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def _best(results: Sequence[dict[str, Any]]) -> list[float]:
    """Each step's wall time, the sums of wall and CPU time, peak and growth: the lowest of the rounds."""
    wall, cpu = ([min(times) for times in zip(*(r[name] for r in results), strict=True)] for name in ("wall", "cpu"))
    return [*wall, sum(wall), sum(cpu), *(min(r[name] for r in results) for name in ("peak", "growth"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="store_true", help="measure TRL's GRPOTrainer too (extra: bench)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side; the best ones count")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch, a divisor of 8")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short rollouts, to see that all runs")
    parser.add_argument("--side", choices=["agentrl", "trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else Size()
    if options.side:
        warnings.simplefilter("ignore")
        print(json.dumps(train(options.side, size, options.rows)))
        return 0
    passed_on = ["--rows", str(options.rows), *(["--quick"] if options.quick else [])]
    sides = ["agentrl", *(["trl"] if options.peer else [])]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side in sides:
            runs[side].append(measure(side, passed_on))
    names = [*(f"prompt {tokens}" for tokens in size.prompts[1:]), "wall", "CPU", "peak", "growth"]
    print(f"{'':8}" + "".join(f"{name:>13}" for name in names))
    best = {side: _best(results) for side, results in runs.items()}
    units = ["s"] * (len(names) - 2) + ["MiB"] * 2
    for side, values in best.items():
        cells = (f"{value:.{2 if unit == 's' else 0}f} {unit}" for value, unit in zip(values, units, strict=True))
        print(f"{side:8}" + "".join(f"{cell:>13}" for cell in cells))
    if not options.peer:
        return 0
    ratios = (ours / theirs for ours, theirs in zip(best["agentrl"], best["trl"], strict=True))
    print(f"{'ratio':8}" + "".join(f"{ratio:13.2f}" for ratio in ratios))
    apart = max(abs(a / b - 1) for a, b in zip(runs["agentrl"][0]["norms"], runs["trl"][0]["norms"], strict=True))
    print(f"gradient norms agree within {apart:.0e}" if apart < 1e-3 else f"GRADIENT NORMS DIFFER by {apart:.0e}")
    return 0 if apart < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
