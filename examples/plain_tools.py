"""Plain functions as tools, a dataset of questions, and a reward function. No environment is needed for that.

python examples/plain_tools.py
"""

from __future__ import annotations

import argparse
import random

from datasets import Dataset
from tiny_agent.agents import calculating_agent

from agentrl import GRPOConfig, GRPOTrainer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers. Tools may be async; those of different episodes then run side by side.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return a * b


def correct(completions, answer, **kwargs) -> list[float]:
    """Reward a right final answer. Columns of the dataset come by their names, here `answer`."""
    # A completion holds every message after the prompt: tool calls, tool answers and the agent's last words.
    said = [completion[-1].get("content", "").strip() for completion in completions]
    return [float(words == right) for words, right in zip(said, answer, strict=True)]


def questions(count: int) -> Dataset:
    rng = random.Random(0)
    rows = {"prompt": [], "answer": []}
    for _ in range(count):
        a, b, sign = rng.randint(1, 9), rng.randint(1, 9), rng.choice("+*")
        rows["prompt"].append([{"role": "user", "content": f"What is {a} {sign} {b}?"}])
        rows["answer"].append(str(a + b if sign == "+" else a * b))
    return Dataset.from_dict(rows)


def main(argv: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="name or folder of a model (default: a tiny one made in place)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="runs/plain-tools")
    options = parser.parse_args(argv)

    trainer = GRPOTrainer(
        model=options.model or str(calculating_agent(add, multiply)),
        reward_funcs=correct,
        train_dataset=questions(1000),
        tools=[add, multiply],
        args=GRPOConfig(
            output_dir=options.out,
            max_steps=options.steps,
            learning_rate=1e-6 if options.model else 5e-4,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=100,
            max_tool_calling_iterations=3,
            logging_steps=5,
            report_to="none",
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
