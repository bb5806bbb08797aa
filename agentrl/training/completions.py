"""The completions that `log_completions` shows: in the terminal, and in wandb, trackio and tensorboard if they report.

Model output is untrusted: it is shown as plain text, never as markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import Trainer
from transformers.integrations import TensorBoardCallback

from agentrl.chat.pictures import take_pictures
from agentrl.types import Message, Prompt, Trajectory


class Pictures(list[Any]):
    """The value of a cell that shows pictures."""


@dataclass(slots=True)
class CompletionLog:
    """The completions since the last log.

    Attributes:
        prompts: One readable prompt a row.
        completions: One readable completion a row.
        rewards: A column for each reward, None where it did not apply.
        advantages: One a row.
        extra: Columns that reward functions added with `log_extra`.
    """

    prompts: list[str] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def columns(self) -> dict[str, list[Any]]:
        """All columns by name; ragged ones are filled up with None."""
        table: dict[str, list[Any]] = {"prompt": self.prompts, "completion": self.completions}
        table |= {f"reward {name}": values for name, values in self.rewards.items()}
        table |= {"advantage": self.advantages, **self.extra}
        rows = len(self.prompts)
        return {name: (values + [None] * rows)[:rows] for name, values in table.items()}

    def add_column(self, name: str, values: Sequence[Any]) -> None:
        """Add values to an extra column: the `log_extra` that reward functions get."""
        self.extra.setdefault(name, []).extend(values)

    def extend(self, other: CompletionLog) -> None:
        """Add the rows of another log; extra columns that only one of them has are filled up with None."""
        rows = len(self.prompts)
        for name, values in other.extra.items():
            mine = self.extra.setdefault(name, [])
            self.extra[name] = (mine + [None] * rows)[:rows] + values
        for name, scores in other.rewards.items():
            self.rewards.setdefault(name, [None] * rows).extend(scores)
        self.prompts += other.prompts
        self.completions += other.completions
        self.advantages += other.advantages

    def clear(self) -> None:
        """Forget the rows."""
        self.prompts, self.completions, self.advantages = [], [], []
        self.rewards, self.extra = {}, {}


def select_rows(log: CompletionLog, *, limit: int | None, unique_prompts: bool) -> list[dict[str, Any]]:
    """Return the rows to show: the first of each prompt if asked, at most `limit`, in order."""
    columns = log.columns()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if unique_prompts:
        rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
    return rows[:limit]


def print_rows(rows: Sequence[dict[str, Any]], step: int, console: Console | None = None) -> None:
    """Print rows as a table."""
    if not rows:
        return
    table = Table(title=f"Completions at step {step}", show_lines=True, expand=True)
    for name in rows[0]:
        numeric = name == "advantage" or name.startswith("reward ")
        table.add_column(Text(name), justify="right" if numeric else "left", ratio=1 if numeric else 4)
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row.values()))
    (console or Console()).print(table)


def report_rows(rows: Sequence[dict[str, Any]], step: int, trainer: Trainer) -> None:
    """Send rows to those of wandb, trackio and tensorboard that a run reports to.

    wandb and trackio get a table. tensorboard has none: it gets a text, in which each row's prompt and completion are
    blocks of code, so that nothing in them is markup. Images are shown by wandb alone, the others tell their number.
    """
    if not rows:
        return
    columns: list[str | int] = ["step", *rows[0]]
    data = [[step, *map(cell, row.values())] for row in rows]
    reporters = trainer.args.report_to or []
    if "wandb" in reporters:
        import wandb

        if wandb.run is not None:
            seen = [
                [step, *([wandb.Image(p) for p in v] if isinstance(v, Pictures) else cell(v) for v in row.values())]
                for row in rows
            ]
            wandb.log({"completions": wandb.Table(columns=columns, data=seen)})
    if "trackio" in reporters:
        import pandas
        import trackio

        trackio.log({"completions": trackio.Table(dataframe=pandas.DataFrame(data, columns=columns))})
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_text("completions", as_markdown(rows), step)


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Write rows one under the other, values in blocks of code that nothing in them can end."""
    parts = []
    for number, row in enumerate(rows, start=1):
        texts = {name: value for name, value in row.items() if isinstance(value, str)}
        others = [f"{name}: {cell(value)}" for name, value in row.items() if name not in texts]
        parts += [f"### {number}", _code("\n".join(others))]
        parts += [part for name, text in texts.items() for part in (f"**{name}**", _code(text))]
    return "\n\n".join(parts)


def _code(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def pictures_of(trajectory: Trajectory) -> Pictures:
    """The pictures of an episode, in order."""
    if isinstance(trajectory.prompt, str) or isinstance(trajectory.completion, str):
        return Pictures()
    return Pictures(take_pictures([*trajectory.prompt, *trajectory.completion])[1])


def readable(prompt: Prompt) -> str:
    """Render text or messages for a person: one line a message, tool calls and results shown."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_readable_message(message) for message in prompt)


def _readable_message(message: Message) -> str:
    parts = [f"<think>{message['reasoning_content']}</think>"] if message.get("reasoning_content") else []
    parts += [_readable_content(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"{function.get('name')}({text})")
    return f"{message['role']}: {' '.join(parts)}"


def _readable_content(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(block.get("text", f"[{block.get('type', 'block')}]") for block in content)


def cell(value: Any) -> str:
    """Return a value as a person reads it."""
    if value is None:
        return ""
    if isinstance(value, Pictures):
        return f"{len(value)} images"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
