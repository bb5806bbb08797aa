"""Commands as they are typed, and what tests of several commands type them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer

COUNTER = '''
import random


class Counter:
    replayable = True

    def reset(self, seed: int) -> str:
        self.value = 0
        self.target = random.Random(seed).randint(1, 6)
        return f"Increment to {self.target}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: What to add.
        """
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.target)


def length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]
'''


def run(*arguments: Any) -> tuple[int, str, str]:
    """Exit code, what was printed and what was complained of."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def save_model(folder: Path, template: str = "compact") -> Path:
    """A tiny random model with its tokenizer."""
    tokenizer = qwen_like_tokenizer(template)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096, **special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
