"""Whether slow tools, resets and rewards of different rollouts overlap: wall time over the ideal, wanted at most 1.3.

All rollouts run together and a generator plays back a script, so only waiting and agentrl's own work are measured:

- tools: each rollout plays `--rounds` tool rounds and then answers. A turn writes 1 or 3 calls of a tool that sleeps
  100 or 250 ms (`time.sleep` when sync, `asyncio.sleep` when async). The ideal is rounds x sleep.
- reset: an environment whose sync `reset` sleeps 250 ms; the model answers at once. The ideal is one sleep.
- get_reward: the same for a sync `get_reward`.

The tools are standalone functions, whose calls of one turn run concurrently. So do async methods of an environment;
its sync methods are called one after the other within a turn, on purpose, because they share the instance's plain
Python state. Methods of different instances always overlap.

The time is the best of `--repeats`, the worst is printed beside it: on a machine with other work the worst measures
that work. `cpu` is the processor time of the whole process in the best run. The exit code is 1 when one ratio is
above the limit.

With `--peer` the same work goes through TRL's GRPOTrainer in the same run: same tools and environment, same
tokenizer, prompts and scripted turns, same number of calls (counted and compared). Only `_generate_single_turn`, which
calls the model, is replaced by the script; `_generate_and_score_completions`, which is timed, is TRL's: it resets,
parses, calls tools, renders their results and rewards. TRL is timed once a setting (the waiting alone takes about
five minutes in all).

    python benchmarks/tool_overlap.py [--peer] [--rollouts 8 64] [--rounds 2] [--repeats 7] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.renderer import Renderer
from agentrl.generation.base import SamplingParams
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.garbage import rare_collections
from agentrl.rollout.limits import Limits
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Outcome, Task, Trajectory

LIMIT = 1.3
PROMPT = [{"role": "user", "content": "What is it?"}]
COLUMNS = "{:38} {:>8} {:>10} {:>9} {:>7} {:>6}  {}"


@dataclass(frozen=True)
class Setting:
    """One row of the table; `what` is "sync tool", "async tool", "reset" or "get_reward"."""

    what: str
    rollouts: int
    ms: int
    rounds: int = 0
    calls: int = 0

    @property
    def seconds(self) -> float:
        return self.ms / 1000

    @property
    def ideal(self) -> float:
        """Seconds when everything that may overlap does."""
        return self.seconds * max(self.rounds, 1)

    @property
    def slept(self) -> int:
        """How many sleeps there are in all."""
        return self.rollouts * max(self.rounds * self.calls, 1)

    def __str__(self) -> str:
        calls = f", {self.rounds} rounds of {self.calls}" if self.rounds else ""
        return f"{self.rollouts} x {self.what} {self.ms} ms{calls}"


@dataclass(frozen=True)
class Times:
    """Seconds of one run: by the clock, and on the processor."""

    wall: float
    cpu: float


class Work:
    """What is slow in a setting: the tools and the environment, which count their sleeps."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.slept = 0
        self.tools = [self._tool()] if setting.rounds else []
        self.environment = None if setting.rounds else self._environment()

    def _tool(self) -> Callable[..., Any]:
        def lookup(key: str) -> str:
            """Look a key up.

            Args:
                key: The key.
            """
            time.sleep(self.setting.seconds)
            self.slept += 1
            return f"{key} is 42"

        async def lookup_async(key: str) -> str:
            """Look a key up.

            Args:
                key: The key.
            """
            await asyncio.sleep(self.setting.seconds)
            self.slept += 1
            return f"{key} is 42"

        return lookup_async if self.setting.what == "async tool" else lookup

    def _environment(self) -> type:
        work = self

        class Slow:
            def reset(self, **columns: Any) -> None:
                work.sleep_in("reset")

            def get_reward(self) -> float:
                work.sleep_in("get_reward")
                return 1.0

            def look(self) -> str:
                """Look around."""
                return "Nothing."

        return Slow

    def sleep_in(self, method: str) -> None:
        if method == self.setting.what:
            time.sleep(self.setting.seconds)
            self.slept += 1

    def check(self, expected: int) -> None:
        """Check that a run did the work, and count the next one from 0."""
        if self.slept != expected:
            raise RuntimeError(f"{self.setting}: {self.slept} sleeps instead of {expected}")
        self.slept = 0


class Script:
    """The sampled turns: so many tool rounds, then an answer; asked by how many turns a rollout has had."""

    def __init__(self, tokenizer: Any, setting: Setting, work: Work) -> None:
        call = '<tool_call>\n{{"name": "{}", "arguments": {{"key": "k{}"}}}}\n</tool_call>'
        names = [tool.__name__ for tool in work.tools] * setting.calls
        calling = "\n".join(call.format(name, number) for number, name in enumerate(names))
        self.rounds = setting.rounds
        self.calling = tokenizer.encode(f"{calling}<|im_end|>")
        self.answer = tokenizer.encode("It is 42.<|im_end|>")

    def turn(self, number: int) -> list[int]:
        return list(self.calling if number < self.rounds else self.answer)


def timed(run: Callable[[], Any]) -> tuple[Times, Any]:
    """Times and result of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return Times(time.perf_counter() - wall, time.process_time() - cpu), result


def measure(setting: Setting, repeats: int) -> list[Times]:
    """Play a setting through agentrl; a run of one rollout before starts the loop and compiles the template."""
    tokenizer = qwen_like_tokenizer()
    work = Work(setting)
    script = Script(tokenizer, setting, work)
    turns: dict[str, int] = {}

    def policy(session: str, ids: list[int], params: SamplingParams) -> list[int]:
        turns[session] = number = turns.get(session, -1) + 1
        return script.turn(number)

    engine = RolloutEngine(
        ScriptedGenerator(policy),
        Renderer(tokenizer, tools=True),
        tools=work.tools,
        environments=work.environment,
        limits=Limits(),
    )
    play(engine, 1)
    work.check(setting.slept // setting.rollouts)
    all_times = []
    with rare_collections():  # as in `train`
        for _ in range(repeats):
            times, trajectories = timed(lambda: play(engine, setting.rollouts))
            work.check(setting.slept)
            if not all(t.outcome is Outcome.FINISHED and len(t.turns) == setting.rounds + 1 for t in trajectories):
                raise RuntimeError(f"{setting}: not every rollout was played to its end")
            all_times.append(times)
    engine.close()
    return all_times


def play(engine: RolloutEngine, rollouts: int) -> list[Trajectory]:
    trajectories = engine.run([Task(str(i // 4), i % 4, i // 4, PROMPT) for i in range(rollouts)])
    engine.release(trajectories)
    return trajectories


def measure_peer(setting: Setting) -> Times:
    """Play a setting through TRL's own trainer, its single-turn generation replaced by the script."""
    work = Work(setting)
    trainer = peer_trainer(setting, work)
    rows = [{"prompt": PROMPT}] * setting.rollouts
    trainer.model.train()
    times, _ = timed(lambda: trainer._generate_and_score_completions(rows))
    work.check(setting.slept)
    return times


def introduce_peer() -> None:
    """Print the peer's version; what it warns of (experimental parts, settings) has no bearing on the times."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        import trl
    except ImportError as error:
        sys.exit(f"--peer needs TRL ({error}): pip install 'agentrl[bench]'")
    print(f"TRL {trl.__version__}: its own loop, only the call of the model is replaced, by the same script")


def peer_trainer(setting: Setting, work: Work) -> Any:
    """Make TRL's trainer for a tiny model that is never asked."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template, qwen3_training_chat_template

    tokenizer = qwen_like_tokenizer()
    tokenizer.chat_template = qwen3_training_chat_template
    tokenizer.response_template = qwen3_template
    script = Script(tokenizer, setting, work)

    class ScriptedTrainer(GRPOTrainer):
        turns = 0

        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, None]:
            """Answer for the whole batch, which moves turn by turn."""
            ids = [script.turn(self.turns) for _ in prompt_ids]
            self.turns += 1
            return ids, None  # logprobs are None in TRL's default generation too

    config = GRPOConfig(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=setting.rollouts,
        num_generations=4,
        max_completion_length=8192,
        beta=0.0,
        use_cpu=True,
        report_to="none",
    )
    return ScriptedTrainer(
        model=tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=16384),
        reward_funcs=[lambda completions, **kwargs: [1.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * setting.rollouts),
        processing_class=tokenizer,
        tools=work.tools or None,
        environment_factory=work.environment,
    )


def settings(rollouts: Sequence[int], rounds: int, quick: bool) -> list[Setting]:
    """The rows of the table, in order."""
    rows = []
    for count in rollouts:
        for kind in ("sync tool", "async tool"):
            for ms in (100,) if quick else (100, 250):
                rows += [Setting(kind, count, ms, rounds, calls) for calls in (1, 3)]
        rows += [Setting(what, count, 250) for what in ("reset", "get_reward")]
    return rows


def line(setting: Setting, all_times: list[Times], limit: float) -> tuple[str, bool]:
    """A row of the table, and whether it is within the limit."""
    best = min(all_times, key=lambda times: times.wall)
    worst = max(times.wall for times in all_times)
    passed = best.wall <= limit * setting.ideal
    ratio = f"{best.wall / setting.ideal:.2f}"
    seconds = (f"{value:.3f} s" for value in (setting.ideal, best.wall, worst))
    return COLUMNS.format(str(setting), *seconds, f"{best.cpu:.2f} s", ratio, "ok" if passed else "MISSED"), passed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[8, 64], help="multiples of 4 with --peer")
    parser.add_argument("--rounds", type=int, default=2, help="tool rounds of a rollout")
    parser.add_argument("--repeats", type=int, default=7, help="runs of a setting; the best counts")
    parser.add_argument("--limit", type=float, default=LIMIT, help="wanted: wall time over ideal at most this")
    parser.add_argument("--quick", action="store_true", help="one run of a setting, no 250 ms tools")
    parser.add_argument("--peer", action="store_true", help="the same work through TRL too")
    args = parser.parse_args()
    if args.rounds < 1 or args.repeats < 1 or min(args.rollouts) < 1:
        parser.error("--rollouts, --rounds and --repeats must be at least 1")
    if args.peer and any(count % 4 for count in args.rollouts):
        parser.error("with --peer, --rollouts must be multiples of 4, TRL's group size here")
    return args


def main() -> int:
    """Print the table; 1 when a setting missed the limit."""
    args = arguments()
    if args.peer:
        introduce_peer()
    repeats = 1 if args.quick else args.repeats
    heads = ("setting", "ideal", f"best of {repeats}", "worst", "cpu", "ratio", f"at most {args.limit:g}")
    print(COLUMNS.format(*heads) + ("         TRL  TRL / agentrl" if args.peer else ""))
    missed = 0
    rows = settings(args.rollouts, args.rounds, args.quick)
    for setting in rows:
        all_times = measure(setting, repeats)
        text, passed = line(setting, all_times, args.limit)
        missed += not passed
        if args.peer:
            peer = measure_peer(setting).wall
            text = f"{text:93} {peer:8.2f} s {peer / min(times.wall for times in all_times):14.1f}"
        print(text, flush=True)
    print(f"{missed} of {len(rows)} settings missed the limit" if missed else "all settings within the limit")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
