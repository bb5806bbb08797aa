"""Make a tiny agent from recorded episodes: tokenizer, model, a short supervised fit, kept in a cache."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from tiny_agent.tokenizer import CHAT_TEMPLATE, make_tokenizer
from tiny_agent.transcripts import Transcript

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tiny-agents"
IGNORED = -100  # the label that the loss skips


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes a tiny agent besides the episodes it reads."""

    seed: int = 0
    vocab_size: int = 768
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    batch_size: int = 16


@dataclass(frozen=True)
class Lesson:
    """Conversations to imitate, for how many steps and in how large ones."""

    transcripts: Sequence[Transcript]
    steps: int
    learning_rate: float = 4e-3


def make_tiny_agent(lessons: Sequence[Lesson], recipe: Recipe | None = None, cache: Path = CACHE) -> Path:
    """Make a tiny agent that behaves like the transcripts of its last lesson, or find the one made earlier.

    A model this small does not find out how to follow a conversation from careless play alone. So a first lesson
    shows good play, from which it learns to look at the right words, and a second one spoils the choices.

    Args:
        lessons: What it learns, one lesson after the other.
        recipe: Its size, and how it learns.
        cache: Folder of finished agents. An agent's name in it is a hash of everything that made it, so a
            change of anything makes a new one.

    Returns:
        A folder with model and tokenizer, to be loaded like any pretrained model.
    """
    recipe = recipe or Recipe()
    folder = cache / _fingerprint(lessons, recipe)
    if folder.exists():
        return folder

    transcripts = [transcript for lesson in lessons for transcript in lesson.transcripts]
    tokenizer = make_tokenizer(_render(transcripts), recipe.vocab_size)
    model = _new_model(tokenizer, recipe)
    for number, lesson in enumerate(lessons):
        examples = _encode(tokenizer, lesson.transcripts)
        title = f"lesson {number + 1} of {len(lessons)}"
        _fit(model, examples, lesson, recipe, random.Random(recipe.seed + number), title)

    # Written beside its place and moved there whole, so that an interrupted run leaves no half an agent.
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=cache))
    transformers.logging.disable_progress_bar()
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was quicker; its agent is the same
        shutil.rmtree(unfinished)
    return folder


def _fingerprint(lessons: Sequence[Lesson], recipe: Recipe) -> str:
    here = Path(__file__).parent
    made_from = {
        "lessons": lessons,
        "recipe": recipe,
        "sources": [(here / name).read_text() for name in ("warm_start.py", "tokenizer.py", "template.jinja")],
        "versions": [torch.__version__, transformers.__version__],
    }
    return hashlib.blake2b(json.dumps(made_from, default=vars).encode(), digest_size=8).hexdigest()


def _render(transcripts: Sequence[Transcript]) -> list[str]:
    return [
        render_jinja_template([transcript.messages], tools=transcript.tools, chat_template=CHAT_TEMPLATE)[0][0]
        for transcript in transcripts
    ]


def _new_model(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,  # larger than usual: a model this small learns to copy sooner that way
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def _encode(tokenizer: PreTrainedTokenizerBase, transcripts: Sequence[Transcript]) -> list[tuple[list[int], list[int]]]:
    """Turn each transcript into ids and labels; only what the assistant wrote has labels."""
    examples = []
    for transcript in transcripts:
        encoded = tokenizer.apply_chat_template(
            transcript.messages,
            tools=transcript.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, written = encoded["input_ids"], encoded["assistant_masks"]
        examples.append((ids, [token if own else IGNORED for token, own in zip(ids, written, strict=True)]))
    return examples


def _fit(
    model: Qwen3ForCausalLM,
    examples: list[tuple[list[int], list[int]]],
    lesson: Lesson,
    recipe: Recipe,
    order: random.Random,
    title: str,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lesson.learning_rate, total_steps=lesson.steps, pct_start=0.1
    )
    model.train()
    for _ in track(range(lesson.steps), title, console=Console(stderr=True)):
        batch = order.choices(examples, k=recipe.batch_size)
        loss = model(
            input_ids=_padded([ids for ids, _ in batch], model.config.pad_token_id),
            labels=_padded([labels for _, labels in batch], IGNORED),
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    # Padding stands on the right, where a causal model cannot see it from any real token.
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
