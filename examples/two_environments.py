"""One agent, two environments: the dataset's column `environment` says which one a row is played in.

In each row the agent is offered the tools of that row's environment only.

    python examples/two_environments.py
    agentrl check --env examples/two_environments.py:ENVIRONMENTS
"""

from __future__ import annotations

import argparse

from counter import Counter
from datasets import Dataset
from guess_number import GuessNumber
from tiny_agent.agents import versatile_agent

from agentrl import GRPOConfig, GRPOTrainer

ENVIRONMENTS = {"guess": GuessNumber, "count": Counter}


def main(argv: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="name or folder of a model (default: a tiny one made in place)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="runs/two-environments")
    options = parser.parse_args(argv)

    trainer = GRPOTrainer(
        model=options.model or str(versatile_agent(GuessNumber, Counter)),
        # Both environments make their own tasks, so routing is all the dataset has to do.
        train_dataset=Dataset.from_dict({"environment": [*ENVIRONMENTS] * 500}),
        environment_factory=ENVIRONMENTS,
        args=GRPOConfig(
            output_dir=options.out,
            max_steps=options.steps,
            learning_rate=1e-6 if options.model else 5e-4,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=200,
            logging_steps=5,
            report_to="none",
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
