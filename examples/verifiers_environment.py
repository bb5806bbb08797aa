"""Train on a verifiers environment (`MultiTurnEnv`, `ToolEnv` and their kin) as it is.

It owns its loop: its `run_rollout` asks an OpenAI-compatible endpoint, where the policy answers, and its rubric gives
the reward. It lives in an interpreter of its own, because its packages do not fit the trainer's. Run:

    make verifiers
    python examples/verifiers_environment.py --model Qwen/Qwen3-0.6B --environment NAME

where NAME is an environment that is installed there. Without `--environment` the one of `verifiers_program.py` is
played; without `--model` a tiny random model plays, which shows that everything is connected and learns nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from datasets import Dataset

from agentrl import Command, GRPOConfig, GRPOTrainer
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".venv-verifiers" / "bin" / "python"


def argv(action: str, environment: str, python: Path) -> list[str]:
    return [str(python), str(HERE / "verifiers_program.py"), action, environment]


def command(environment: str = "sums", python: Path = PYTHON) -> Command:
    """The program: one process a rollout. Its last word is the reward."""
    return Command(argv("play", environment, python), reward=lambda result: float(result.output.splitlines()[-1]))


def rows(environment: str = "sums", python: Path = PYTHON) -> Dataset:
    """The environment's data set. A row goes back to it as text, since its fields may differ from row to row."""
    output = subprocess.run(argv("rows", environment, python), check=True, capture_output=True, text=True).stdout
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return Dataset.from_list([{"prompt": json.loads(line)["prompt"], "row": line} for line in lines])


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the hub or a folder; a tiny random model without it")
    parser.add_argument("--environment", default="sums")
    parser.add_argument("--python", type=Path, default=PYTHON, help="an interpreter that has verifiers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/verifiers")
    options = parser.parse_args(arguments)
    tokenizer = None if options.model else qwen_like_tokenizer("compact")
    trainer = GRPOTrainer(
        model=options.model or tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096),
        processing_class=tokenizer,
        args=GRPOConfig(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=2048 if options.model else 256,
            rollout_timeout=300,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=rows(options.environment, options.python),
        agent=command(options.environment, options.python),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
