"""A training whose environments crash, hang, lie and are killed: it completes, and trains on nothing but true rewards.

Each environment lives in a process of its own (`isolated`). By chance, in shares of the rollouts,

- 3% crash: a segmentation fault, `os._exit` or a bug in `reset`, in the tool or in `get_reward`;
- 2% hang: the tool or `reset` never comes back;
- 2% write garbage into the pipe to the trainer, or tell the model bytes that are no text;
- 5% have a tool that raises, which the model is told;
- 1% have a `get_reward` that raises;

and every half second a process is killed with `kill -9`. The true reward of a rollout follows from its seed and from
the calls that were answered; it is computed again from the journal, here, and compared with what was trained on. At the
end threads, processes, open files and memory are what they were after the first steps. The same training is timed
without chaos, in the same run.

    python benchmarks/chaos.py [--rollouts 1000] [--seed 0]

The exit code is 1 when something was lost, poisoned or leaked.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
from agentrl.types import Outcome

GROUP = 8
BATCH = 40
"""Rollouts of a step, all at once: as many processes."""
FATES = {"crash": 0.03, "hang": 0.02, "garbage": 0.02, "raise": 0.05, "reward": 0.01}
KILL_SECONDS = 0.5
TOOL_TIMEOUT, ENVIRONMENT_TIMEOUT = 1.0, 2.0
CALLS = 3


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
        me = psutil.Process()
        self.counts.append(
            {
                "threads": threading.active_count(),
                "processes": len(me.children(recursive=True)),
                "files": me.num_fds(),
                "MB": me.memory_info().rss // 2**20,
            }
        )


@dataclass
class Played:
    """A finished training.

    Attributes:
        seconds: How long it took.
        rollouts: How many were trained on.
        counts: Of the census, step by step.
        records: What the journal holds of the attempts.
        killed: Processes that were killed.
        left: Child processes a second after its end.
    """

    seconds: float
    rollouts: int
    counts: list[dict[str, int]]
    records: list[RolloutRecord]
    killed: int
    left: int


def train(environment: type[Errand], rollouts: int, seed: int, folder: Path, *, kill: bool) -> Played:
    """Train for as many steps as the rollouts make."""
    tokenizer = qwen_like_tokenizer()
    census = Census()
    trainer = GRPOTrainer(
        model=tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=8192),
        processing_class=tokenizer,
        environment_factory=isolated(environment, start_method="forkserver", warm=4),
        generator=ScriptedGenerator(Shopper(tokenizer)),
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
    began = time.perf_counter()
    with killing(seed) if kill else unharmed() as killed:
        trainer.train()
    seconds = time.perf_counter() - began
    time.sleep(1.0)
    with Records(folder) as journal:
        records = list(journal.rollouts(journal.summaries()))
    return Played(
        seconds,
        sum(bool(record.summary.advantages) for record in records),
        census.counts,
        records,
        len(killed),
        len(psutil.Process().children(recursive=True)),
    )


class Shopper:
    """The sampled turns: a few calls with amounts that the turn's seed decides, then an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._turns: Counter[str] = Counter()

    def __call__(self, session: str, ids: list[int], params: SamplingParams) -> list[int]:
        """Sample a turn."""
        self._turns[session] += 1
        if self._turns[session] > CALLS:
            return list(self._tokenizer.encode("Done.<|im_end|>"))
        amount = random.Random(params.seed).randint(1, 50)
        call = f'<tool_call>\n{{"name": "add", "arguments": {{"amount": {amount}}}}}\n</tool_call><|im_end|>'
        return list(self._tokenizer.encode(call))


@contextmanager
def killing(seed: int) -> Iterator[list[int]]:
    """Kill a process of an environment now and then."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        draw = random.Random(seed)
        while not over.wait(KILL_SECONDS):
            # The children of the fork server are the environments; the server itself is not a part of the experiment.
            family = [child for server in psutil.Process().children() for child in _children(server)]
            if family:
                victim = draw.choice(family)
                try:
                    victim.kill()
                    killed.append(victim.pid)
                except psutil.Error:
                    continue

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@contextmanager
def unharmed() -> Iterator[list[int]]:
    """Kill nothing."""
    yield []


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


def true_reward(record: RolloutRecord) -> float:
    """What the recorded episode is worth, from its seed and the calls that were answered."""
    answers = [result for turn in record.turns for result in turn.turn.results if not result.failed]
    return worth(record.task.seed, [answer.call.arguments["amount"] for answer in answers])


def problems(played: Played, rollouts: int) -> list[str]:
    """What was lost, poisoned or leaked."""
    found = []
    trained = [record for record in played.records if record.summary.advantages]
    wrong = [r.summary.id for r in trained if r.summary.reward is None or abs(r.summary.reward - true_reward(r)) > 1e-9]
    if wrong:
        found.append(f"{len(wrong)} trajectories were trained on with a wrong reward, e.g. rollout {wrong[0]}")
    poisoned = [r.summary.id for r in trained if r.summary.outcome is Outcome.ENV_FAILURE]
    if poisoned:
        found.append(f"{len(poisoned)} failures of environments were trained on, e.g. rollout {poisoned[0]}")
    tasks = {(record.summary.group, record.summary.member) for record in played.records}
    expected = max(1, rollouts // BATCH) * BATCH
    if len(tasks) != expected:
        found.append(f"{len(tasks)} tasks were played instead of {expected}")
    if played.left:
        found.append(f"{played.left} processes are left")
    early, late = played.counts[len(played.counts) // 4], played.counts[-1]
    for name, allowance in {"threads": 8, "processes": 8, "files": 40, "MB": 100}.items():
        if late[name] > early[name] + allowance:
            found.append(f"{name} grew from {early[name]} to {late[name]}")
    return found


def report(name: str, played: Played) -> None:
    """Print what happened."""
    outcomes = Counter(record.summary.outcome for record in played.records)
    failed = sum(turn.turn.results[0].failed for r in played.records for turn in r.turns if turn.turn.results)
    print(f"{name}: {played.rollouts} rollouts trained on in {played.seconds:.1f} s")
    print(f"  attempts in the journal: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
    print(f"  calls that failed: {failed}; processes killed: {played.killed}; left behind: {played.left}")
    for when, counts in (("a quarter", played.counts[len(played.counts) // 4]), ("the end", played.counts[-1])):
        print(f"  at {when}: {', '.join(f'{value} {name}' for name, value in counts.items())}")


def main(argv: list[str] | None = None) -> int:
    """Play both, and say what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # a line for each failure would hide the report
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        calm = train(Errand, args.rollouts, args.seed, Path(folder) / "calm", kill=False)
        report("without chaos", calm)
        wild = train(ChaoticErrand, args.rollouts, args.seed, Path(folder) / "wild", kill=True)
        report("with chaos", wild)
    share = (wild.rollouts / wild.seconds) / (calm.rollouts / calm.seconds)
    print(f"throughput with chaos over without: {share:.2f}")
    found = [f"without chaos: {text}" for text in problems(calm, args.rollouts)]
    found += [f"with chaos: {text}" for text in problems(wild, args.rollouts)]
    print("\n".join(found) or "nothing lost, nothing poisoned, nothing left")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
