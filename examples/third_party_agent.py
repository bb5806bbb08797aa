"""Train a third-party agent as it is: mini-swe-agent, which knows nothing of agentrl.

It lives in an environment of its own (its dependencies need not fit those of the trainer) and talks to the policy
through the OpenAI-compatible endpoint. Run:

    make agents
    python examples/third_party_agent.py --model Qwen/Qwen3-0.6B

Without `--model` a tiny random model plays, which shows that everything is connected and learns nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from agentrl import Command, GRPOConfig, GRPOTrainer
from agentrl.rollout.endpoint.programs import CommandResult
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".venv-agents" / "bin" / "python"


def command(python: Path = PYTHON) -> Command:
    """The program: one process a rollout."""
    return Command([str(python), str(HERE / "mini_swe_program.py")], reward=reward)


def reward(result: CommandResult) -> float:
    """1 for the right submission; a little for submitting at all, so that there is something to begin with."""
    ending = json.loads(result.output.splitlines()[-1])
    if ending.get("exit_status") != "Submitted":
        return 0.0
    return 1.0 if ending["submission"].strip() == result.task.columns["answer"] else 0.2


def rows() -> Dataset:
    """Small jobs for a shell."""
    jobs = [(f"Write the number {a} * {b} comes to into answer.txt.", str(a * b)) for a in (12, 17) for b in (3, 9)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": job}], "answer": it} for job, it in jobs])


def tiny() -> dict[str, Any]:
    """A random model of bytes."""
    tokenizer = qwen_like_tokenizer("compact")
    return {
        "model": tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096),
        "processing_class": tokenizer,
    }


def main(argv: list[str] | None = None) -> GRPOTrainer:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name on the hub or a folder; a tiny random model without it")
    parser.add_argument("--python", type=Path, default=PYTHON, help="an interpreter that has mini-swe-agent")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="out/third_party_agent")
    given = parser.parse_args(argv)
    trainer = GRPOTrainer(
        **({"model": given.model} if given.model else tiny()),
        args=GRPOConfig(
            given.out,
            max_steps=given.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=2048 if given.model else 256,
            rollout_timeout=300,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=rows(),
        agent=command(given.python),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
