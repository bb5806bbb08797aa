"""Small pieces shared by the engine's tests: FIX.tok ids, a counter environment, tasks."""

from __future__ import annotations

from typing import Any

from agentrl.chat.renderer import Renderer
from agentrl.rollout.engine import RolloutEngine
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.tokenizers import fix_tokenizer
from agentrl.types import Message, Task, Trajectory

EOS, NEWLINE, BOS = 2, 3, 1
QUESTION: list[Message] = [{"role": "user", "content": "Q:"}]


def encode(text: str) -> list[int]:
    """Encode with FIX.tok, specials included."""
    return fix_tokenizer()(text, add_special_tokens=False)["input_ids"]


def call(name: str, arguments: str = "{}") -> str:
    """A call as the FIX templates write it."""
    return f'<call>{{"name": "{name}", "arguments": {arguments}}}</call>'


def turn(text: str) -> list[int]:
    """A sampled turn that ends with EOS."""
    return [*encode(text), EOS]


def renderer(template: str = "t0") -> Renderer:
    return Renderer(fix_tokenizer(template), tools=True)


def tasks(count: int, prompt: Any = QUESTION, **columns: Any) -> list[Task]:
    """One group of `count` members."""
    return [Task("g", member, 7, prompt, columns) for member in range(count)]


class Counter:
    """The counter environment of the spec; its reward is the counter."""

    resets = 0

    def reset(self, **kwargs: Any) -> str | None:
        type(self).resets += 1
        self.counter = 0
        return None

    def get_reward(self) -> float:
        return float(self.counter)

    def inc(self, step: int = 1) -> int:
        """Increment the counter.

        Args:
            step: By how much.
        """
        self.counter += step
        return self.counter


def echo(text: str) -> str:
    """Give the text back.

    Args:
        text: Any text.
    """
    return text


def run_and_close(engine: RolloutEngine, rows: list[Task]) -> list[Trajectory]:
    """Play tasks, assert the row invariants, and close the engine."""
    try:
        trajectories = engine.run(rows)
        for trajectory in trajectories:
            assert_row_invariants(trajectory)
        engine.release(trajectories)
    finally:
        engine.close()
    return trajectories
