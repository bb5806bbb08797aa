"""What the rollout engine itself costs: microseconds a turn with a generator and tools that answer at once.

A thousand rollouts of ten turns are in flight together. Each turn is sampled (from a script), parsed, its tool call
run, the result rendered and the limits checked, so the whole time is agentrl's own. The tokenizer is byte-level with
Qwen's special tokens and the Qwen3 training template; the tool is sync (a thread each call) or async. Each is measured
without a journal and with one, in which every turn is committed before the next one is sampled.

    python benchmarks/engine_overhead.py [--rollouts 1000] [--turns 10]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.chat.renderer import Renderer
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.limits import Limits
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import FinishReason, Outcome, Sample, Task

NUMBERS = itertools.count()
"""Makes every result a new one, so that no cache of rendered results helps."""

REPEATS = 3
"""The best of so many runs is taken: what else the machine does only ever adds."""


def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return f"{key} is {next(NUMBERS)}"


async def lookup_async(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return f"{key} is {next(NUMBERS)}"


class InstantGenerator:
    """Plays the same turns in every rollout, made beforehand: it costs next to nothing itself."""

    max_context = None

    def __init__(self, turns: list[Sample]) -> None:
        self.stats = GenerationStats()
        self._turns = turns
        self._played: Counter[str] = Counter()

    async def sample(self, session: str, ids: Sequence[int], params: SamplingParams) -> Sample:
        self._played[session] += 1
        return self._turns[self._played[session] - 1]

    def release(self, session: str) -> None:
        pass

    def sync(self, weights_version: int) -> None:
        pass

    def close(self) -> None:
        pass


def script(tokenizer: Any, tool: str, turns: int) -> list[Sample]:
    """Write the turns: a call each, with arguments of its own, then an answer."""
    texts = [
        f'<tool_call>\n{{"name": "{tool}", "arguments": {{"key": "k{turn}"}}}}\n</tool_call><|im_end|>'
        for turn in range(turns - 1)
    ]
    rows = [tokenizer.encode(text) for text in [*texts, "It is 42.<|im_end|>"]]
    return [Sample(ids, [-0.5] * len(ids), FinishReason.STOP) for ids in rows]


def measure(tool: Callable[..., Any], rollouts: int, turns: int, journal: Journal | None = None) -> float:
    """Return the microseconds that one turn takes, over all rollouts."""
    tokenizer = qwen_like_tokenizer()
    generator = InstantGenerator(script(tokenizer, tool.__name__, turns))
    engine = RolloutEngine(generator, Renderer(tokenizer, tools=True), tools=[tool], limits=Limits(), journal=journal)

    def run(count: int) -> float:
        tasks = [Task(str(i), 0, i, [{"role": "user", "content": f"What is {i}?"}]) for i in range(count)]
        start = time.perf_counter()
        trajectories = engine.run(tasks)
        seconds = time.perf_counter() - start
        assert all(t.outcome is Outcome.FINISHED and len(t.turns) == turns for t in trajectories)
        return seconds

    run(20)  # threads started, templates compiled
    seconds = min(run(rollouts) for _ in range(REPEATS))
    engine.close()
    return seconds / (rollouts * turns) * 1e6


def main() -> None:
    """Measure both kinds of tools and print the cost of a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    for tool in (lookup, lookup_async):
        kind = "async" if tool is lookup_async else "sync"
        what = f"{args.rollouts} rollouts x {args.turns} turns, {kind} tool"
        print(f"{what}: {measure(tool, args.rollouts, args.turns):.0f} µs a turn (wanted: at most 500)")
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(folder)
            cost = measure(tool, args.rollouts, args.turns, journal)
            journal.close()
            size = journal.path.stat().st_size / ((REPEATS * args.rollouts + 20) * args.turns)
        print(f"{what}, with a journal: {cost:.0f} µs and {size:.0f} bytes a turn (wanted: at most 500 µs)")


if __name__ == "__main__":
    main()
