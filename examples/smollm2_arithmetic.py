"""A real pretrained model on a real task set: SmolLM2-135M learns to do sums with a tool, on the CPU.

The questions come from reasoning-gym, which also scores the answers. A step takes about a minute on two cores;
a few steps show that everything works, some hundreds of them improve the model.

    pip install 'agentrl[pretrained]'
    python examples/smollm2_arithmetic.py --steps 3
"""

from __future__ import annotations

import argparse
import re

import reasoning_gym
from datasets import Dataset
from smollm2 import smollm2_folder, smollm2_tokenizer

from agentrl import GRPOConfig, GRPOTrainer

SUMS = reasoning_gym.create_dataset("chain_sum", size=500, seed=0, min_terms=2, max_terms=3, min_digits=1, max_digits=2)
ASK = "State the final answer to the following arithmetic problem:"  # how reasoning-gym puts it


def calculate(expression: str) -> str:
    """Work out a sum of whole numbers.

    Args:
        expression: Numbers joined by + and -, for example "12 + 7 - 3".

    Returns:
        The result.
    """
    compact = expression.replace(" ", "")
    if not re.fullmatch(r"[+-]?\d+([+-]\d+)*", compact):
        raise ValueError(f"not a sum of whole numbers: {expression!r}")  # the model reads this and may try again
    return str(sum(int(term) for term in re.findall(r"[+-]?\d+", compact)))


def correct(completions, index, **kwargs) -> list[float]:
    """Let reasoning-gym score the last number that the model named."""
    scores = []
    for completion, question in zip(completions, index, strict=True):
        numbers = re.findall(r"-?\d+", completion[-1].get("content") or "")
        scores.append(SUMS.score_answer(numbers[-1] if numbers else None, SUMS[question]))
    return scores


def used_tool(completions, **kwargs) -> list[float]:
    """A call that worked is worth something by itself: it is the first thing to learn."""
    return [
        float(any(message["role"] == "tool" and not message["content"].startswith("Error") for message in completion))
        for completion in completions
    ]


def conversation(question: str) -> list[dict]:
    """A question, after a few that have been answered with the tool: the model sees how it is done.

    With three of them it calls the tool about every second time, which is what training can build on.
    """
    solved = [("21 - 4 + 30", "47"), ("8 + 5", "13"), ("60 - 71", "-11")]
    messages = []
    for expression, result in solved:
        call = {"name": "calculate", "arguments": {"expression": expression}}
        messages += [
            {"role": "user", "content": f"{ASK} {expression} ="},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculate", "content": result},
            {"role": "assistant", "content": f"The answer is {result}."},
        ]
    return [*messages, {"role": "user", "content": question}]


def main(argv: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", help="name or folder of a SmolLM2 model (default: the 135M one, from the package registry)"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="runs/smollm2-arithmetic")
    options = parser.parse_args(argv)

    model = options.model or str(smollm2_folder())
    trainer = GRPOTrainer(
        model=model,
        processing_class=smollm2_tokenizer(model),
        reward_funcs=[correct, used_tool],
        train_dataset=Dataset.from_dict(
            {
                "prompt": [conversation(entry["question"]) for entry in SUMS],
                "index": list(range(len(SUMS))),
            }
        ),
        tools=[calculate],
        args=GRPOConfig(
            output_dir=options.out,
            max_steps=options.steps,
            learning_rate=1e-5,
            reward_weights=[1.0, 0.2],
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,  # two questions of four answers each in a step
            num_generations=4,
            max_completion_length=128,
            max_tool_calling_iterations=2,
            logging_steps=1,
            log_completions=True,  # prints what the model wrote and what it got for it
            num_completions_to_print=2,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
