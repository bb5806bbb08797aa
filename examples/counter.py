"""The smallest environment: a counter to be increased to a target. There is no dataset; `reset` makes the task.

python examples/counter.py
python examples/counter.py --model Qwen/Qwen3-0.6B    # any chat model that calls tools
"""

from __future__ import annotations

import argparse
import random
import shutil

from tiny_agent.agents import counting_agent

from agentrl import GRPOConfig, GRPOTrainer


class Counter:
    def reset(self, seed: int | None = None, **columns) -> str:
        """Start an episode. What comes back is the task, as the user's message."""
        self.value = 0
        self.target = random.Random(seed).randint(1, 6)
        return f"Increment the counter by {self.target}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: What to add to it.

        Returns:
            The counter's new value.
        """
        self.value += step
        return self.value

    def get_reward(self) -> float:
        """1 when the counter stands at the target at the end."""
        return float(self.value == self.target)


def main(argv: list[str] | None = None) -> GRPOTrainer | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="name or folder of a model (default: a tiny one made in place)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/counter")
    parser.add_argument("--start", help="only put the untrained tiny model into this folder")
    options = parser.parse_args(argv)
    if options.start:
        shutil.copytree(counting_agent(Counter), options.start, dirs_exist_ok=True)
        print(f"The untrained model lies in {options.start}.")
        return None

    trainer = GRPOTrainer(
        model=options.model or str(counting_agent(Counter)),
        environment_factory=Counter,
        args=GRPOConfig(
            output_dir=options.out,
            max_steps=options.steps,  # without a dataset, this is what ends training
            learning_rate=1e-6 if options.model else 5e-4,  # the tiny model wants larger steps
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=100,
            logging_steps=5,
            report_to="none",
        ),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
