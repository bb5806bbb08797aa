"""A vision-language model learns to use a browser: it sees screenshots, and clicks, types and drags.

Needs a GPU, Chromium and `pip install 'agentrl[browser]'`. NOT RUN where agentrl is developed, for want of a GPU; the
environment was, with a scripted policy (benchmarks/browser.py).

    agentrl check --env examples/browser_agent.py:browser
    python examples/browser_agent.py --model Qwen/Qwen2.5-VL-3B-Instruct --steps 300
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.envs import Browser

browser = Browser()


def main(argv: Sequence[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-VL-3B-Instruct")
    parser.add_argument("--tasks", nargs="*", help="all by default; start with the short ones: menu popup drag")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="runs/browser")
    arguments = parser.parse_args(argv)
    trainer = GRPOTrainer(
        model=arguments.model,
        environment_factory=browser,
        train_dataset=browser.tasks(arguments.tasks or None, repeat=64),
        args=GRPOConfig(
            arguments.out,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=8192,  # a screenshot of 640 x 480 is some 400 tokens
            max_tool_calling_iterations=12,
            learning_rate=1e-6,
            bf16=True,
            logging_steps=1,
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
