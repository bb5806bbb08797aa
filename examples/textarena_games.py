"""Train on a game of TextArena; `textarena_player.py` makes any game for one player an environment.

Run, where agentrl is developed:

    make games
    agentrl check --env examples/textarena_games.py:guess_the_number
    python examples/textarena_games.py --model Qwen/Qwen3-0.6B --game TowerOfHanoi-v0

Without `--model` a tiny random model plays, which shows that everything is connected and learns nothing.
"""

from __future__ import annotations

import argparse

from textarena_player import games

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer

guess_the_number = games("GuessTheNumber-v0")


def main(argv: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the hub or a folder; a tiny random model without it")
    parser.add_argument("--game", default="GuessTheNumber-v0")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/textarena")
    options = parser.parse_args(argv)
    tokenizer = None if options.model else qwen_like_tokenizer("compact")
    trainer = GRPOTrainer(
        model=options.model or tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096),
        processing_class=tokenizer,
        environment_factory=games(options.game),
        args=GRPOConfig(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=1024 if options.model else 64,
            max_tool_calling_iterations=20,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
