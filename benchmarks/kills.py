"""A training that is killed with `kill -9` again and again, each time at a random moment, and resumed each time.

Every life of the training is a process group of its own, killed as a whole: at a random time after it began, or, every
third time, in the middle of a commit of its journal. A witness notes each turn that was finished, in a file that the
journal has no part in: the generator is asked for the next turn only when the journal has the last one, so a turn that
the witness has and the journal has not is lost. After each kill the journal must be whole (`PRAGMA integrity_check`).
When a game has had its kills it is played to its end, and its weights must be those of the training that was never
killed, bit for bit. With `--agent` a program of the user's plays the rollouts, which the journal has as a whole; what
the reward function was given is then what the witness saw finished.

    python benchmarks/kills.py [--kills 50] [--games 5] [--seed 0] [--agent]

The exit code is 1 when a turn was lost, a journal was damaged or the weights differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.generation.base import SamplingParams
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.journal.schema import journal_path
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Sample

STEPS, BATCH, GROUP = 8, 8, 4
SAVE_STEPS = 3
LATEST_KILL = 3.0
"""Seconds of training after which a life is over at the latest."""
COMMITS = 3
"""Every so many kills one hits the journal's writer within a transaction."""
LATEST_COMMIT = 60
"""How much the journal was told when such a life is over at the latest. A whole training tells it about 450 things."""


class Presses:
    """Counts presses; the same seed and calls give the same answers."""

    replayable = True

    def reset(self, seed: int) -> str:
        """Begin."""
        self.count = seed % 7
        return f"{self.count}"

    def press(self, times: int) -> str:
        """Press the button.

        Args:
            times: How often.
        """
        time.sleep(random.random() / 20)  # kills are to find some rollouts at their tools
        self.count += times
        return f"pressed {self.count}"

    def get_reward(self) -> float:
        """A number that depends on all presses."""
        return float(self.count % 5)


class Witnessed(ScriptedGenerator):
    """Calls or answers by the turn's seed alone, and notes what a rollout's row is when it asks for a further turn.

    Args:
        tokenizer: Writes the turns.
        path: Of the witness's file; a line is in the hands of the system before the turn is sampled.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        super().__init__(self._turn)
        self._tokenizer = tokenizer
        self._turns: Counter[str] = Counter()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def sample(self, session: str, ids: Any, params: SamplingParams) -> Sample:
        """Note, and sample."""
        if self._turns[session]:  # in this life, so the last one is finished
            os.write(self._file, f"{json.dumps(list(ids))}\n".encode())
        self._turns[session] += 1
        return await super().sample(session, ids, params)

    def _turn(self, session: str, ids: list[int], params: SamplingParams) -> list[int]:
        draw = random.Random(params.seed)
        text = f"I am done, {draw.randrange(10)}."
        if draw.random() < 0.75:
            times = draw.randrange(10**6)  # no two turns are alike: one that is lost is not taken for another
            text = f'<tool_call>\n{{"name": "press", "arguments": {{"times": {times}}}}}\n</tool_call>'
        return list(self._tokenizer.encode(text + "<|im_end|>"))


async def press_by_hand(base_url: str, api_key: str, task: Any) -> None:
    """Ask the model for its turns until it does not press any more."""
    import httpx

    messages = list(task.prompt)
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        while len(messages) < 8:
            answer = (await http.post("/chat/completions", json={"model": "m", "messages": messages})).json()
            said = answer["choices"][0]["message"]
            if "done" in (said["content"] or ""):
                break
            await asyncio.sleep(random.random() / 20)
            messages += [said, {"role": "user", "content": "And now?"}]


class Judge:
    """A reward that depends on all that was said, and a witness of what it was given.

    Args:
        path: Of the witness's file.
    """

    __name__ = "judge"

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Note, and judge."""
        os.write(self._file, "".join(f"{json.dumps(ids)}\n" for ids in completion_ids).encode())
        return [float(sum(ids) % 5) for ids in completion_ids]


def train(folder: Path, began: Any, commit: int | None, agent: bool) -> None:
    """One life: train, or go on; `commit` is the transaction in which to die."""
    os.setsid()
    import torch
    import transformers
    from datasets import Dataset

    from agentrl import GRPOConfig, GRPOTrainer
    from agentrl.testing.models import tiny_model
    from agentrl.testing.tokenizers import qwen_like_tokenizer

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # of each resume it says what it goes on with
    if commit is not None:
        die_in_commit(commit)
    tokenizer = qwen_like_tokenizer()
    prompts = [[{"role": "user", "content": f"Press, number {i}."}] for i in range(6)]
    witness = folder / "witness.jsonl"
    game: dict[str, Any] = {"environment_factory": Presses, "generator": Witnessed(tokenizer, witness)}
    if agent:
        turns = Witnessed(tokenizer, folder / "turns.jsonl")
        game = {"agent": press_by_hand, "generator": turns, "reward_funcs": Judge(witness)}
    trainer = GRPOTrainer(
        model=tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=2048),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **game,
        args=GRPOConfig(
            str(folder),
            max_steps=STEPS,
            save_steps=SAVE_STEPS,
            per_device_train_batch_size=BATCH,
            num_generations=GROUP,
            max_completion_length=1500,
            learning_rate=1e-3,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        ),
    )
    began.set()
    trainer.train(resume_from_checkpoint=True if journal_path(folder).exists() else None)
    torch.save(trainer.model.state_dict(), folder / "weights.pt")


def die_in_commit(number: int) -> None:
    """Kill the process group within a transaction, after its statements and before its commit."""
    from agentrl.rollout.journal import writer

    original, count = writer._File.run, 0

    def run(self: Any, jobs: list[Any]) -> list[Any]:
        nonlocal count
        count += len(jobs)
        if count >= number:
            jobs = [*jobs, lambda connection: os.killpg(0, signal.SIGKILL)]
        return original(self, jobs)

    writer._File.run = run  # type: ignore[method-assign]


def live(folder: Path, draw: random.Random | None, *, agent: bool, in_commit: bool = False) -> str:
    """Let one life begin; without `draw` it ends by itself. Returns how it ended: "whole", "killed" or "commit"."""
    context = multiprocessing.get_context("forkserver")
    began = context.Event()
    commit = draw.randint(1, LATEST_COMMIT) if draw is not None and in_commit else None
    process = context.Process(target=train, args=(folder, began, commit, agent))
    process.start()
    how = "killed" if commit is None else "commit"
    if draw is not None:
        while not began.wait(0.2) and process.is_alive():
            continue
        process.join(draw.uniform(0, LATEST_KILL) if commit is None else 60)
        if process.is_alive():
            how = "killed"
            os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    if process.exitcode == 0:
        return "whole"
    if process.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"a life ended with exit code {process.exitcode}, not by a kill")
    return how


def lost_turns(folder: Path) -> tuple[int, int]:
    """Turns, or rollouts of a program, that the witness saw finished, and how many of them the journal lacks.

    A turn is known by what was in the row when the next one was asked for.
    """
    witness = folder / "witness.jsonl"
    if not witness.exists():
        return 0, 0
    lines = witness.read_bytes().split(b"\n")[:-1]  # after the last line end there is nothing, or half a line
    seen = {tuple(ids) for ids in map(json.loads, lines)}
    kept: set[tuple[int, ...]] = set()
    try:
        journal = Records(folder)
    except ConfigurationError:  # killed before the journal was made
        return len(seen), len(seen)
    with journal:
        for record in journal.rollouts(journal.summaries(superseded=True)):
            if record.whole is not None:
                kept.add(tuple(record.trajectory().completion_ids))
                continue
            conversation = record.before(0).conversation()
            kept.add(tuple(conversation.ids))
            for turn in record.turns:
                turn.extend(conversation)
                kept.add(tuple(conversation.ids))
    return len(seen), len(seen - kept)


def damage(folder: Path) -> str | None:
    """What is wrong with a journal's file, None if nothing is."""
    if not journal_path(folder).exists():
        return None
    connection = sqlite3.connect(journal_path(folder))
    try:
        [answer] = connection.execute("PRAGMA integrity_check").fetchone()
    finally:
        connection.close()
    return None if answer == "ok" else answer


def same_weights(folder: Path, other: Path) -> bool:
    """Whether two trainings ended with the same weights, bit for bit."""
    import torch

    ours, theirs = (torch.load(each / "weights.pt", weights_only=True) for each in (folder, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def main(argv: list[str] | None = None) -> int:
    """Play the games; 1 if anything is lost, damaged or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--games", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agent", action="store_true", help="a program plays")
    args = parser.parse_args(argv)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["agentrl.training.grpo", "datasets", "torch"])
    draw = random.Random(args.seed)
    kills: Counter[str] = Counter()
    seen = lost = damaged = different = 0
    what = "rollouts" if args.agent else "turns"
    with tempfile.TemporaryDirectory() as parent:
        reference = Path(parent) / "reference"
        reference.mkdir()
        live(reference, None, agent=args.agent)
        for game in range(args.games):
            folder = Path(parent) / f"game-{game}"
            folder.mkdir()
            wanted = args.kills * (game + 1) // args.games
            while kills.total() < wanted:
                ending = live(folder, draw, agent=args.agent, in_commit=kills.total() % COMMITS == COMMITS - 1)
                if ending == "whole":  # it was quicker than the kill: the next kills are for another one
                    different += not same_weights(folder, reference)
                    shutil.rmtree(folder)
                    folder.mkdir()
                    continue
                kills[ending] += 1
                lost += lost_turns(folder)[1]
                damaged += damage(folder) is not None
            live(folder, None, agent=args.agent)
            turns, missing = lost_turns(folder)
            seen += turns
            lost += missing
            same = same_weights(folder, reference)
            different += not same
            verdict = "equal" if same else "DIFFER"
            print(f"game {game + 1}: {kills.total()} kills so far, {turns} {what}, weights {verdict}", flush=True)
    print(f"{kills['killed']} kills at random moments, {kills['commit']} within a commit")
    print(f"finished {what} lost: {lost} of {seen}; damaged journals: {damaged}", end="")
    print(f"; trainings that ended differently: {different}")
    return int(bool(lost or damaged or different))


if __name__ == "__main__":
    sys.exit(main())
