"""What type checkers see of the public names, as somebody who uses them writes it. Not run: `make lint` checks it."""

from __future__ import annotations

from typing import assert_type

from agentrl import EpisodeDone, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, StepReward, isolated, tool


class Counter:
    def reset(self, seed: int) -> str:
        self.value = 0
        return f"Count to {seed}."

    @tool(timeout=5.0)
    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: What to add.
        """
        self.value += step
        if self.value > 9:
            raise EpisodeDone("too far")
        return self.value

    def get_reward(self) -> float:
        return float(self.value)


def shortness(completions: list[str], **columns: object) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def write_both() -> None:
    args = GRPOConfig("runs/count", max_steps=3, beta=0.1)
    trainer = GRPOTrainer("model", shortness, args, environment_factory=Counter)
    assert_type(trainer, GRPOTrainer)
    assert_type(args.max_steps, int)
    assert_type(Counter().increment(3), int)
    rloo = RLOOTrainer("model", args=RLOOConfig("runs/rloo"), environment_factory=isolated(Counter, cpu_time=30))
    rloo.train()


def write_what_is_wrong() -> None:
    """Each of these is an error; lint fails where it is none, for then the comment has nothing to ignore."""
    GRPOConfig("runs/count", max_stepss=3)  # type: ignore[call-arg]
    GRPOTrainer("model", environment=Counter)  # type: ignore[call-arg]
    Counter().increment("three")  # type: ignore[arg-type]
    StepReward("moved", "high")  # type: ignore[arg-type]
