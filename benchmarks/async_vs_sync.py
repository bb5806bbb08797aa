"""What playing ahead saves: the demo's agent with tools that wait, trained in step and asynchronously.

All sides train the same agent on the same games for the same number of optimizer steps, one after the other:
`GRPOTrainer`, and `AsyncGRPOTrainer` with several values of `max_staleness`. A guess is answered after `--tools`
seconds: at least the first number, at most the second, the third is the mean of what is added to the first
(exponential, so with a long tail).

With `--split` the resources are those of a real split, for every side: the thread that trains has one core, all others
(the generator's, the engine's) have another one. What one side does not use nobody else uses.

Printed for each side:

- optimizer steps a minute, and how many times those of `GRPOTrainer`;
- idle: the share of the time that the trainer waited for rollouts;
- train: seconds of the rest of a step; cpu: processor seconds of a step, of all threads;
- the mean staleness of tokens;
- to: seconds until the mean reward of five steps in a row has reached `--wanted`;
- the mean reward by fifths of the run.

Times are those after the first five steps: one compiles and allocates, and with a staleness of 4 all five windows begin
together, so that a wait comes once in five steps.

    OMP_NUM_THREADS=1 python benchmarks/async_vs_sync.py [--split] [--tools 0.5 2 0.3] [--steps 45] [--sides sync 0 1 4]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import random
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from time_to_reward import make_agent
from transformers import PrinterCallback, TrainerCallback

SYNC = "sync"
WARM = 5
"""Steps before times count: `max_staleness` + 1, of the largest here."""
OVER = 5
"""Steps that the reward is averaged over before it counts as reached."""
COLUMNS = "{:>4} {:>9} {:>9} {:>6} {:>5} {:>7} {:>7} {:>6} {:>7}   {}"


@dataclass(frozen=True)
class Setting:
    """Attributes: the agent's folder, rows of a step, members of a group, steps, learning rate, tools, split cores."""

    agent: Path
    rows: int = 96
    group: int = 8
    steps: int = 45
    learning_rate: float = 5e-4
    tools: tuple[float, float, float] = (0.5, 2.0, 0.3)
    split: bool = False


@dataclass(frozen=True)
class Run:
    """What was measured of a side.

    Attributes:
        ends: When each step ended, in seconds after the beginning.
        waits: Seconds that the trainer waited in each step.
        cpu: Processor seconds of this process at the same moments.
        rewards: The mean reward of each step.
        staleness: Of tokens, on average.
        rollouts: Each a list of turns: sampled tokens, seconds of the tools after it.
        turn_seconds: Mean time that a turn was being sampled.
        other_seconds: Mean of what else a turn took: parsing, rendering, the journal.
    """

    ends: list[float]
    waits: list[float]
    cpu: list[float]
    rewards: list[float]
    staleness: float
    rollouts: list[list[tuple[float, float]]]
    turn_seconds: float
    other_seconds: float

    @property
    def timed(self) -> int:
        """Steps whose times count."""
        return len(self.ends) - min(WARM, len(self.ends) - 1)

    @property
    def seconds(self) -> float:
        """Of these steps."""
        return self.ends[-1] - self.ends[-1 - self.timed]

    @property
    def steps_a_minute(self) -> float:
        return 60 * self.timed / self.seconds

    @property
    def idle(self) -> float:
        return sum(self.waits[-self.timed :]) / self.seconds

    @property
    def train_seconds(self) -> float:
        """What a step takes without waiting."""
        return self.seconds * (1 - self.idle) / self.timed

    @property
    def cpu_seconds(self) -> float:
        """What the processor works for a step, in all threads."""
        return (self.cpu[-1] - self.cpu[-1 - self.timed]) / self.timed

    def seconds_to(self, wanted: float) -> float | None:
        """When the reward was reached, if it was."""
        for last in range(OVER - 1, len(self.rewards)):
            if fmean(self.rewards[last - OVER + 1 : last + 1]) >= wanted:
                return self.ends[last]
        return None


def waiting_game(tools: tuple[float, float, float], episodes: list[float]) -> type:
    """The demo's environment, whose every guess is answered after a while; notes how long each episode took."""
    from guess_number import GuessNumber

    least, most, more = tools
    draw = random.Random(0)

    class WaitingGame(GuessNumber):
        def reset(self, **columns: Any) -> str:
            self._began = time.perf_counter()
            return super().reset(**columns)

        def get_reward(self) -> float:
            episodes.append(time.perf_counter() - self._began)
            return super().get_reward()

        @functools.wraps(GuessNumber.guess)
        async def guess(self, number: int) -> str:
            await asyncio.sleep(min(most, least + draw.expovariate(1 / more)) if most else 0)
            return super().guess(number)

    return WaitingGame


class Clock(TrainerCallback):
    """Notes the ends of steps; gives the thread that trains and all others a core each."""

    def __init__(self, split: bool) -> None:
        self.began = time.perf_counter()
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self._cores = sorted(os.sched_getaffinity(0))[:2] if split else []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter() - self.began)
        self.cpu.append(time.process_time())
        for thread in threading.enumerate() if self._cores else ():
            core = self._cores[0 if thread is threading.main_thread() else -1]
            os.sched_setaffinity(thread.native_id or 0, {core})


def measure(side: str, seed: int, setting: Setting) -> Run:
    """Train; side is "sync" or a staleness."""
    from agentrl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer

    episodes: list[float] = []
    cores, clock = os.sched_getaffinity(0), Clock(setting.split)
    config, ahead = (GRPOConfig, {}) if side == SYNC else (AsyncGRPOConfig, {"max_staleness": int(side)})
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = (GRPOTrainer if side == SYNC else AsyncGRPOTrainer)(
            model=str(setting.agent),
            args=config(
                folder,
                max_steps=setting.steps,
                learning_rate=setting.learning_rate,
                lr_scheduler_type="linear",
                per_device_train_batch_size=setting.rows,
                num_generations=setting.group,
                max_completion_length=200,
                seed=seed,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **ahead,
            ),
            environment_factory=waiting_game(setting.tools, episodes),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        waits: list[float] = []
        rollouts: list[list[tuple[float, float]]] = []
        sampling: list[float] = []
        wait = trainer.collector.engine.wait

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            trajectories = wait(*args)
            waits.append(time.perf_counter() - began)
            sampling.extend(turn.seconds for t in trajectories for turn in t.turns)
            rollouts.extend(
                [(turn.stop - turn.start, max((r.seconds for r in turn.results), default=0.0)) for turn in t.turns]
                for t in trajectories
            )
            return trajectories

        trainer.collector.engine.wait = timed
        try:
            trainer.train()
        finally:
            os.sched_setaffinity(0, cores)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    tools = sum(seconds for turns in rollouts for _, seconds in turns)
    other = fmean(episodes) * len(rollouts) - sum(sampling) - tools  # some episodes are never trained on
    return Run(
        ends=clock.ends,
        waits=waits,
        cpu=clock.cpu,
        rewards=[log["reward"] for log in logs],
        staleness=fmean([log.get("async/staleness/mean", 0.0) for log in logs]),
        rollouts=rollouts,
        turn_seconds=fmean(sampling),
        other_seconds=max(0.0, other / len(sampling)),
    )


def curve(rewards: list[float]) -> str:
    """The mean reward of each fifth of a run."""
    size = max(1, len(rewards) // 5)
    return " ".join(f"{fmean(rewards[start : start + size]):.2f}" for start in range(0, len(rewards), size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--tools", type=float, nargs=3, default=[0.5, 2.0, 0.3], metavar=("LEAST", "MOST", "MORE"))
    parser.add_argument("--split", action="store_true", help="a core for the trainer and one for all else")
    parser.add_argument("--sides", nargs="+", default=[SYNC, "0", "1", "4"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--wanted", type=float, default=0.75)
    parser.add_argument("--quick", action="store_true", help="a tiny agent and few games, to see that it runs")
    options = parser.parse_args()
    setting = Setting(
        make_agent(options.quick),
        *((8, 4) if options.quick else (96, 8)),
        steps=options.steps,
        tools=tuple(options.tools),
        split=options.split,
    )
    heads = ("seed", "staleness", "steps/min", "x sync", "idle", "train", "cpu", "stale", f"to {options.wanted:g}")
    print(COLUMNS.format(*heads, "reward, by fifths of the run"))
    for seed in options.seeds:
        base = 0.0
        for side in options.sides:
            run = measure(side, seed, setting)
            base = base or run.steps_a_minute
            reached = run.seconds_to(options.wanted)
            cells = (
                seed,
                side,
                f"{run.steps_a_minute:.1f}",
                f"{run.steps_a_minute / base:.2f}",
                f"{run.idle:.0%}",
                f"{run.train_seconds:.2f} s",
                f"{run.cpu_seconds:.2f} s",
                f"{run.staleness:.2f}",
                "-" if reached is None else f"{reached:.0f} s",
            )
            print(COLUMNS.format(*cells, curve(run.rewards)), flush=True)


if __name__ == "__main__":
    main()
