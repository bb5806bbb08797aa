"""Where a layout of trainers and generators saturates: measured distributions in, utilisation out.

A discrete-event simulation of what `docs/async.md` describes. Rollouts alternate between turns, which share a
generator replica with others (a decode step takes `step_base + step_per_row * rows`, every row gets one token of it),
and tools, which take what they take. A window is trained on when all its rollouts have ended; a window starts when the
weights are at most `staleness` steps older than those that will train on it.

- `--check` trains the demo's agent on this machine with tools that wait (`async_vs_sync.py`), in step and ahead, and
  prints optimizer steps a minute beside simulated ones. These are told how long turns, tools and training took:
  "predicted" in the run in step, "own times" in the very run that they stand beside. The second shows whether the
  simulation puts the parts together right, also on a machine whose speed changes; exit code 1 if one of them is further
  off than `--limit`.
- Without it, a model of 70B on up to 1,024 GPUs is simulated. Its figures are assumptions, written in `GPU_PROFILE`,
  not measurements: no GPU was at hand. Replace them by your own (`--profile FILE`, JSON with the fields of `Profile`).

    OMP_NUM_THREADS=1 python benchmarks/scale_sim.py --check [--games 32] [--steps 25] [--limit 1.2]
    python benchmarks/scale_sim.py [--profile FILE] [--gpus 16 64 256 1024] [--rows 2048]
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

CHECKED = "{:>9} {:>10} {:>10} {:>6} {:>10} {:>6}   {}"
TURN_OVERHEAD = 1
"""Decode steps' worth of time for prefilling what is new in a turn."""


@dataclass(frozen=True)
class Profile:
    """What was measured of one generator replica and one trainer.

    Attributes:
        rollouts: Rollouts as they were seen; each a list of turns, (tokens, seconds of the tools after it).
        step_base: Seconds of a decode step, however many rows.
        step_per_row: Seconds more for each row.
        most_rows: Rows that a replica decodes at once; further ones wait.
        train_row: Seconds of one trainer for each row of a window.
        train_base: Seconds of an optimizer step that do not depend on rows or trainers.
        sync: Seconds to hand the weights over.
        replica_gpus: GPUs of a generator replica.
    """

    rollouts: list[list[tuple[float, float]]]
    step_base: float
    step_per_row: float
    train_row: float
    most_rows: int = 256
    train_base: float = 0.0
    sync: float = 0.0
    replica_gpus: int = 1


@dataclass(frozen=True)
class Layout:
    """Attributes: replicas of the generator, trainers, rows of a window, staleness; `shared`: both on the same GPUs."""

    replicas: int
    trainers: int
    rows: int
    staleness: int
    shared: bool = False


@dataclass(frozen=True)
class Result:
    """What a layout makes of a profile.

    Attributes:
        steps_a_minute: Optimizer steps.
        trainer_busy: Share of the time that trainers were at work.
        generator_busy: The same of replicas.
        turn_seconds: Mean time from asking for a turn to having it.
    """

    steps_a_minute: float
    trainer_busy: float
    generator_busy: float
    turn_seconds: float


@dataclass(eq=False)
class Rollout:
    window: int
    turns: list[tuple[float, float]]
    replica: Replica
    asked: float
    turn: int = 0


@dataclass(eq=False)
class Replica:
    """Shares its decode steps among its rows; `steps` is how many it has made, and the clock of its rows."""

    profile: Profile
    steps: float = 0.0
    now: float = 0.0
    busy: float = 0.0
    load: int = 0
    changes: int = 0
    running: list[tuple[float, int, Rollout]] = field(default_factory=list)
    waiting: list[Rollout] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return self.profile.step_base + self.profile.step_per_row * len(self.running)

    def advance(self, now: float) -> None:
        if self.running:
            self.steps += (now - self.now) / self.step_seconds
            self.busy += now - self.now
        self.now = now

    def admit(self, order: Any) -> None:
        while self.waiting and len(self.running) < self.profile.most_rows:
            rollout = self.waiting.pop(0)
            end = self.steps + rollout.turns[rollout.turn][0] + TURN_OVERHEAD
            heapq.heappush(self.running, (end, next(order), rollout))
        self.changes += 1

    @property
    def next_end(self) -> float:
        return self.now + (self.running[0][0] - self.steps) * self.step_seconds if self.running else math.inf


def simulate(profile: Profile, layout: Layout, *, windows: int = 15, warm: int = 5, seed: int = 0) -> Result:
    """Play and train so many windows; the first ones, until it runs evenly, are left out of the figures."""
    draw, order = random.Random(seed), count()
    replicas = [Replica(profile) for _ in range(layout.replicas)]
    events: list[tuple[float, int, Any, int]] = []
    left: dict[int, int] = {}
    version = started = 0
    training, trained_seconds = False, 0.0
    turns, turn_seconds = 0, 0.0
    train_seconds = profile.train_base + profile.train_row * layout.rows / layout.trainers + profile.sync
    marks: list[tuple[float, float, float]] = []  # at each end of a step: time, trainer's and generators' busy seconds

    def push(time_: float, what: Any, stamp: int = 0) -> None:
        heapq.heappush(events, (time_, next(order), what, stamp))

    def changed(replica: Replica) -> None:
        replica.admit(order)
        push(replica.next_end, replica, replica.changes)

    def start_windows(now: float) -> None:
        nonlocal started
        while started < windows and started - version <= layout.staleness:
            left[started] = layout.rows
            for _ in range(layout.rows):
                replica = min(replicas, key=lambda r: r.load) if len(replicas) > 1 else replicas[0]
                replica.load += 1
                replica.waiting.append(Rollout(started, draw.choice(profile.rollouts), replica, now))
            started += 1
        for replica in replicas:
            replica.advance(now)
            changed(replica)

    start_windows(0.0)
    while version < windows:
        now, _, what, stamp = heapq.heappop(events)
        if what == "trained":
            version, training = version + 1, False
            trained_seconds += train_seconds
            marks.append((now, trained_seconds, sum(r.busy for r in replicas) / len(replicas)))
            start_windows(now)
        elif isinstance(what, Rollout):  # its tools have answered
            what.asked = now
            what.replica.advance(now)
            what.replica.waiting.append(what)
            changed(what.replica)
        elif what.changes == stamp and math.isfinite(now):
            what.advance(now)
            rollout = heapq.heappop(what.running)[2]
            turns, turn_seconds = turns + 1, turn_seconds + now - rollout.asked
            tools = rollout.turns[rollout.turn][1]
            rollout.turn += 1
            if rollout.turn < len(rollout.turns):
                push(now + tools, rollout)
            else:
                what.load -= 1
                left[rollout.window] -= 1
            changed(what)
        if not training and left.get(version) == 0:
            training = True
            push(now + train_seconds, "trained")
    first, last = marks[warm - 1], marks[-1]
    seconds = last[0] - first[0]
    busy = (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds
    return Result(60 * (windows - warm) / seconds, *busy, turn_seconds / turns)


def drawn_rollouts(count_: int = 4000) -> list[list[tuple[float, float]]]:
    """Rollouts of an agent: 1 to 30 turns (8 on average), 300 tokens each, tools of 2 s (median) with a long tail."""
    draw = random.Random(0)

    def one() -> list[tuple[float, float]]:
        turns = min(30, 1 + int(draw.expovariate(1 / 7)))
        return [
            (draw.lognormvariate(math.log(220), 0.8), min(120.0, draw.lognormvariate(math.log(2), 1.2)))
            for _ in range(turns)
        ]

    return [one() for _ in range(count_)]


GPU_PROFILE = {
    "step_base": 0.022,  # weights in 16 bits read once by 8 GPUs of 3.35 TB/s, at two thirds of that, and launches
    "step_per_row": 0.00012,  # keys and values of a row of 6,000 tokens, and the products
    "most_rows": 512,
    "replica_gpus": 8,
    "train_row": 6.5,  # 6,000 tokens x 6 x 70e9 operations at 400 TFLOP/s
    "train_base": 2.0,
    "sync": 5.0,
}
"""Assumptions about a 70B model on GPUs of the H100's size: a replica is 8 GPUs; nothing of it was measured here."""


def table_of_gpus(profile: Profile, gpus: list[int], rows: int) -> None:
    """Layouts by number of GPUs: in turn on the same GPUs, and split in halves at several values of staleness."""
    print(f"{rows} rows a step; steps/h, and the shares of time that trainers / generators work")
    print(
        "{:>6}  {:>22}  {:>22}  {:>22}  {:>22}".format(
            "GPUs", "shared, in turn", *(f"split, staleness {s}" for s in (0, 1, 4))
        )
    )
    for number in gpus:
        replicas, half = number // profile.replica_gpus, number // 2 // profile.replica_gpus
        layouts = [Layout(replicas, number, rows, 0, shared=True)]
        layouts += [Layout(max(half, 1), number // 2, rows, staleness) for staleness in (0, 1, 4)]
        cells = []
        for layout in layouts:
            result = simulate(profile, layout)
            cells.append(
                f"{60 * result.steps_a_minute:8.1f}  {result.trainer_busy:4.0%} / {result.generator_busy:4.0%}"
            )
        print(f"{number:>6}  " + "  ".join(f"{cell:>22}" for cell in cells), flush=True)


def check(options: argparse.Namespace) -> int:
    """Measure on this machine, simulate that, and print both; 1 if they are too far apart."""
    import async_vs_sync

    rows, group = (8, 4) if options.quick else (options.games, 8)
    # A policy that hardly learns plays alike from the first step to the last.
    setting = async_vs_sync.Setting(
        async_vs_sync.make_agent(options.quick), rows, group, options.steps, 1e-7, tuple(options.tools)
    )
    step = decode_steps(setting.agent, rows)
    real = {side: async_vs_sync.measure(side, 0, setting) for side in (async_vs_sync.SYNC, "1", "4")}
    print("seconds: of a decode step with all rows, of a turn, of what else a turn takes, of training on a window")
    print(CHECKED.format("staleness", "steps/min", "predicted", "ratio", "own times", "ratio", "seconds"))
    worst, first = 1.0, None
    for side, run in real.items():
        layout = Layout(1, 1, rows, 0 if side == async_vs_sync.SYNC else int(side))
        length = {"windows": options.steps, "warm": options.steps - run.timed}
        own = fitted(run, step, layout, length)
        first = first or own
        steps = [simulate(profile, layout, **length).steps_a_minute for profile in (first, own)]
        ratios = [value / run.steps_a_minute for value in steps]
        worst = max(worst, ratios[1], 1 / ratios[1])
        decode = own.step_base + own.step_per_row * rows
        seconds = decode, run.turn_seconds, run.other_seconds, run.train_seconds
        cells = [text for pair in zip(steps, ratios, strict=True) for text in (f"{pair[0]:.1f}", f"{pair[1]:.2f}")]
        print(CHECKED.format(side, f"{run.steps_a_minute:.1f}", *cells, " ".join(f"{value:.3f}" for value in seconds)))
    return int(worst > options.limit)


def fitted(run: Any, step: tuple[float, float], layout: Layout, length: dict[str, int]) -> Profile:
    """The profile of a real run; the decode step is made as long as turns say that it was on this machine then."""
    rollouts = [[(tokens, tools + run.other_seconds) for tokens, tools in turns] for turns in run.rollouts]
    profile = Profile(rollouts, *step, run.train_seconds / layout.rows)
    for _ in range(8):
        scale = run.turn_seconds / simulate(profile, layout, **length).turn_seconds
        profile = replace(profile, step_base=profile.step_base * scale, step_per_row=profile.step_per_row * scale)
    return profile


def decode_steps(agent: Path, rows: int, tokens: int = 60) -> tuple[float, float]:
    """Seconds of a decode step of the local generator: for any number of rows, and for each row more."""
    import asyncio

    from transformers import AutoModelForCausalLM

    from agentrl.generation.base import SamplingParams
    from agentrl.generation.local import LocalGenerator

    model = AutoModelForCausalLM.from_pretrained(agent)
    seconds = {}
    for together in (1, rows):
        generator = LocalGenerator(model)

        async def play(generator: Any = generator, together: int = together) -> None:
            params = SamplingParams(max_tokens=tokens)
            await asyncio.gather(*(generator.sample(str(i), [5 + i % 50, 6, 7], params) for i in range(together)))

        asyncio.run(play())
        began = time.perf_counter()
        asyncio.run(play())
        seconds[together] = (time.perf_counter() - began) / tokens
        generator.close()
    per_row = max(0.0, (seconds[rows] - seconds[1]) / max(rows - 1, 1))
    return seconds[1] - per_row, per_row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="against real runs on this machine")
    parser.add_argument("--games", type=int, default=32, help="rows of a step, with --check")
    parser.add_argument("--steps", type=int, default=25, help="of each real run, with --check")
    parser.add_argument("--tools", type=float, nargs=3, default=[0.5, 2.0, 0.3], help="see async_vs_sync.py")
    parser.add_argument("--limit", type=float, default=1.2, help="wanted: simulated over real, or real over simulated")
    parser.add_argument("--quick", action="store_true", help="with --check: a tiny agent and few games")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args()
    if options.check:
        return check(options)
    given = json.loads(options.profile.read_text()) if options.profile else GPU_PROFILE
    table_of_gpus(Profile(**{"rollouts": drawn_rollouts(), **given}), options.gpus, options.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
