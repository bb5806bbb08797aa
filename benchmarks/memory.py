"""Whether a long training holds on to anything: memory, objects, threads, files and sockets over 2,000 tiny steps.

Each step plays a window of its own with the local generator, an environment and a tool, scores it, trains on it and
writes it into the journal. Printed are memory (resident, after a garbage collection), Python's objects, threads, open
files and sockets along the way; the exit code is 1 when the last quarter of the training has more than the second one:
by `--limit` MB, by 50 objects and one a step, or by more than 4 threads, files or sockets: pools fill up as rollouts
happen to need them at once.

The library `tokenizers` keeps the ids of the first 10,000 words that a thread meets, for as long as that lives (about
0.8 kB each here, where a whole prompt is one word). That is filled before the training begins: else it grows through
all of it.

    python benchmarks/memory.py [--steps 2000] [--limit 16] [--prompts N]
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import transformers
from transformers import TrainerCallback

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.chat.renderer import Renderer
from agentrl.generation.base import SamplingParams
from agentrl.generation.local import LocalGenerator
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import FinishReason, Sample

MARKS = 10
"""Times that the counts are taken."""

WORDS = 10_000
"""What `tokenizers` keeps."""


class Clicker:
    """Counts clicks.

    Attributes:
        prompts: How many there are. What is kept of prompts is bounded, which shows when there are more than fit.
    """

    prompts = 2**31

    def reset(self, seed: int) -> str:
        """Begin."""
        self.clicks = 0
        return f"Click {seed % self.prompts} times."

    def click(self) -> str:
        """Click once."""
        self.clicks += 1
        return f"{self.clicks} clicks"

    def get_reward(self) -> float:
        """Anything: equal rewards would leave nothing to train on."""
        return random.random()


class Calling(LocalGenerator):
    """The local generator, whose first turn of each rollout is a call and whose second one is short.

    A random model never writes one by itself, and without one there are no tools, suffixes and second turns.
    """

    def __init__(self, model: Any, call: list[int]) -> None:
        super().__init__(model, max_cache_tokens=16_384)
        self._call = call
        self._called: set[str] = set()

    async def sample(self, session: str, ids: Sequence[int], params: SamplingParams) -> Sample:
        """Call, or sample a turn."""
        if session in self._called:
            return await super().sample(session, ids, replace(params, max_tokens=4))
        self._called.add(session)
        return Sample(self._call, [math.nan] * len(self._call), FinishReason.STOP)

    def release(self, session: str) -> None:
        """Forget a rollout."""
        self._called.discard(session)
        super().release(session)


class Gauge(TrainerCallback):
    """Takes the counts at equal distances.

    Args:
        every: Steps between two.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.counts: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take them, and print them."""
        if state.global_step % self.every:
            return
        gc.collect()
        me = psutil.Process()
        counts = {
            "MB": round(me.memory_info().rss / 2**20, 1),
            "objects": len(gc.get_objects()),
            "threads": threading.active_count(),
            "files": me.num_fds(),
            "sockets": len(me.net_connections("all")),
        }
        self.counts.append(counts)
        print(f"step {state.global_step:6}: {', '.join(f'{n:,.10g} {name}' for name, n in counts.items())}", flush=True)


async def fill(renderer: Renderer) -> None:
    """Let the tokenizer meet as many words as it keeps, in the thread of the event loop, which renders."""
    for number in range(WORDS):
        renderer.prompt_ids(f"Click {2**32 + number} times.", [])


def least(counts: list[dict[str, float]]) -> dict[str, float]:
    """The least of each count: what is there between two collections of garbage comes and goes."""
    return {name: min(count[name] for count in counts) for name in counts[0]}


def main(argv: list[str] | None = None) -> int:
    """Train, and print the counts; 1 if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--limit", type=float, default=16.0)
    parser.add_argument("--prompts", type=int, default=2**31, help="few for a short run, which fills no cache")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    tokenizer = qwen_like_tokenizer()
    model = tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=2048)
    call = tokenizer.encode('<tool_call>\n{"name": "click", "arguments": {}}\n</tool_call><|im_end|>')
    gauge = Gauge(max(1, args.steps // MARKS))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            environment_factory=type("Clicker", (Clicker,), {"prompts": args.prompts}),
            generator=Calling(model, call),
            callbacks=[gauge],
            args=GRPOConfig(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=4,
                num_generations=2,
                max_completion_length=160,
                use_cpu=True,
                gradient_checkpointing=False,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.collector.engine.await_(fill(trainer.collector.renderer))
        trainer.train()
    quarter = len(gauge.counts) // 4
    early, late = least(gauge.counts[quarter : 2 * quarter + 1]), least(gauge.counts[-quarter - 1 :])
    limits = dict.fromkeys(early, 4.0) | {"MB": args.limit, "objects": 50 + args.steps / 2}
    grown = {name: late[name] - early[name] for name in early}
    print(f"from the second to the last quarter: {', '.join(f'{n:,.3g} {name}' for name, n in grown.items())}")
    too_much = [name for name in grown if grown[name] > limits[name]]
    print(f"too much: {', '.join(too_much)}" if too_much else "nothing is held on to")
    return int(bool(too_much))


if __name__ == "__main__":
    sys.exit(main())
