"""Rollouts of programs (`agent`, `rollout_func`) in the journal: as they were played, and not played again."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from agentrl import Agent
from agentrl.errors import ConfigurationError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.journal.export import export
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.journal.records import State
from agentrl.rollout.limits import Limits
from agentrl.rollout.replay import replay
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import FinishReason, Outcome, Row, Sample, Task, Trajectory, Turn
from agentrl.viewer.shown import Shown
from tests.rollout.helpers import QUESTION, Counter, encode, renderer, turn
from tests.rollout.test_journal import same

asked: list[int] = []
"""The members whose program was started."""


async def program(base_url: str, api_key: str, task: Task) -> Any:
    """Asks twice, forks with a rewritten history, and earns its member's number; the last member breaks."""
    asked.append(task.member)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
        messages: list[Any] = list(task.prompt or [])
        for question in ("more", "go on"):
            answer = await api.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": question}]
        if task.member == 2:
            raise OSError("the program's disk is full")
        await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "sum up"}])
    return float(task.member) if task.member else {"note": ["é", 1, None], "picture": Image.new("L", (2, 1), 7)}


def said(session: str, ids: list[int], params: Any) -> Sample:
    words = turn(f"turn {params.seed % 10}")
    return Sample(words, [-0.25 * (i + 1) for i in range(len(words))], FinishReason.STOP, 3, ((1, 4),), 0.5)


def play(folder: Path, **columns: Any) -> list[Trajectory]:
    """Three rollouts of the program in one window, which is the same one whenever this is called."""
    asked.clear()
    journal = Journal(folder)
    engine = RolloutEngine(
        ScriptedGenerator(said),
        renderer(),
        limits=Limits(),
        failures=FailurePolicy(retries=1, delay=0, max_rate=1.0),
        journal=journal,
        agent=Agent(program),
    )
    journal.begin_run({}, resume=True)
    journal.open_window(kind="train", step=0, identity=0, policy="p")
    try:
        return engine.run([Task("g", member, 7, QUESTION, columns) for member in range(3)])
    finally:
        engine.close()
        journal.close()


def test_an_agents_rollout_is_read_back_as_it_was_played(tmp_path):
    """Rows, forks, messages, versions of weights, reward, fields with an image; failed attempts too."""
    played = play(tmp_path)
    assert [len(t.rows) for t in played] == [2, 2, 1]
    assert [t.outcome for t in played] == [Outcome.FINISHED, Outcome.FINISHED, Outcome.ENV_FAILURE]
    with Records(tmp_path) as records:
        for trajectory in played:
            record = records.rollout(trajectory.record)
            assert same(record.trajectory(), trajectory)
            assert record.summary.state is State.ENDED
            assert record.summary.sampled == trajectory.sampled_length
            for kept, one in zip(record.turns, trajectory.turns, strict=True):
                row = trajectory.rows[one.row]
                assert kept.sample.ids == row.completion_ids[one.start : one.stop]
                assert kept.sample.logprobs == row.logprobs[one.start : one.stop]
                assert kept.turn.weights_version == 3
                assert kept.turn.updates == ((1, 4),)
                assert kept.turn.prefill == 0.5
        first = records.rollout(played[1].record)
        assert [m["content"] for t in first.turns for m in (t.message, *t.replies)] == [
            *(message["content"] for message in played[1].completion)
        ]
        assert [[m["role"] for m in t.replies] for t in first.turns] == [["user"], [], []]
        assert [s.member for s in records.summaries(outcome=Outcome.ENV_FAILURE)] == [2, 2]
        assert export(records, tmp_path / "rows.jsonl") == 4
        with pytest.raises(ConfigurationError, match="played by a rollout_func or an agent"):
            replay(first, Counter)
        with pytest.raises(ConfigurationError, match="played by a rollout_func or an agent"):
            first.before(1)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert lines[1]["rows"][1]["prompt_ids"] == played[1].forks[0].prompt_ids


def test_an_agents_finished_rollout_is_not_played_again(tmp_path):
    """The one that broke is, since it is no signal. A date in the dataset stays one: the journal has its text."""
    day = date(2026, 11, 30)
    played = play(tmp_path, day=day)
    again = play(tmp_path, day=day)
    assert set(asked) == {2}
    assert same(again[0], played[0])
    assert same(again[1], played[1])
    assert again[0].task.columns == {"day": day}
    assert [t.record for t in again[:2]] == [t.record for t in played[:2]]


def test_the_page_shows_what_a_program_said_between_turns(tmp_path):
    record = play(tmp_path)[1].record
    shown = Shown([tmp_path])
    content = shown.rollout(0, 0, record)
    assert [[reply["blocks"][0]["text"] for reply in turn["replies"]] for turn in content["turns"]] == [
        ["more"],
        [],
        [],
    ]
    assert content["turns"][0]["message"]["blocks"][0]["text"].startswith("turn ")
    assert content["turns"][0]["at"] is None
    assert len(content["rows"]) == 2
    assert (0, record) in shown.indexes[0].search("more")
    shown.close()


def handed_in(**fields: Any) -> Trajectory:
    """A rollout of a `rollout_func` whose row begins and ends with tokens of the environment."""
    values: dict[str, Any] = {
        "prompt_ids": encode("Q:"),
        "completion": [{"role": "assistant", "content": "all of it"}],
        "completion_ids": [5, 6, 7, 8, 9],
        "loss_mask": [0, 1, 0, 1, 0],
        "logprobs": [0.0, -1.5, 0.0, math.nan, 0.0],
        "outcome": Outcome.FINISHED,
        "turns": [Turn(1, 2, FinishReason.STOP), Turn(3, 4, FinishReason.STOP)],
    }
    return Trajectory(task=Task("g", 0, 7, QUESTION), prompt=QUESTION, **(values | fields))


def write(folder: Path, *trajectories: Trajectory) -> None:
    journal = Journal(folder)
    journal.open_window(kind="train", step=0, identity=0, policy="p")
    asyncio.run(journal.keep(trajectories, started=0.0))
    journal.close()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"completion": "text of a plain prompt", "extra": {"speed": 0.1, "bytes": b"\xff", "notes": [{"$image": 1}]}},
        {"loss_mask": [0] * 5, "logprobs": [0.0] * 5, "turns": []},
        {"completion_ids": [], "loss_mask": [], "logprobs": [], "turns": [], "completion": ""},
        {"forks": [Row([1], [2], [1], [-0.5])]},
    ],
)
def test_a_row_of_any_mask_is_read_back_as_it_was_handed_in(fields, tmp_path):
    """Tokens of the environment before the first turn and after the last one are neither lost nor moved."""
    trajectory = handed_in(**fields)
    write(tmp_path, trajectory)
    with Records(tmp_path) as records:
        record = records.rollout(trajectory.record)
    assert same(record.trajectory(), trajectory)
    assert record.whole.exact
    if trajectory.turns:
        text = trajectory.completion if isinstance(trajectory.completion, str) else "all of it"
        assert [t.message["content"] for t in record.turns] == [text, ""]


def test_a_batch_of_rollouts_is_written_whole_or_not_at_all(tmp_path):
    """The second one cannot be written, so the first one is not there either."""
    journal = Journal(tmp_path)
    with pytest.raises(Exception, match="integer"):
        asyncio.run(journal.keep([handed_in(), handed_in(completion_ids=["a"])], started=0.0))
    journal.close()
    with Records(tmp_path) as records:
        assert records.summaries() == []


@pytest.mark.parametrize("value", [np.zeros(2), (1, 2), [{"a": {1, 2}}], {3: 4}], ids=str)
def test_a_field_that_would_come_back_otherwise_is_named_and_its_rollout_played_again(value, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        write(tmp_path, handed_in(extra={"speed": value}), handed_in(extra={"speed": value}))
    assert [record.message for record in caplog.records if "'speed'" in record.message][1:] == []
    assert "plays such rollouts again" in caplog.text
    journal = Journal(tmp_path)
    journal.begin_run({}, resume=True)
    journal.open_window(kind="train", step=0, identity=0, policy="p")
    assert asyncio.run(journal.recorded(Task("g", 0, 7, QUESTION))) is None
    journal.close()


def test_pruning_takes_rows_of_programs_with_their_rollouts(tmp_path):
    journal = Journal(tmp_path, keep_steps=1)
    for step in range(4):
        journal.open_window(kind="train", step=step, identity=step)
        asyncio.run(journal.keep([handed_in()], started=0.0))
    journal.close()
    with Records(tmp_path) as records:
        assert [s.step for s in records.summaries()] == [2, 3]
        assert records.journals[0].execute("SELECT count(*) FROM trajectory_rows").fetchone()[0] == 2
