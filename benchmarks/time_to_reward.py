"""Seconds and optimizer steps until an agent earns a mean reward of 0.85, here and in TRL.

The demo (examples/demo.py): the same untrained agent plays the same games with the same hyperparameters on both sides,
in float32 on the CPU, until the mean reward of the last 5 steps is 0.85. The game of each group is a column of
the dataset. Each side runs in a process of its own, in turn, with the same seeds; tokens are sampled, so runs differ
between the sides. TRL does not know the end of an episode: its game answers in words where the demo's raises
`EpisodeDone`, takes no guess after that, and is left after as many rounds of calls as there are guesses.

    python benchmarks/time_to_reward.py [--seeds 0 1 2] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

WANTED = 0.85
OVER = 5
"""Steps that the mean reward is over."""
SIDES = ("agentrl", "trl")
MEASURES = ("steps", "wall", "cpu")


def make_agent(quick: bool) -> Path:
    """The demo's untrained agent; in quick mode one that has read next to nothing, which is made in a moment."""
    import tiny_agent.agents
    from guess_number import GuessNumber
    from tiny_agent import Lesson, Recipe, make_tiny_agent

    if quick:
        tiny_agent.agents.make_tiny_agent = lambda lessons: make_tiny_agent(
            [Lesson(lesson.transcripts[:20], steps=2) for lesson in lessons], Recipe(hidden_size=32, layers=1, heads=1)
        )
    return tiny_agent.agents.guessing_agent(GuessNumber)


def game_of(side: str) -> type:
    """The demo's environment, told by the dataset which number to hide."""
    from guess_number import GuessNumber

    from agentrl import EpisodeDone

    class Game(GuessNumber):
        def reset(self, game: int, **columns: Any) -> str:
            self._over = False
            return super().reset(seed=game)

    class GameWithoutEnd(Game):
        @functools.wraps(GuessNumber.guess)
        def guess(self, number: int) -> str:
            if self._over:
                return "the game is over"
            try:
                return super().guess(number)
            except EpisodeDone as end:
                self._over = True
                return str(end)

    return Game if side == "agentrl" else GameWithoutEnd


def train(side: str, agent: Path, seed: int, *, quick: bool) -> dict[str, Any]:
    """Train in this process and tell how long it took."""
    import datasets
    from guess_number import GuessNumber
    from transformers import AutoTokenizer, TrainerCallback

    if side == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from agentrl import GRPOConfig, GRPOTrainer

    rewards: list[float] = []
    times: dict[str, float] = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            times.update(wall=-time.perf_counter(), cpu=-time.process_time())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "reward" not in logs:
                return
            rewards.append(logs["reward"])
            control.should_training_stop = reached(rewards)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times["wall"] += time.perf_counter()
            times["cpu"] += time.process_time()

    rows, group, steps = (8, 4, 2) if quick else (96, 8, 80)
    # What TRL has to be told because it does not know the end of an episode.
    end = {"max_tool_calling_iterations": GuessNumber.budget} if side == "trl" else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = GRPOTrainer(
            model=str(agent),
            args=GRPOConfig(
                folder,
                max_steps=steps,
                learning_rate=5e-4,
                per_device_train_batch_size=rows,
                num_generations=group,
                max_completion_length=200,
                seed=seed,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **end,
            ),
            reward_funcs=None if side == "agentrl" else [],
            train_dataset=datasets.Dataset.from_dict(
                {
                    "prompt": [[{"role": "user", "content": ""}]] * (steps * rows // group),
                    "game": [1000 * seed + game for game in range(steps * rows // group)],
                }
            ),
            processing_class=AutoTokenizer.from_pretrained(agent),
            environment_factory=game_of(side),
            callbacks=[Watch()],
        )
        trainer.train()
    return {"steps": len(rewards), **times, "rewards": rewards, "reached": reached(rewards)}


def reached(rewards: list[float]) -> bool:
    """Whether the last steps earned enough."""
    return len(rewards) >= OVER and fmean(rewards[-OVER:]) >= WANTED


def measure(side: str, agent: Path, seed: int, *, quick: bool) -> dict[str, Any]:
    """Run a side in a process of its own."""
    options = ["--side", side, "--agent", str(agent), "--seeds", str(seed), *(["--quick"] if quick else [])]
    command = [sys.executable, "-W", "ignore", __file__, *options]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run of each side for each")
    parser.add_argument("--quick", action="store_true", help="two small steps, to see that all runs")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        warnings.simplefilter("ignore")
        print(json.dumps(train(options.side, options.agent, options.seeds[0], quick=options.quick)))
        return 0
    agent = make_agent(options.quick)
    print(f"{'seed':4} {'side':8}{'steps':>7}{'wall':>9}{'CPU':>9}{'last reward':>13}")
    sums = {side: dict.fromkeys(MEASURES, 0.0) for side in SIDES}
    for seed in options.seeds:
        for side in SIDES:
            run = measure(side, agent, seed, quick=options.quick)
            last = fmean(run["rewards"][-OVER:])
            note = "" if run["reached"] else f"   {WANTED} NOT REACHED"
            print(
                f"{seed:4} {side:8}{run['steps']:7}{run['wall']:7.1f} s{run['cpu']:7.1f} s{last:13.2f}{note}",
                flush=True,
            )
            for name in MEASURES:
                sums[side][name] += run[name]
    ratios = (sums["agentrl"][name] / sums["trl"][name] for name in MEASURES)
    print(
        f"{'agentrl / TRL':13}" + "".join(f"{ratio:{width}.2f}" for ratio, width in zip(ratios, (7, 9, 9), strict=True))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
