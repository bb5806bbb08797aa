"""A Gymnasium environment: a tiny agent learns to cross the frozen lake.

The lake is 4 x 4 fields, four of which are holes. The agent is told the number of its field and says where to go next;
it is rewarded when it reaches field 15. It knows the way but half of its steps go anywhere.

    python examples/frozen_lake.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from demo_report import print_rewards
from tiny_agent.agents import walking_agent

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.envs.gymnasium import Gymnasium

lake = Gymnasium(
    "FrozenLake-v1",
    is_slippery=False,
    max_episode_steps=10,
    prompt="You are on a frozen lake. Go to field 15. Your field:",
    description="Walk to the next field.",
    actions=["left", "down", "right", "up"],
)


def main(argv: Sequence[str] | None = None) -> GRPOTrainer:
    """Train, and print the reward of the first and of the last tenth of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="runs/frozen-lake")
    arguments = parser.parse_args(argv)
    trainer = GRPOTrainer(
        model=str(walking_agent(lake)),
        environment_factory=lake,
        args=GRPOConfig(
            arguments.out,
            max_steps=arguments.steps,
            per_device_train_batch_size=48,
            num_generations=8,
            max_completion_length=200,
            learning_rate=2e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            gradient_checkpointing=False,  # saves memory that a tiny model does not need
        ),
    )
    trainer.train()
    print_rewards(trainer)
    return trainer


if __name__ == "__main__":
    main()
