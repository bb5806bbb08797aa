"""The demo: watch a small agent learn to use its tool, on the CPU, in a few minutes. `make demo` runs this.

The agent plays a guessing game (`guess_number.py`). It starts with some practice: it calls the tool correctly but
guesses at random far too often, and loses more games than it wins. Reinforcement learning makes it win nearly all.

    python examples/demo.py                       # GRPO
    python examples/demo.py --algorithm rloo      # REINFORCE Leave-One-Out
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import transformers
from demo_report import LiveProgress, console, draw_curve, first_and_last_tenth, mean, save_curve, show_episodes
from guess_number import GuessNumber
from tiny_agent import play
from tiny_agent.agents import guessing_agent
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from agentrl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

ALGORITHMS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
TEST_GAMES = range(1_000_000, 1_000_200)  # seeds of the games that are played before and after training
GAMES_SHOWN = 3
EXACT = 1e-4  # sampler and trainer are to agree on every logprob within this


def train(start: Path, algorithm: str, seed: int, steps: int, out: Path):
    """Train the agent: this is all it takes."""
    trainer_class, config_class = ALGORITHMS[algorithm]
    progress = LiveProgress()
    trainer = trainer_class(
        model=str(start),
        environment_factory=GuessNumber,
        args=config_class(
            output_dir=str(out),
            max_steps=steps,
            learning_rate=5e-4,  # a model this small wants larger steps than a real one
            per_device_train_batch_size=96,  # games in a step ...
            num_generations=8,  # ... of which 8 each are about the same number, compared with one another
            max_completion_length=200,
            seed=seed,
            use_cpu=True,
            gradient_checkpointing=False,  # saves memory that a tiny model does not need
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,  # our own progress instead of the usual bar and printed logs
        ),
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(out / "model"))
    return trainer, progress.rewards


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another run of training")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, help="where results go (default: runs/demo-ALGORITHM)")
    options = parser.parse_args(argv)
    out = options.out or Path("runs") / f"demo-{options.algorithm}"
    out.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    console.rule("[bold]An agent learns to find a hidden number[/bold]")
    console.print(
        "A number from 1 to 15 is hidden. The agent has four guesses, made by calling the tool `guess`, and is told\n"
        "whether the number is higher or lower. Reward: 1 for finding it, else 0.\n"
    )
    console.print("Preparing the untrained agent (half a minute the first time, kept in .cache/ afterwards) ...")
    start = guessing_agent(GuessNumber)
    tokenizer = AutoTokenizer.from_pretrained(start)
    before = play(AutoModelForCausalLM.from_pretrained(start), tokenizer, GuessNumber, TEST_GAMES)
    show_episodes("Before training", before[:GAMES_SHOWN])

    console.print(f"\n[bold]Training[/bold] with {options.algorithm.upper()}, 96 games in each step\n")
    started = time.perf_counter()
    trainer, rewards = train(start, options.algorithm, options.seed, options.steps, out)
    seconds = time.perf_counter() - started

    after = play(trainer.model, tokenizer, GuessNumber, TEST_GAMES)
    show_episodes("After training, the same games", after[:GAMES_SHOWN])

    console.print(f"\n[bold]Mean reward of each step[/bold]\n\n{draw_curve(rewards)}\n")
    first, last = first_and_last_tenth(rewards)
    won_before, won_after = (mean([episode.reward for episode in episodes]) for episodes in (before, after))
    console.print(
        f"Reward in {len(TEST_GAMES)} test games: [bold]{won_before:.2f} before, {won_after:.2f} after[/bold] "
        f"{seconds:.0f} seconds of training.\n"
        f"Reward while training: {first:.2f} in the first tenth of the steps, {last:.2f} in the last."
    )
    difference = largest_difference(trainer)
    console.print(
        f"Sampler against trainer: their logprobs of the same token differed by {difference:.1e} at most over the "
        f"whole run; up to {EXACT:.0e} counts as exact{'' if difference < EXACT else ', SO THIS IS NOT'}."
    )
    picture = out / "reward.png"
    if save_curve(rewards, picture, f"Finding a hidden number with {options.algorithm.upper()}"):
        console.print(f"The curve as an image: {picture}")
    else:
        console.print("(With `pip install matplotlib` the curve is saved as an image too.)")
    console.print(HOW_TO_GO_ON.format(model=out / "model"), markup=False)


def largest_difference(trainer) -> float:
    """The largest difference between the logprobs of sampler and trainer over the run."""
    name = "sampling/sampling_logp_difference/max"
    return max(logs[name] for logs in trainer.state.log_history if name in logs)


HOW_TO_GO_ON = """
The trained agent lies in {model}; load it like any model:

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("{model}")
    tokenizer = AutoTokenizer.from_pretrained("{model}")

To train an agent of your own, copy examples/guess_number.py, change the class to your task, and run

    from agentrl import GRPOConfig, GRPOTrainer
    GRPOTrainer(
        model="Qwen/Qwen3-0.6B",  # any chat model that calls tools
        environment_factory=YourEnvironment,
        args=GRPOConfig("runs/mine", max_steps=200),
    ).train()

Next to this demo, examples/ has shorter ones: counter.py, plain_tools.py, two_environments.py, and
smollm2_arithmetic.py with a real pretrained model.
"""


if __name__ == "__main__":
    main()
