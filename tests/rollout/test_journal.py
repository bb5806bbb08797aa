"""The journal gives back what was played, keeps every finished turn, and says clearly what is in its way."""

from __future__ import annotations

import collections
import json
import logging
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentrl.chat.continuation import Continuation
from agentrl.chat.renderer import Renderer
from agentrl.errors import ConfigurationError, EnvironmentFailure, EpisodeDone, RolloutError
from agentrl.generation.base import SamplingParams
from agentrl.generation.local import LocalGenerator
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.isolation.factory import isolated
from agentrl.rollout.journal import schema, writer
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.reading import Records, RolloutKey
from agentrl.rollout.journal.records import State
from agentrl.rollout.journal.values import digest, dumps, from_png, loads, pack_logprobs, png, unpack_logprobs
from agentrl.rollout.limits import Limits
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import FIX_VOCAB_SIZE, fix_tokenizer
from agentrl.types import Encoded, Outcome, Sample, StepReward, Task, Trajectory
from tests.rollout.helpers import EOS, QUESTION, Counter, call, echo, renderer, run_and_close, tasks, turn
from tests.waiting import LONG, wait_until


def plain(value: Any) -> Any:
    """A value without classes, so that images are compared by what they show and NaN is equal to NaN."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = [spec.name for spec in fields(value) if spec.name not in ("environment", "record")]
        return {name: plain(getattr(value, name)) for name in kept}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def same(first: Trajectory, second: Trajectory) -> bool:
    return dumps(plain(first)) == dumps(plain(second))


class World:
    """Does whatever its arguments say: text, images, rewards, failures, endings."""

    def reset(self, seed: int, **_: Any) -> list[dict[str, Any]] | str:
        self.random = random.Random(seed)
        if seed % 2:
            return f" go {seed}"
        return [{"type": "text", "text": " look "}, {"type": "image", "image": picture(seed)}]

    def act(self, what: int) -> Any:
        """Act.

        Args:
            what: What to do.
        """
        if what == 1:
            return [{"type": "text", "text": "see"}, {"type": "image", "image": picture(what)}]
        if what == 2:
            return StepReward({"$image": "no mark", "é": 1}, 0.1)
        if what == 3:
            raise ValueError("no such thing")
        if what == 4:
            raise EpisodeDone("over \u2028")
        if what == 5:
            raise EnvironmentFailure("broke")
        return "x" * what

    def get_reward(self, turns: int) -> Any:
        return [0.5] * turns if self.random.random() < 0.5 else 1 / 3


def picture(number: int) -> Image.Image:
    return Image.new("RGB" if number % 3 else "P", (3, 2), number % 256)


def any_turn(session: str, ids: list[int], params: SamplingParams) -> Sample | list[int]:
    """A call, two calls, an answer or nonsense, with or without logprobs, by the turn's seed."""
    draw = random.Random(params.seed)
    text = draw.choice(
        [call("act", json.dumps({"what": draw.randrange(9)}))] * 6
        + [call("act", '{"what": 2}') + call("act", '{"what": 1}'), call("none"), call("act", '{"what": "\\ud800"}')]
        + ["Answer", '{"$image": 1}', "<call>{"]
    )
    ids = turn(text)[: params.max_tokens]
    if draw.random() < 0.5:
        return ids
    finish = "stop" if ids[-1] == EOS else "length"
    return Sample(ids, [draw.uniform(-9, 0) for _ in ids], finish, draw.randrange(5))


class Describing(Renderer):
    """Renders an image as its size in words, so that the tests need no processor."""

    def encode_prompt(self, prompt: Any, tools: Any) -> Encoded:
        return super().encode_prompt(in_words(prompt), tools)

    def continuation(self, prompt: Any, completion: Any, results: Any, sampled: Any, tools: Any) -> Continuation:
        return super().continuation(in_words(prompt), in_words(completion), in_words(results), sampled, tools)


def in_words(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def text(block: dict[str, Any]) -> dict[str, Any]:
        return block if block["type"] == "text" else {"type": "text", "text": str(block["image"].size)}

    return [
        m | {"content": [text(block) for block in m["content"]]} if isinstance(m.get("content"), list) else m
        for m in messages
    ]


def play_all(folder: Path, **options: Any) -> list[Trajectory]:
    journal = Journal(folder)
    engine = RolloutEngine(
        ScriptedGenerator(any_turn),
        Describing(fix_tokenizer("t0"), tools=True),
        environments=World,
        limits=Limits(max_completion_length=300, max_tool_iterations=5),
        failures=FailurePolicy(retries=1, delay=0, max_rate=1.0),
        journal=journal,
        **options,
    )
    rows = [Task(f"g{i}", i % 3, i, QUESTION, {"answer": i, "image": picture(i), "none": None}) for i in range(60)]
    try:
        return run_and_close(engine, rows)
    finally:
        journal.close()


def test_what_is_read_back_is_what_was_played(tmp_path):
    """Sixty episodes of all kinds, images, rewards of turns, failures and retries among them, bit for bit."""
    played = play_all(tmp_path)
    outcomes = {trajectory.outcome for trajectory in played}
    assert {Outcome.FINISHED, Outcome.ENV_DONE, Outcome.TRUNCATED, Outcome.ENV_FAILURE} <= outcomes
    with Records(tmp_path) as records:
        for trajectory in played:
            assert trajectory.record is not None
            record = records.rollout(trajectory.record)
            assert same(record.trajectory(), trajectory)
            assert record.summary.state is State.ENDED
        summaries = records.summaries()
        assert len(summaries) == 60 + sum(t.retries for t in played)
        assert {s.sampled for s in summaries if s.id == played[0].record} == {played[0].sampled_length}
        assert len(records.summaries(outcome=Outcome.ENV_FAILURE, limit=2)) == 2


def test_the_times_of_reset_prefill_and_reward_are_kept(tmp_path):
    class Slow:
        def reset(self, **columns) -> str:
            time.sleep(0.05)
            return "hello"

        def get_reward(self) -> float:
            time.sleep(0.03)
            return 1.0

    tokenizer = fix_tokenizer("t0")
    model = tiny_model("qwen3", vocab_size=FIX_VOCAB_SIZE)
    generator = LocalGenerator(model)
    journal = Journal(tmp_path)
    renderer = Renderer(tokenizer, tools=True)
    engine = RolloutEngine(
        generator, renderer, environments=Slow, limits=Limits(max_completion_length=20), journal=journal
    )
    engine.run([Task("g", 0, 7)])
    for part in (engine, generator, journal):
        part.close()
    with Records(tmp_path) as records:
        record = records.rollout(1)
    assert record.summary.resetting >= 0.05
    assert record.summary.rewarding >= 0.03
    [turn] = record.turns
    assert 0 < turn.turn.prefill < turn.turn.seconds
    assert turn.sample.prefill == turn.turn.prefill


def test_images_are_stored_once(tmp_path):
    play_all(tmp_path)
    with sqlite3.connect(tmp_path / "_rollouts.db") as database:
        [(images,)] = database.execute("SELECT count(*) FROM images")
    assert images <= 61


def test_l04_values_come_back_whatever_a_model_or_a_dataset_puts_into_them():
    """L04: separators that other readers break lines at; keys that look like our marks; lone surrogates."""
    image = Image.new("LA", (2, 3), (7, 9))
    for value in [
        "a\u2028b\u0085c",
        {"$image": "0" * 64, "$$image": {"$": [1, {"$text": None}]}},
        {"a": image, "$image": "x"},
        ["\ud800", {"$b": "\ud800"}],
        {"bytes": b"\xff\x00", "float": 0.1, "nan": [1e-300, -0.0]},
        'say "$5" \\"$',
    ]:
        images: dict[str, Image.Image] = {}
        text = dumps(value, images)
        again = loads(text, lambda key, images=images: from_png(png(images[key])))
        assert dumps(again) == text
        assert set(map(str, again)) == set(map(str, value))
    assert digest(from_png(png(image))) == digest(image)


def test_logprobs_are_exact():
    values = [-0.1, -1e-310, float("-inf"), -123.4567890123456789]
    assert unpack_logprobs(pack_logprobs(values)) == values


def play_without_end(folder: Path, told_path: Path) -> None:
    """Tell in a file which turn is asked for, before it is sampled."""
    told = os.open(told_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asked: collections.Counter[str] = collections.Counter()

    def policy(session: str, ids: list[int], params: SamplingParams) -> list[int]:
        os.write(told, f"{session} {asked[session]}\n".encode())
        asked[session] += 1
        return turn(call("echo", json.dumps({"text": "x" * asked[session]})))

    RolloutEngine(ScriptedGenerator(policy), renderer(), tools=[echo], limits=Limits(), journal=Journal(folder)).run(
        tasks(40)
    )


def finished_turns_after_a_kill(folder: Path, seconds: float) -> tuple[int, int]:
    """Play for a while in another process, kill it, and count the turns that were finished, and those of them lost."""
    told = folder / "told"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rollout.test_journal"])
    process = context.Process(target=play_without_end, args=(folder, told))
    process.start()
    try:
        while not told.exists() or "/1 1\n" not in told.read_text():  # a slow reader may see it late
            assert process.is_alive()
            time.sleep(0.002)
        time.sleep(seconds)
    finally:
        process.kill()
        process.join()
    finished = {}
    for line in told.read_text().splitlines():
        session, before = line.split()
        finished[int(session.split("/")[1])] = int(before)
    with sqlite3.connect(folder / "_rollouts.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with Records(folder) as records:
        kept = {summary.member: summary.turns for summary in records.summaries()}
        for summary in records.summaries(limit=3):
            trajectory = records.rollout(summary.id).trajectory()
            assert len(trajectory.turns) == summary.turns
    return sum(finished.values()), sum(max(0, n - kept.get(member, 0)) for member, n in finished.items())


KILLS = [0.05, 0.3]


@pytest.mark.parametrize(
    "seconds", [*KILLS, *(pytest.param(0.05 * i + 0.013, marks=pytest.mark.slow) for i in range(1, 9))]
)
def test_kill_9_loses_no_finished_turn(seconds, tmp_path):
    """At any moment, a commit among them: what was finished before the next sample is in the file, which is whole."""
    finished, lost = finished_turns_after_a_kill(tmp_path, seconds)
    assert finished > 0
    assert lost == 0


class LongPrompt(Counter):
    def reset(self, **_: Any) -> str:
        super().reset()
        return "x" * 4000


def limited(monkeypatch: pytest.MonkeyPatch, pages: list[int]) -> None:
    """Make every journal as large as `pages` allow, as a full disk does; SQLite says the same of both."""
    original = writer.open_for_writing

    def open_(path: Path) -> sqlite3.Connection:
        connection = original(path)
        connection.execute(f"PRAGMA max_page_count={pages[0]}")
        return connection

    monkeypatch.setattr(writer, "open_for_writing", open_)
    monkeypatch.setattr(writer, "LONGEST_DELAY", 0.05)


def test_a_full_disk_pauses_the_run_and_costs_nothing(tmp_path, monkeypatch, caplog):
    """It waits, says where and what to do, goes on when there is room; the wait counts against no rollout's time."""
    pages = [12]
    limited(monkeypatch, pages)
    played: list[Trajectory] = []
    with caplog.at_level(logging.WARNING):
        script = [[turn(call("inc")), turn("end")]] * 8
        journal = Journal(tmp_path)
        engine = RolloutEngine(
            ScriptedGenerator(script),
            renderer(),
            environments=LongPrompt,
            limits=Limits(rollout_timeout=5.0),
            journal=journal,
        )
        running = threading.Thread(target=lambda: played.extend(run_and_close(engine, tasks(8))))
        running.start()
        wait_until(lambda: "waits for its journal" in caplog.text)
        time.sleep(5.5)
        assert running.is_alive()
        pages[0] = 100_000
        running.join(LONG)
        journal.close()
    assert str(journal.path) in caplog.text
    assert "make room" in caplog.text
    assert "can be written again" in caplog.text
    assert [t.outcome for t in played] == [Outcome.FINISHED] * 8
    with Records(tmp_path) as records:
        assert all(same(records.rollout(t.record).trajectory(), t) for t in played if t.record)


def test_a_lock_that_another_process_holds_is_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(writer, "LONGEST_DELAY", 0.05)
    journal = Journal(tmp_path)
    journal.begin_run({})
    wait_until(lambda: journal.path.exists() and schema.check_file(journal.path) is None)
    journal.close()
    other = sqlite3.connect(journal.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.WARNING):
        journal.begin_run({"second": 1})
        wait_until(lambda: "another process holds a lock" in caplog.text)
        other.execute("ROLLBACK")
        wait_until(lambda: "can be written again" in caplog.text)
    journal.close()
    other.close()
    with Records(tmp_path) as records:
        assert [run.info for run in records.runs()] == [{}, {"second": 1}]


def test_a_disk_that_stays_full_does_not_keep_the_process_from_ending(tmp_path, monkeypatch):
    limited(monkeypatch, [3])
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.2)
    journal = Journal(tmp_path)
    journal.begin_run({"text": "x" * 100_000})
    journal.close()
    wait_until(lambda: journal._writer._broken)  # the thread hears of it in its own time
    with pytest.raises(RolloutError, match=r"rollouts\.db cannot be written any more"):
        journal.begin_run({})


def test_foreign_newer_and_older_files_are_refused(tmp_path):
    path = tmp_path / "_rollouts.db"
    path.write_text("a letter")
    with pytest.raises(ConfigurationError, match=r"rollouts\.db is no journal of agentrl"):
        Journal(tmp_path)
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE rollouts (id)")
    with pytest.raises(ConfigurationError, match="is no journal"):
        Records(tmp_path)
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA application_id={schema.APPLICATION_ID}")
        database.execute(f"PRAGMA user_version={schema.VERSION + 1}")
    with pytest.raises(ConfigurationError, match=rf"newer agentrl \(journal version {schema.VERSION + 1}; this one"):
        Journal(tmp_path)
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version={schema.VERSION - 1}")
    with pytest.raises(ConfigurationError, match=r"older agentrl .* use another output_dir"):
        Journal(tmp_path)
    path.unlink()
    with pytest.raises(ConfigurationError, match="there is no journal"):
        Records(tmp_path)


def test_old_steps_are_pruned_with_their_images(tmp_path):
    journal = Journal(tmp_path, keep_steps=2)
    script = [[turn(call("act", '{"what": 1}')), turn("end")]] * 6
    engine = RolloutEngine(
        ScriptedGenerator(script), Describing(fix_tokenizer(), tools=True), environments=World, journal=journal
    )
    for step in range(6):
        journal.open_window(kind="train", step=step, identity=[0, step])
        engine.release(engine.run([Task("g", 0, 2 * step, QUESTION)]))
    engine.close()
    journal.close()
    with Records(tmp_path) as records:
        assert [summary.step for summary in records.summaries()] == [3, 4, 5]
    with sqlite3.connect(journal.path) as database:
        assert database.execute("SELECT count(*) FROM images").fetchone() == (4,)  # three prompts and one result
        assert database.execute("SELECT count(*) FROM turns").fetchone() == (6,)


def test_reading_and_viewing_need_neither_torch_nor_transformers():
    code = "import sys, agentrl.rollout.journal.export, agentrl.viewer.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "agentrl.rollout.journal.reading" in loaded
    assert not {"torch", "transformers"} & set(loaded)


def test_rollouts_are_named_by_process_and_number():
    assert RolloutKey.parse("57") == (0, 57)
    assert RolloutKey.parse("1:57") == (1, 57)
    for text in ("", "x", "1:", "-1"):
        with pytest.raises(ConfigurationError, match="names no rollout"):
            RolloutKey.parse(text)


def test_an_engine_without_a_journal_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = RolloutEngine(ScriptedGenerator([[turn("a")]]), renderer())
    assert [t.record for t in run_and_close(engine, tasks(1))] == [None]
    assert list(tmp_path.iterdir()) == []


def test_an_isolated_environment_keeps_its_promise():
    """Known without starting a process."""

    class Promising(Counter):
        replayable = True

    assert isolated(Promising)._proxy.replayable is True
    assert isolated(Counter)._proxy.replayable is False
