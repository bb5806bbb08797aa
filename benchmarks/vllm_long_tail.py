"""Rollouts whose tools have a long tail, on a real vLLM server: wall time here, with a barrier, and in TRL.

The demo's agent asks its tool `--rounds` times in each of 32 rollouts. An answer takes 0.2 to 3 s, lognormal around
0.6 s; which one takes how long is the same for all sides. All of them ask one `vllm serve` on the CPU in the same run,
one after the other, and each has played once without waiting before it is timed:

- alone: the rollout whose answers take longest in all, by itself. Nobody can be faster: this is the bound.
- agentrl: `Collector.collect`, from tasks to micro-batches.
- barrier: the same, but no answer of a round comes before the last one of that round. That is what any loop takes that
  samples all turns of a round in one batch, even if its tools overlap.
- TRL: `GRPOTrainer._generate_and_score_completions` of the release that is installed, which samples in such batches and
  calls the tools of one rollout after those of another.

TRL's trainer gets three things from us: it is told that vLLM is there (it is, in the server's environment, not in its
own), it does not join the server's NCCL group (`VLLMClient.init_communicator` refuses anything but CUDA), and it hands
no weights over, which needs that group. The server's weights are those of the agent in any case.

    make venv-vllm
    OMP_NUM_THREADS=1 python benchmarks/vllm_long_tail.py [--rollouts 32] [--rounds 4] [--limit 1.3] [--no-peer]

Printed for each side: seconds, how many times the bound, how often the tool was called; where the time of the rollout
that took longest went (its turns at the server, its tools, all else); processor seconds of the server's processes and
of this one. Exit code 1 if agentrl takes more than `--limit` times the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import psutil  # noqa: E402
from datasets import Dataset  # noqa: E402
from guess_number import GuessNumber  # noqa: E402
from tiny_agent.agents import guessing_agent  # noqa: E402

from agentrl import GRPOConfig, GRPOTrainer  # noqa: E402
from agentrl.testing.vllm import VllmServer  # noqa: E402
from agentrl.types import Task, Trajectory  # noqa: E402

SHORTEST, MIDDLE, LONGEST = 0.2, 0.6, 3.0
PROMPT = [{"role": "user", "content": ""}]
COLUMNS = "{:>9} {:>8} {:>12} {:>6} {:>6} {:>6} {:>6} {:>11} {:>8}"
HEADS = ("side", "seconds", "x the bound", "calls", "turns", "tools", "rest", "server CPU", "own CPU")


class Rounds:
    """Where those who are still there wait for one another."""

    def __init__(self, there: int) -> None:
        self._there, self._waiting, self._open = there, 0, asyncio.Event()

    async def meet(self) -> None:
        """Wait until all are here."""
        self._waiting, door = self._waiting + 1, self._open
        self._look()
        await door.wait()

    def leave(self) -> None:
        """Be waited for no more."""
        self._there -= 1
        self._look()

    def _look(self) -> None:
        if self._waiting and self._waiting >= self._there:
            self._open.set()
            self._waiting, self._open = 0, asyncio.Event()


class Tools:
    """What all sides share: how long each answer takes, and a count of the answers.

    Attributes:
        waits: Whether answers take any time.
        rounds: Whether all answers of a round come together.
        calls: Answers that were asked for.
    """

    def __init__(self, rollouts: int, rounds: int) -> None:
        draw = random.Random(0)
        self.seconds = [
            [min(LONGEST, max(SHORTEST, draw.lognormvariate(math.log(MIDDLE), 0.9))) for _ in range(rounds)]
            for _ in range(rollouts)
        ]
        self.waits, self.calls = False, 0
        self.rounds: Rounds | None = None

    @property
    def slowest(self) -> int:
        """The rollout whose answers take longest in all."""
        return max(range(len(self.seconds)), key=lambda rollout: sum(self.seconds[rollout]))

    def environment(self) -> type:
        """The demo's environment, which never has the number and takes its time to say so."""
        tools = self

        class Tail(GuessNumber):
            def reset(self, rollout: int, **columns: Any) -> str:
                self._left = list(tools.seconds[rollout])
                return super().reset(seed=0)

            @functools.wraps(GuessNumber.guess)
            async def guess(self, number: int) -> str:
                tools.calls += 1
                seconds = self._left.pop(0) if self._left else 0.0
                if tools.waits:
                    await asyncio.sleep(seconds)
                if tools.rounds is not None:
                    await tools.rounds.meet()
                return "higher"

            def get_reward(self) -> float:
                if tools.rounds is not None:
                    tools.rounds.leave()
                return 0.0

        return Tail


class Parts:
    """Where the time of a side goes.

    Attributes:
        turns: Seconds that the rollout which took longest waited for its turns.
        tools: The same for its tools; None where nobody says.
        server: Processor seconds of the server's processes, from their beginning.
        own: The same of this process.
    """

    def __init__(self) -> None:
        self.turns: float | None = None
        self.tools: float | None = None
        self.server = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
        self.own = time.process_time()

    def see(self, trajectories: Sequence[Trajectory]) -> None:
        """Look for the longest rollout among those that were played."""
        spent = [
            (sum(turn.seconds for turn in t.turns), sum(r.seconds for turn in t.turns for r in turn.results))
            for t in trajectories
        ]
        self.turns, self.tools = max(spent, key=sum)


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each rollout."""
    return [{"prompt": PROMPT, "rollout": i} for i in range(options.rollouts)]


def config(kind: Any, folder: str, url: str, options: argparse.Namespace) -> Any:
    """The same configuration for both trainers."""
    return kind(
        folder,
        per_device_train_batch_size=options.rollouts,
        num_generations=options.rollouts,
        max_steps=1,
        max_completion_length=300,
        max_tool_calling_iterations=options.rounds,
        temperature=0.1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_server_timeout=600.0,
    )


def ours(
    agent: Path, folder: str, url: str, tools: Tools, options: argparse.Namespace
) -> dict[str, Callable[[Parts], None]]:
    """What there is to time of agentrl."""
    trainer = GRPOTrainer(
        str(agent),
        args=config(GRPOConfig, folder, url, options),
        train_dataset=Dataset.from_list(rows_of(options)),
        environment_factory=tools.environment(),
    )
    tasks = [Task("0", i, 0, PROMPT, {"rollout": i}) for i in range(options.rollouts)]
    collector, engine = trainer.collector, trainer.collector.engine
    run = engine.run

    def play(parts: Parts) -> None:
        def seen(tasks: list[Task]) -> list[Trajectory]:
            trajectories = run(tasks)
            parts.see(trajectories)
            return trajectories

        engine.run = seen  # type: ignore[method-assign]
        collector.collect(tasks, rows_per_batch=len(tasks), batches=1)

    def play_alone(parts: Parts) -> None:
        trajectories = run([tasks[tools.slowest]])
        parts.see(trajectories)
        engine.release(trajectories)

    def play_in_rounds(parts: Parts) -> None:
        tools.rounds = Rounds(len(tasks))
        play(parts)
        tools.rounds = None

    play(Parts())
    return {"alone": play_alone, "agentrl": play, "barrier": play_in_rounds}


def peers(
    agent: Path, folder: str, url: str, tools: Tools, options: argparse.Namespace
) -> dict[str, Callable[[Parts], None]]:
    """What there is to time of TRL."""
    import trl
    from transformers import AutoTokenizer
    from trl.generation import vllm_client, vllm_generation

    logging.disable(logging.WARNING)
    vllm_client.is_vllm_available = vllm_generation.is_vllm_available = lambda *_, **__: True
    vllm_client.VLLMClient.init_communicator = lambda *_, **__: None
    vllm_generation.VLLMGeneration.sync_weights = lambda _: None
    rows = rows_of(options)
    trainer = trl.GRPOTrainer(
        model=str(agent),
        args=config(trl.GRPOConfig, folder, url, options),
        reward_funcs=[],
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(agent),
        environment_factory=tools.environment(),
    )
    trainer.model.train()

    def play(_: Parts) -> None:
        # Its loop appends to the messages of the rows that it is given.
        trainer._generate_and_score_completions([{**row, "prompt": [dict(PROMPT[0])]} for row in rows])

    play(Parts())
    return {f"TRL {trl.__version__}": play}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit", type=float, default=1.3, help="wanted: agentrl's time over the bound at most this")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave TRL out")
    parser.add_argument("--model", type=Path, help="a folder with the agent, made by `make demo`")
    options = parser.parse_args()
    agent = options.model or guessing_agent(GuessNumber)
    tools = Tools(options.rollouts, options.rounds)
    with (
        tempfile.TemporaryDirectory() as folder,
        VllmServer(ROOT / ".venv-vllm/bin/vllm", agent, Path(folder)) as server,
    ):
        sides = ours(agent, folder, server.url, tools, options)
        if options.peer:
            sides |= peers(agent, folder, server.url, tools, options)
        longest = sum(tools.seconds[tools.slowest])
        print(f"{options.rollouts} rollouts, {options.rounds} rounds; the slowest waits {longest:.2f} s for its tools")
        print(COLUMNS.format(*HEADS))
        tools.waits, taken = True, {}
        for side, play in sides.items():
            tools.calls, parts, began = 0, Parts(), time.perf_counter()
            play(parts)
            taken[side], after = time.perf_counter() - began, Parts()
            known = parts.turns is not None and parts.tools is not None
            split = (parts.turns, parts.tools, taken[side] - parts.turns - parts.tools) if known else ()
            cells = [f"{value:.2f}" for value in split] or ["-"] * 3
            cpu = f"{after.server - parts.server:.2f}", f"{after.own - parts.own:.2f}"
            times = f"{taken[side]:.2f}", f"{taken[side] / taken['alone']:.2f}"
            print(COLUMNS.format(side, *times, tools.calls, *cells, *cpu), flush=True)
    return int(taken["agentrl"] > options.limit * taken["alone"])


if __name__ == "__main__":
    sys.exit(main())
