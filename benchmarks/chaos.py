"""A training whose environments crash, hang, lie and are killed: it completes, and trains on nothing but true rewards.

Each environment lives in a process of its own (`isolated`). By chance, in shares of the rollouts,

- 3% crash: a segmentation fault, `os._exit` or a bug in `reset`, in the tool or in `get_reward`;
- 2% hang: the tool or `reset` never comes back;
- 2% write garbage into the pipe to the trainer, or tell the model bytes that are no text;
- 5% have a tool that raises, which the model is told;
- 1% have a `get_reward` that raises;

and for every 20 rollouts some process is killed with `kill -9`, every tenth time the one that forks the others. The
true reward of a rollout follows from its seed and from the calls that were answered; it is computed again from the
journal, here, and so are the advantages: what was trained on must be these, and nothing else. At the end threads,
processes, open files, sockets and memory are what they were in the second quarter of the steps. Memory is what is
resident after a garbage collection, and after the C library gave back what it had free (`malloc_trim`): that it keeps
for each thread, so it varies by some 30 MB with how many there happened to be. The same training is timed without
chaos, in the same run; of what chaos costs, the report tells how long steps waited for nothing but rollouts that
something had happened to. Linux with glibc.

    python benchmarks/chaos.py [--rollouts 1000] [--seed 0]

The exit code is 1 when something was lost, poisoned or leaked.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import transformers
from transformers import TrainerCallback

from agentrl import GRPOConfig, GRPOTrainer, isolated
from agentrl.generation.base import SamplingParams
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.journal.records import RolloutRecord
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.training.batching import MicroBatch
from agentrl.types import Outcome

GROUP = 8
BATCH = 40
"""Rollouts of a step, all at once: as many processes."""
FATES = {"crash": 0.03, "hang": 0.02, "garbage": 0.02, "raise": 0.05, "reward": 0.01}
ROLLOUTS_A_KILL = 20
KILLS_A_SERVER = 10
TOOL_TIMEOUT, ENVIRONMENT_TIMEOUT = 1.0, 2.0
CALLS = 3
ALLOWANCES = {"threads": 8, "processes": 8, "files": 40, "sockets": 8, "MB": 16}
"""By how much the least of each count may be higher in the last quarter than in the second one: how many are in use at
once varies a little."""


class Errand:
    """Amounts are added up; what they are worth depends on the seed.

    The fate of an episode is drawn anew for each attempt, from the system's randomness: an environment that failed is
    not doomed to fail again.
    """

    chaos = False

    def reset(self, seed: int) -> str:
        """Begin, or not."""
        self.seed, self.amounts = seed, []
        draw = random.SystemRandom()
        fates = [*FATES, "well"]
        shares = [*FATES.values(), 1 - sum(FATES.values())]
        self.fate = draw.choices(fates, shares)[0] if self.chaos else "well"
        self.place = draw.choice(["reset", "tool", "reward"])
        self.way = draw.choice(["fault", "exit", "bug"])
        if self.place == "reset":
            self._meet("crash", "hang")
        return "Add a few amounts."

    def add(self, amount: int) -> str | bytes:
        """Add an amount.

        Args:
            amount: The amount.
        """
        if self.place != "reset":
            self._meet("hang", "garbage")
        if self.place == "tool":
            self._meet("crash")
        if self.fate == "raise":
            raise RuntimeError("the shop is closed")
        self.amounts.append(amount)
        return b"\xff\xfe\x00" if self.fate == "garbage" else f"{len(self.amounts)} so far"

    def get_reward(self) -> float:
        """The true reward, if at all."""
        if self.place == "reward":
            self._meet("crash")
        if self.fate == "reward":
            raise RuntimeError("the jury disagrees")
        return worth(self.seed, self.amounts)

    def _meet(self, *fates: str) -> None:
        if self.fate not in fates:
            return
        if self.fate == "hang":
            time.sleep(1e6)
        if self.fate == "garbage" and self.way == "fault":
            for descriptor in range(3, 64):  # wherever the pipe to the trainer is
                try:
                    os.write(descriptor, b"\x00\x01garbage" * 10)
                except OSError:
                    continue
        if self.fate == "crash":
            if self.way == "fault":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.way == "exit":
                os._exit(7)
            raise RuntimeError("a bug")


class ChaoticErrand(Errand):
    """The same, with chaos."""

    chaos = True


def worth(seed: int, amounts: list[int]) -> float:
    """The true reward of an episode."""
    return ((seed % 1009) * 31 + sum(number * amount for number, amount in enumerate(amounts, 1))) % 101 / 100


class Census(TrainerCallback):
    """Counts, after each step, what a leak would add to."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Count."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        me = psutil.Process()
        self.counts.append(
            {
                "threads": threading.active_count(),
                "processes": len(running()),
                "files": me.num_fds(),
                "sockets": len(me.net_connections("all")),
                "MB": me.memory_info().rss // 2**20,
            }
        )


class Watched(GRPOTrainer):
    """Counts the rows that have a part in the loss."""

    trained = 0

    def compute_loss(self, model: Any, inputs: MicroBatch, *args: Any, **kwargs: Any) -> Any:
        """Count, and go on."""
        self.trained += len(inputs.row_N.unique())
        return super().compute_loss(model, inputs, *args, **kwargs)


@dataclass
class Played:
    """A finished training.

    Attributes:
        seconds: How long it took.
        processor: Seconds that this process, without the environments, spent on the processor.
        trained: How many rows were trained on.
        counts: Of the census, step by step.
        records: What the journal holds of the attempts.
        killed: Processes that were killed.
        left: Child processes a second after its end.
    """

    seconds: float
    processor: float
    trained: int
    counts: list[dict[str, int]]
    records: list[RolloutRecord]
    killed: int
    left: int


def train(environment: type[Errand], rollouts: int, seed: int, folder: Path) -> Played:
    """Train for as many steps as the rollouts make."""
    tokenizer = qwen_like_tokenizer()
    census, reaper = Census(), Reaper(seed)
    trainer = Watched(
        model=tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=8192),
        processing_class=tokenizer,
        environment_factory=isolated(environment, start_method="forkserver", warm=4),
        generator=Shopper(tokenizer, reaper if environment.chaos else None),
        callbacks=[census],
        args=GRPOConfig(
            str(folder),
            seed=seed,
            max_steps=max(1, rollouts // BATCH),
            per_device_train_batch_size=BATCH,
            num_generations=GROUP,
            max_completion_length=2048,
            tool_timeout=TOOL_TIMEOUT,
            environment_timeout=ENVIRONMENT_TIMEOUT,
            environment_retry_delay=0.1,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=10**6,
        ),
    )
    began, processor = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    time.sleep(1.0)
    with Records(folder) as journal:
        records = list(journal.rollouts(journal.summaries()))
    return Played(seconds, processor, trainer.trained, census.counts, records, reaper.killed, len(running()))


class Reaper:
    """Kills a process at random every so many rollouts."""

    def __init__(self, seed: int) -> None:
        self.killed = 0
        self._draw = random.Random(seed)
        self._rollouts = 0

    def begun(self) -> None:
        """A rollout has begun."""
        self._rollouts += 1
        if self._rollouts % ROLLOUTS_A_KILL == 0:
            # Beside the event loop, and at some moment of what goes on there.
            threading.Timer(self._draw.uniform(0, 0.2), self._kill).start()

    def _kill(self) -> None:
        servers = psutil.Process().children()
        everyone = running()
        self.killed += 1
        at_server = self.killed % KILLS_A_SERVER == 0
        victims = [process for process in everyone if (process in servers) == at_server]
        if victims:
            with suppress(psutil.NoSuchProcess):
                self._draw.choice(victims).kill()


def running() -> list[psutil.Process]:
    """Processes that this one started, at any remove."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def adopt_orphans() -> None:
    """Become the parent of processes whose parent died, so that `running` sees them."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


class Shopper(ScriptedGenerator):
    """The sampled turns: a few calls with amounts that the turn's seed decides, then an answer.

    Of a rollout that has ended it keeps nothing: what it remembers would look like a leak of what is measured.
    """

    def __init__(self, tokenizer: Any, reaper: Reaper | None) -> None:
        super().__init__(self._turn)
        self._tokenizer = tokenizer
        self._reaper = reaper
        self._turns: Counter[str] = Counter()

    def release(self, session: str) -> None:
        """Forget the session, and all calls so far."""
        del self._turns[session]
        self.calls.clear()

    def _turn(self, session: str, ids: list[int], params: SamplingParams) -> list[int]:
        self._turns[session] += 1
        if self._turns[session] == 1 and self._reaper is not None:
            self._reaper.begun()
        if self._turns[session] > CALLS:
            return list(self._tokenizer.encode("Done.<|im_end|>"))
        amount = random.Random(params.seed).randint(1, 50)
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"amount": {amount}}}}}\n</tool_call><|im_end|>'
        return list(self._tokenizer.encode(call))


def true_reward(record: RolloutRecord) -> float:
    """What the recorded episode is worth, from its seed and the calls that were answered."""
    answers = [result for turn in record.turns for result in turn.turn.results if not result.failed]
    return worth(record.task.seed, [answer.call.arguments["amount"] for answer in answers])


def true_advantages(records: list[RolloutRecord]) -> dict[int, float]:
    """What each attempt must have been trained with, by its id: 0 without a reward, or without another one's."""
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        if record.summary.reward is not None:
            groups.setdefault(record.summary.group, []).append(record)
    advantages = dict.fromkeys((record.summary.id for record in records), 0.0)
    for group in groups.values():
        rewards = [true_reward(record) for record in group]
        if len(rewards) > 1:
            mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
            advantages |= {r.summary.id: (x - mean) / (spread + 1e-4) for r, x in zip(group, rewards, strict=True)}
    return advantages


def problems(played: Played, rollouts: int) -> list[str]:
    """What was lost, poisoned or leaked."""
    found = []
    scored = [record for record in played.records if record.summary.reward is not None]
    wrong = [record.summary.id for record in scored if abs(record.summary.reward - true_reward(record)) > 1e-9]
    if wrong:
        found.append(f"{len(wrong)} trajectories have a wrong reward, e.g. rollout {wrong[0]}")
    poisoned = [record.summary.id for record in scored if record.summary.outcome is Outcome.ENV_FAILURE]
    if poisoned:
        found.append(f"{len(poisoned)} failures of environments have a reward, e.g. rollout {poisoned[0]}")
    expected = true_advantages(played.records)
    told = {record.summary.id: record.summary.advantages or [0.0] for record in played.records}
    wrong = [number for number, [advantage] in told.items() if abs(advantage - expected[number]) > 1e-4]
    if wrong:
        found.append(f"{len(wrong)} trajectories have a wrong advantage, e.g. rollout {wrong[0]}")
    if played.trained != len(scored):
        found.append(f"{played.trained} trajectories were trained on, but {len(scored)} have a reward")
    tasks = {(record.summary.group, record.summary.member) for record in played.records}
    wanted = max(1, rollouts // BATCH) * BATCH
    if len(tasks) != wanted:
        found.append(f"{len(tasks)} tasks were played instead of {wanted}")
    if played.left:
        found.append(f"{played.left} processes are left")
    early, late = quarters(played.counts)
    for name, allowance in ALLOWANCES.items():
        if late[name] > early[name] + allowance:
            found.append(f"{name} grew from {early[name]} to {late[name]}")
    return found


def quarters(counts: list[dict[str, int]]) -> list[dict[str, int]]:
    """The least of each count in the second quarter of the steps, and in the last one."""
    quarter = len(counts) // 4
    parts = counts[quarter : 2 * quarter + 1], counts[-quarter - 1 :]
    return [{name: min(count[name] for count in part) for name in counts[0]} for part in parts]


def seconds_late(records: list[RolloutRecord]) -> float:
    """Seconds in which steps waited for nothing but rollouts that something had happened to."""
    ends: dict[int, dict[bool, float]] = {}
    for record in records:
        spared = record.summary.attempt == 0 and record.summary.outcome is Outcome.FINISHED
        spared = spared and not any(result.failed for turn in record.turns for result in turn.turn.results)
        step = ends.setdefault(record.summary.step, {})
        step[spared] = max(step.get(spared, 0.0), record.summary.ended or 0.0)
    return sum(max(0.0, step.get(False, 0.0) - step[True]) for step in ends.values() if True in step)


def report(name: str, played: Played) -> None:
    """Print what happened."""
    outcomes = Counter(record.summary.outcome for record in played.records)
    failed = sum(turn.turn.results[0].failed for r in played.records for turn in r.turns if turn.turn.results)
    print(f"{name}: {played.trained} rollouts trained on in {played.seconds:.1f} s", end="")
    print(f", {seconds_late(played.records):.1f} s of them waiting for rollouts that something had happened to")
    print(f"  on the processor, environments left out: {played.processor:.1f} s")
    print(f"  attempts in the journal: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
    print(f"  calls that failed: {failed}; processes killed: {played.killed}; left behind: {played.left}")
    for when, counts in zip(("second", "last"), quarters(played.counts), strict=True):
        least = ", ".join(f"{value} {name}" for name, value in counts.items())
        print(f"  least in the {when} quarter: {least}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Play both, and say what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # a line for each failure would hide the report
    transformers.logging.set_verbosity_error()
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        calm = train(Errand, args.rollouts, args.seed, Path(folder) / "calm")
        report("without chaos", calm)
        wild = train(ChaoticErrand, args.rollouts, args.seed, Path(folder) / "wild")
        report("with chaos", wild)
    share = (wild.trained / wild.seconds) / (calm.trained / calm.seconds)
    print(f"throughput with chaos over without: {share:.2f}")
    found = [f"without chaos: {text}" for text in problems(calm, args.rollouts)]
    found += [f"with chaos: {text}" for text in problems(wild, args.rollouts)]
    print("\n".join(found) or "nothing lost, nothing poisoned, nothing left")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
