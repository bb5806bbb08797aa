"""What playing ahead saves: the demo's agent with slow tools, trained in step and asynchronously.

Each side trains the same agent on the same games for the same number of optimizer steps, in a process of its own, one
after the other: `GRPOTrainer`, and `AsyncGRPOTrainer` with several values of `max_staleness`. Every guess takes
`--tool-ms` more. The generator and the optimizer have one thread each (OMP_NUM_THREADS=1), on all sides.

Printed for each side: optimizer steps a minute, and how many times those of the trainer that is not asynchronous; the
share of the time that the trainer waited for rollouts; the mean staleness of tokens; the mean reward in fifths of the
run. Times are those after the first step, which compiles and allocates. `--seeds` runs all sides again.

    OMP_NUM_THREADS=1 python benchmarks/async_vs_sync.py [--steps 40] [--tool-ms 200] [--staleness 0 1 4] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from time_to_reward import make_agent

SYNC = "sync"
COLUMNS = "{:>6} {:>10} {:>11} {:>8} {:>7} {:>10}   {}"


def slow_game(milliseconds: float) -> type:
    """The demo's environment, whose every guess takes longer."""
    from guess_number import GuessNumber

    class SlowGame(GuessNumber):
        @functools.wraps(GuessNumber.guess)
        def guess(self, number: int) -> str:
            time.sleep(milliseconds / 1000)
            return super().guess(number)

    return SlowGame


def train(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; side is "sync" or a staleness."""
    from transformers import TrainerCallback

    from agentrl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows, group = (8, 4) if options.quick else (96, 8)
    config, ahead = (GRPOConfig, {}) if side == SYNC else (AsyncGRPOConfig, {"max_staleness": int(side)})
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = (GRPOTrainer if side == SYNC else AsyncGRPOTrainer)(
            model=str(options.agent),
            args=config(
                folder,
                max_steps=options.steps,
                learning_rate=5e-4,
                lr_scheduler_type="linear",
                per_device_train_batch_size=rows,
                num_generations=group,
                max_completion_length=200,
                seed=options.seed,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **ahead,
            ),
            environment_factory=slow_game(options.tool_ms),
            callbacks=[Clock()],
        )
        waits: list[float] = []
        rollouts: list[list[tuple[int, float]]] = []  # each a list of turns: sampled tokens, seconds of its tools
        wait = trainer.collector.engine.wait

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            trajectories = wait(*args)
            waits.append(time.perf_counter() - began)
            rollouts.extend(
                [(turn.stop - turn.start, max((r.seconds for r in turn.results), default=0.0)) for turn in t.turns]
                for t in trajectories
            )
            return trajectories

        trainer.collector.engine.wait = timed
        trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    seconds = ends[-1] - ends[0]
    return {
        "steps_a_minute": 60 * (len(ends) - 1) / seconds,
        "waiting": sum(waits[1:]) / seconds,
        "staleness": fmean([log.get("async/staleness/mean", 0.0) for log in logs]),
        "rewards": [log["reward"] for log in logs],
        "rows": rows,
        "rollouts": rollouts,
        "train_seconds": (seconds - sum(waits[1:])) / (len(ends) - 1),
    }


def measure(side: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a side in a process of its own."""
    arguments = {"--side": side, "--seed": seed, "--agent": options.agent, "--steps": options.steps}
    arguments["--tool-ms"] = options.tool_ms
    flat = [str(part) for pair in arguments.items() for part in pair] + (["--quick"] if options.quick else [])
    command = [sys.executable, "-W", "ignore", __file__, *flat]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def curve(rewards: list[float]) -> str:
    """The mean reward of each fifth of a run."""
    size = max(1, len(rewards) // 5)
    return " ".join(f"{fmean(rewards[start : start + size]):.2f}" for start in range(0, len(rewards), size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tool-ms", type=float, default=200.0)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="a tiny agent and few games, to see that it runs")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(train(options.side, options)))
        return
    options.agent = make_agent(options.quick)
    print(
        COLUMNS.format(
            "seed", "staleness", "steps/min", "x sync", "waits", "mean stale", "reward, by fifths of the run"
        )
    )
    for seed in options.seeds:
        base = 0.0
        for side in [SYNC, *map(str, options.staleness)]:
            result = measure(side, seed, options)
            base = base or result["steps_a_minute"]
            print(
                COLUMNS.format(
                    seed,
                    side,
                    f"{result['steps_a_minute']:.1f}",
                    f"{result['steps_a_minute'] / base:.2f}",
                    f"{result['waiting']:.0%}",
                    f"{result['staleness']:.2f}",
                    curve(result["rewards"]),
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
