"""What the demo and other examples show on the terminal: progress, conversations, rewards and their curve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import Trainer, TrainerCallback

from agentrl.types import Trajectory

console = Console(highlight=False, soft_wrap=True)


class LiveProgress(TrainerCallback):
    """Shows how training goes: a bar on a terminal, now and then a line anywhere else."""

    def __init__(self):
        self.rewards = []
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps   reward {task.fields[reward]} (mean of 5 steps)"),
            TimeRemainingColumn(),
            console=console,
        )

    def on_train_begin(self, args, state, control, **kwargs):
        self._started = time.perf_counter()
        self._task = self._bar.add_task("training", total=state.max_steps, reward="-")
        if console.is_terminal:
            self._bar.start()

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" not in logs:  # the summary at the end of training
            return
        self.rewards.append(logs["reward"])
        recent = mean(self.rewards[-5:])
        self._bar.update(self._task, completed=state.global_step, reward=f"{recent:.2f}")
        every = max(1, state.max_steps // 10)
        if not console.is_terminal and state.global_step % every == 0:
            seconds = time.perf_counter() - self._started
            console.print(
                f"  step {state.global_step:3} of {state.max_steps}   reward {recent:.2f} (mean of 5)  {seconds:4.0f} s"
            )

    def on_train_end(self, args, state, control, **kwargs):
        if console.is_terminal:
            self._bar.stop()


def show_episodes(title: str, episodes: Sequence[Trajectory]) -> None:
    """Print whole conversations, one line a message."""
    console.print(f"\n[bold]{title}[/bold]")
    for number, episode in enumerate(episodes, start=1):
        console.print(f"\n  Game {number}, reward {episode.reward:g}")
        for message in [*episode.prompt, *episode.completion]:
            speaker = {"user": "task", "assistant": "agent", "tool": "answer"}[message["role"]]
            console.print(f"    {speaker:>6}  {_as_text(message)}", markup=False)


def draw_curve(values: Sequence[float], width: int = 60, height: int = 10) -> str:
    """Draw values between 0 and 1 as columns of blocks; neighbours share a column when there are many."""
    columns = []
    for column in range(min(width, len(values))):
        start = column * len(values) // min(width, len(values))
        stop = (column + 1) * len(values) // min(width, len(values))
        columns.append(mean(values[start:stop]))
    blocks = " ▁▂▃▄▅▆▇█"
    lines = []
    for row in reversed(range(height)):
        filled = [min(max(value * height - row, 0), 1) for value in columns]
        label = {height - 1: "1.0", height // 2 - 1: "0.5", 0: "0.0"}.get(row, "")
        lines.append(f"{label:>5} │" + "".join(blocks[round(8 * part)] for part in filled))
    lines.append(f"{'':>5} └" + "─" * len(columns))
    lines.append(f"{'':>7}step 1{f'step {len(values)}':>{max(len(columns) - 6, 8)}}")
    return "\n".join(lines)


def save_curve(values: Sequence[float], path: Path, title: str) -> bool:
    """Save the curve as an image; returns False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    smooth = [mean(values[max(0, step - 4) : step + 1]) for step in range(len(values))]
    steps = range(1, len(values) + 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    axes.plot(steps, values, color="tab:blue", alpha=0.35, label="each step")
    axes.plot(steps, smooth, color="tab:blue", label="mean of 5 steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    return True


def print_rewards(trainer: Trainer) -> None:
    """Print what the reward was when a training began, and when it ended."""
    rewards = [logs["reward"] for logs in trainer.state.log_history if "reward" in logs]
    first, last = first_and_last_tenth(rewards)
    print(f"Reward: {first:.2f} in the first tenth of the steps, {last:.2f} in the last.")


def first_and_last_tenth(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean reward of the first and of the last tenth of the steps, of one step each when there are few."""
    tenth = max(1, len(rewards) // 10)
    return mean(rewards[:tenth]), mean(rewards[-tenth:])


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def _as_text(message: dict) -> str:
    text = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls", []):
        arguments = ", ".join(f"{name}={value!r}" for name, value in call["function"]["arguments"].items())
        text.append(f"{call['function']['name']}({arguments})")
    return " ".join(text)
