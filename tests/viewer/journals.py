"""Journals for the viewer's tests: filled through the journal itself, with what a run could have played."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrl.chat.continuation import Continuation
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.records import TurnRecord
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import (
    Failure,
    FinishReason,
    Limit,
    Outcome,
    Sample,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

TOKENIZER = qwen_like_tokenizer("compact")


def finish(coroutine: Any) -> None:
    """Run a coroutine in a thread of its own: that of a test with a browser has a loop already."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result()


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def turn_record(
    ids: Sequence[int],
    *,
    at: int,
    logprobs: Sequence[float] | None = None,
    content: Any = "",
    results: Sequence[ToolResult] = (),
    following: Sequence[int] | None = None,
    seconds: float = 0.5,
    version: int = 0,
) -> TurnRecord:
    """A turn whose ids begin at a place of the completion."""
    logprobs = [-0.1] * len(ids) if logprobs is None else logprobs
    calls = [{"type": "function", "function": {"name": r.call.name, "arguments": r.call.arguments}} for r in results]
    return TurnRecord(
        turn=Turn(at, at + len(ids), FinishReason.STOP, tuple(results), seconds, prefill=seconds / 4),
        sample=Sample(list(ids), list(logprobs), FinishReason.STOP, version),
        message={"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})},
        shown=bool(results),
        following=None if following is None else Continuation(list(following), len(following), False),
    )


async def play(
    journal: Journal,
    task: Task,
    prompt: Any,
    turns: Sequence[TurnRecord],
    *,
    outcome: Outcome | None = Outcome.FINISHED,
    limit: Limit | None = None,
    failure: Failure | None = None,
    reward: float | None = None,
    prompt_ids: Sequence[int] = (1, 2),
) -> Trajectory:
    """Enter a rollout with its turns; without an outcome it goes on being played."""
    entry = journal.enter(task)
    entry.begin(prompt, list(prompt_ids), resetting=0.2)
    entry.rewarding = 0.1
    for number, record in enumerate(turns):
        await entry.turn(number, record)
    trajectory = Trajectory(
        *(task, prompt, list(prompt_ids), [], [], [], [], outcome or Outcome.CANCELLED, limit),
        turns=[record.turn for record in turns],
        reward=reward,
        failure=failure,
    )
    if outcome is not None:
        await entry.end(trajectory)
    return trajectory


def fill(folder: Path, *, steps: int, groups: int, members: int = 8, seed: int = 0, rate: float = 0.04) -> Path:
    """A run of a game of additions whose reward rises, with failures of all kinds now and then."""
    finish(_fill(folder, steps, groups, members, random.Random(seed), rate))
    _spread_in_time(folder, random.Random(seed))
    TOKENIZER.save_pretrained(folder)
    return folder


def _spread_in_time(folder: Path, draw: random.Random) -> None:
    """Let rollouts take as long as their turns say, and ten seconds pass from step to step."""
    with contextlib.closing(sqlite3.connect(folder / "_rollouts.db")) as connection, connection:
        [base] = connection.execute("SELECT started FROM runs").fetchone()
        for number, step in connection.execute(
            "SELECT r.id, step FROM rollouts r JOIN windows w ON w.id = window"
        ).fetchall():
            started = at = base + 10 * step + draw.random()
            for turn, seconds, results in connection.execute(
                "SELECT number, seconds, results FROM turns WHERE rollout = ?", [number]
            ).fetchall():
                at += seconds + sum(result["seconds"] for result in json.loads(results)) + 0.3 * draw.random()
                connection.execute("UPDATE turns SET at = ? WHERE rollout = ? AND number = ?", [at, number, turn])
            connection.execute("UPDATE rollouts SET started = ?, ended = ? WHERE id = ?", [started, at + 0.1, number])


async def _fill(folder: Path, steps: int, groups: int, members: int, draw: random.Random, rate: float) -> None:
    journal = Journal(folder)
    journal.begin_run({"algorithm": "GRPO", "model": "tiny", "config": {"learning_rate": rate / 400, "beta": 0.0}})
    for step in range(steps):
        journal.open_window(kind="train", step=step, weights_version=step)
        skill = 1 - math.exp(-rate * (step + 3))
        tasks = [Task(f"0.{step}.{g}", m, step * groups + g) for g in range(groups) for m in range(members)]
        games = [_game(journal, task, draw, skill, step) for task in tasks]
        # Entered in their order: a rollout's number depends on it.
        played = await asyncio.gather(*games)
        rewards = [t.reward if t.outcome.is_signal else None for t in played]
        journal.add_rewards(
            played, ["Game", "brief"], [[r, None if r is None else 0.1 * draw.random()] for r in rewards]
        )
        for first in range(0, len(played), members):
            given = [r or 0.0 for r in rewards[first : first + members]]
            middle = sum(given) / members
            spread = math.sqrt(sum((r - middle) ** 2 for r in given) / members) + 1e-4
            journal.add_advantages(played[first : first + members], [[(r - middle) / spread] for r in given])
        entropy = 1.2 * math.exp(-0.03 * step) + 0.02 * draw.random()
        known = {"loss": draw.gauss(0, 0.01), "entropy": entropy, "grad_norm": 0.5 + 0.1 * draw.random()}
        parts = {"rollouts": 5 + draw.random(), "rewards": 0.4, "sync": 0.2, "training": 3 + draw.random()}
        known |= {f"step_time/{name}": seconds for name, seconds in parts.items()}
        known |= {"step_time": sum(parts.values()), "sampling/importance_sampling_ratio/mean": 1 + draw.gauss(0, 1e-3)}
        journal.add_log(step + 1, known | {"clip_ratio/region_mean": 0.01 * draw.random()})
    journal.close()


def _game(journal: Journal, task: Task, draw: random.Random, skill: float, step: int) -> Any:
    a, b = random.Random(task.seed).sample(range(10, 99), 2)
    question = f"What is {a} + {b}? Use the tool, then give the sum."
    right = draw.random() < skill
    broken = draw.random() < 0.02
    cut = not broken and draw.random() < 0.08 * (1 - skill)
    asked = encode(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call><|im_end|>')
    said = encode(f"The sum is {a + b if right else a + b + draw.randrange(1, 9)}.<|im_end|>")
    shown = encode(f"\n<|im_start|>user\n<tool_response>\n{a + b}\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    failed = draw.random() < 0.15 * (1 - skill) + 0.01
    call = ToolCall("call_0", "add", {"a": a, "b": b if not failed else str(b)})
    told = "TypeError: unsupported operand type(s) for +: 'int' and 'str'" if failed else str(a + b)
    result = ToolResult(call, told, failed=failed, seconds=draw.expovariate(4))

    def likely(ids: list[int]) -> list[float]:
        return [-draw.expovariate(4 + 10 * skill) for _ in ids]

    first = turn_record(
        asked, at=0, logprobs=likely(asked), content="I add the two numbers.", results=[result], following=shown,
        seconds=0.4 + draw.random(), version=step,
    )  # fmt: skip
    second = turn_record(
        said, at=len(asked) + len(shown), logprobs=likely(said), content=TOKENIZER.decode(said[:-1]),
        seconds=0.2 + draw.random() / 2, version=step,
    )  # fmt: skip
    outcome = Outcome.ENV_FAILURE if broken else Outcome.TRUNCATED if cut else Outcome.FINISHED
    trace = "Traceback (most recent call last):\n  ...\nConnectionError: the game server went away"
    return play(
        journal,
        task,
        [{"role": "user", "content": question}],
        [first] if broken or cut else [first, second],
        outcome=outcome,
        limit=Limit.COMPLETION if cut else None,
        failure=Failure("add", "ConnectionError: the game server went away", trace) if broken else None,
        reward=None if broken else float(right and not cut),
        prompt_ids=encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"),
    )


def run_of(folder: Path, *rollouts: Any, info: dict[str, Any] | None = None) -> Path:
    """A run of rollouts, each made by a function of the journal and a task."""

    async def enter() -> None:
        journal = Journal(folder)
        journal.begin_run({} if info is None else info)
        journal.open_window(kind="train", step=0)
        for number, rollout in enumerate(rollouts):
            await rollout(journal, Task("g", number, 7))
        journal.close()

    finish(enter())
    return folder
