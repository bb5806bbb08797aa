"""What the rollout engine itself costs: microseconds a turn with a generator and tools that answer at once.

A thousand rollouts of ten turns are in flight together. Each turn is sampled (from a script), parsed, its tool call
run, the result rendered and the limits checked, so the whole time is agentrl's own. The tokenizer is byte-level with
Qwen's special tokens and the Qwen3 training template; the tool is sync (a thread each call) or async.

    python benchmarks/engine_overhead.py [--rollouts 1000] [--turns 10]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from agentrl.chat.renderer import Renderer
from agentrl.generation.base import SamplingParams
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.limits import Limits
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Outcome, Task


def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return f"{key} is 42"


async def lookup_async(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return f"{key} is 42"


def measure(tool: Callable[..., Any], rollouts: int, turns: int) -> float:
    """Return the microseconds that one turn takes, over all rollouts."""
    tokenizer = qwen_like_tokenizer()
    answer = tokenizer.encode("It is 42.<|im_end|>")
    asked: dict[str, int] = {}

    def policy(session: str, ids: list[int], params: SamplingParams) -> list[int]:
        asked[session] = turn = asked.get(session, 0) + 1
        if turn == turns:
            return answer
        call = f'{{"name": "{tool.__name__}", "arguments": {{"key": "k{turn}"}}}}'
        return tokenizer.encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>")

    def run(count: int) -> float:
        asked.clear()
        tasks = [Task(str(i), 0, i, [{"role": "user", "content": f"What is {i}?"}]) for i in range(count)]
        start = time.perf_counter()
        trajectories = engine.run(tasks)
        seconds = time.perf_counter() - start
        assert all(t.outcome is Outcome.FINISHED and len(t.turns) == turns for t in trajectories)
        return seconds

    renderer = Renderer(tokenizer, tools=True)
    engine = RolloutEngine(ScriptedGenerator(policy), renderer, tools=[tool], limits=Limits())
    run(20)  # threads started, templates compiled
    start = time.perf_counter()
    for turn in range(rollouts * turns):
        policy(f"own {turn % rollouts}", [], SamplingParams(max_tokens=1))
    scripted = time.perf_counter() - start  # what writing the script costs is not the engine's
    seconds = run(rollouts) - scripted
    engine.close()
    return seconds / (rollouts * turns) * 1e6


def main() -> None:
    """Measure both kinds of tools and print the cost of a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    for tool in (lookup, lookup_async):
        cost = measure(tool, args.rollouts, args.turns)
        kind = "async" if tool is lookup_async else "sync"
        print(f"{args.rollouts} rollouts x {args.turns} turns, {kind} tool: {cost:.0f} µs a turn (wanted: at most 500)")


if __name__ == "__main__":
    main()
