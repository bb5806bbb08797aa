"""How a run goes, while it goes: a few figures, and warnings that say what to do.

Warnings are pure functions of the logged metrics. `LiveStatus` is a callback that shows both: on a terminal they are
redrawn in place, anywhere else there is a line for each log. At the end there is a summary with a plot of the reward.

    trainer.add_callback(LiveStatus())
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

Log = Mapping[str, float]

RECENT = 5
"""Logs that a judgement is based on."""
PLOT_WIDTH = 60
_BLOCKS = " ▁▂▃▄▅▆▇█"

FIGURES = {
    "reward": "reward",
    "reward_std": "std",
    "completions/mean_length": "tokens",
    "completions/mean_turns": "turns",
    "completions/clipped_ratio": "cut",
    "tools/failure_frequency": "tool failures",
    "entropy": "entropy",
    "sampling/sampling_logp_difference/max": "logp difference",
    "step_time": "s a step",
}
"""The metrics that are shown, with what they are called."""


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that goes wrong, and what to do about it."""

    metric: str
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.seen}: {self.advice}"


def warnings_of(logs: Sequence[Log]) -> list[Warned]:
    """What the training logs of a run give reason to warn of.

    Args:
        logs: All so far, in order; missing metrics count for nothing.
    """
    rules = (_flat, _tool_failures, _slow_tool, _cut, _off_policy, _collapse, _failing)
    return [warned for rule in rules if (warned := rule(logs)) is not None]


def _flat(logs: Sequence[Log]) -> Warned | None:
    name = "frac_reward_zero_std"
    share = _recent(logs, name)
    if share is None or share < 0.75:
        return None
    reward = _recent(logs, "reward") or 0.0
    return Warned(
        name,
        f"all rewards are equal in {share:.0%} of the groups (mean {reward:.2f}), which teaches nothing",
        "take tasks of other difficulty, raise num_generations, reward parts of the way, or set "
        "dynamic_sampling_max_rounds",
    )


def _tool_failures(logs: Sequence[Log]) -> Warned | None:
    name = "tools/failure_frequency"
    now, then = _recent(logs, name), _first(logs, name)
    if now is None or then is None or now < 0.2 or now < then + 0.1:
        return None
    return Warned(
        name,
        f"{now:.0%} of the tool calls fail, {then:.0%} did at first",
        "read the answers (agentrl view); a tool that breaks under load wants max_concurrency or a longer timeout",
    )


def _slow_tool(logs: Sequence[Log]) -> Warned | None:
    beginning = "tools/time_share/"
    names = {name for log in logs[-RECENT:] for name in log if name.startswith(beginning)}
    shares = {name: _recent(logs, name) or 0.0 for name in names}
    name = max(shares, key=shares.__getitem__, default=None)
    if name is None or shares[name] < 0.5:
        return None
    return Warned(
        name,
        f"{shares[name]:.0%} of the time of rollouts is spent in the tool {name.removeprefix(beginning)}",
        "make it faster, let it answer earlier (@tool(timeout=...)), raise its max_concurrency if it has one, or train "
        "meanwhile (AsyncGRPOTrainer)",
    )


def _cut(logs: Sequence[Log]) -> Warned | None:
    name = "completions/clipped_ratio"
    share = _recent(logs, name)
    if share is None or share < 0.3:
        return None
    return Warned(
        name,
        f"{share:.0%} of the rollouts are cut before they end",
        "raise max_completion_length (it counts tool results), shorten what tools answer, or set "
        "mask_truncated_completions",
    )


def _off_policy(logs: Sequence[Log]) -> Warned | None:
    name = "sampling/importance_sampling_ratio/mean"
    ratio = _recent(logs, name)
    if ratio is None or abs(ratio - 1) < 0.1:
        return None
    return Warned(
        name,
        f"sampler and trainer disagree: their ratio is {ratio:.2f} on average",
        "look at sampling/sampling_logp_difference, and at docs/exactness.md: usually precision or other weights",
    )


def _collapse(logs: Sequence[Log]) -> Warned | None:
    name = "entropy"
    now, then = _recent(logs, name), _first(logs, name)
    if now is None or not then or now > 0.1 * then:
        return None
    return Warned(
        name,
        f"entropy fell from {then:.3f} to {now:.3f}: the policy hardly tries anything else",
        "lower learning_rate, raise epsilon_high or temperature, or set entropy_coef",
    )


def _failing(logs: Sequence[Log]) -> Warned | None:
    name = "outcomes/env_failure"
    share = _recent(logs, name)
    if share is None or share < 0.05:
        return None
    return Warned(
        name,
        f"{share:.0%} of the rollouts are lost to environments that fail",
        "their errors are in the log and in the journal; more retries only hide them",
    )


def _recent(logs: Sequence[Log], name: str) -> float | None:
    """The mean of a metric over the last logs that have it."""
    values = [log[name] for log in logs if name in log][-RECENT:]
    return sum(values) / len(values) if values else None


def _first(logs: Sequence[Log], name: str) -> float | None:
    """The mean over the first ones, None where these are the last ones too."""
    values = [log[name] for log in logs if name in log]
    return sum(values[:RECENT]) / RECENT if len(values) >= 2 * RECENT else None


def plot(values: Sequence[float], width: int = PLOT_WIDTH) -> str:
    """Draw values as one line of blocks, from the smallest to the largest; many of them are averaged.

    Example:
        >>> plot([0.0, 0.5, 1.0])
        '▁▄█'
    """
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, spread = min(means), max(means) - min(means)
    return "".join(_BLOCKS[1 + int((mean - low) / spread * 7)] if spread else _BLOCKS[4] for mean in means)


def summary(logs: Sequence[Log], seconds: float) -> str:
    """What came of a run: the reward's way, and what was warned of at the end."""
    rewards = [log["reward"] for log in logs if "reward" in log]
    if not rewards:
        return f"trained for {seconds:.0f} s; no rewards were logged"
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    lines = [
        f"reward {plot(rewards)}",
        f"{first:.3f} in the first tenth, {last:.3f} in the last; {len(rewards)} logs in {seconds:.0f} s",
    ]
    return "\n".join([*lines, *(f"! {warned}" for warned in warnings_of(logs))])


class LiveStatus(TrainerCallback):
    """Shows how training goes.

    Args:
        console: Where to; default: the terminal's standard error, so that standard output stays for results.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.logs: list[dict[str, float]] = []
        self._live: Live | None = None
        self._said: set[str] = set()
        self._began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to show."""
        self._began = time.perf_counter()
        if state.is_world_process_zero and self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=2, transient=True)
            self._live.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the newest figures."""
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        self.logs.append(dict(logs))
        warned = warnings_of(self.logs)
        if self._live is not None:
            self._live.update(self._screen(state, warned))
            return
        figures = [f"{title} {_short(logs[name])}" for name, title in FIGURES.items() if name in logs]
        self.console.print(f"step {state.global_step}/{state.max_steps}  {'  '.join(figures)}", soft_wrap=True)
        for warning in warned:
            if warning.metric not in self._said:  # once, where nothing is redrawn
                self._said.add(warning.metric)
                self.console.print(f"! {warning}", soft_wrap=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, and sum up."""
        if not state.is_world_process_zero:
            return
        if self._live is not None:
            self._live.stop()
            self._live = None
        self.console.print(summary(self.logs, time.perf_counter() - self._began), soft_wrap=True)

    def _screen(self, state: Any, warned: Sequence[Warned]) -> Group:
        table = Table.grid(padding=(0, 2))
        last = self.logs[-1]
        present = [name for name in FIGURES if name in last]
        table.add_row("step", *(FIGURES[name] for name in present), style="dim")
        table.add_row(f"{state.global_step}/{state.max_steps}", *(_short(last[name]) for name in present))
        curve = Text("reward " + plot([log["reward"] for log in self.logs]))
        return Group(table, curve, *(Text(f"! {warning}", style="yellow") for warning in warned))


def _short(value: float) -> str:
    return f"{value:.3g}"
