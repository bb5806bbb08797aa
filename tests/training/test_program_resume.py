"""A training whose rollouts are played by programs of the user's goes on from its journal after `kill -9`."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from datasets import Dataset

from agentrl.rollout.journal.reading import Records
from agentrl.rollout.journal.records import State
from tests.training.helpers import TOKENIZER
from tests.training.runs import make_trainer
from tests.training.test_journal_resume import (
    SAVED,
    STEPS,
    Turns,
    assert_same,
    die,
    game,
    kill,
    played,
    resume,
    turns_kept,
)

ROLLOUTS = 4
"""Of each step."""

dying: Path | None = None
"""The run whose process is to be killed in its last step, once a rollout of that has ended."""


async def chat(base_url: str, api_key: str, task: Any) -> float:
    """Asks twice; rewarded by what the model said."""
    messages = list(task.prompt)
    if dying is not None and task.member == 1:
        await _die_when_one_has_ended(dying)
    async with httpx.AsyncClient(base_url=base_url, verify=False) as http:
        for _ in range(2):
            answer = await http.post("/chat/completions", json={"model": "m", "messages": messages})
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and?"}]
    return float(len(messages[-2]["content"]) % 5)


async def _die_when_one_has_ended(folder: Path) -> None:
    before = ROLLOUTS * (STEPS - 1)
    with Records(folder) as records:
        while (ended := len(records.summaries())) >= before:
            if ended > before:
                die()
            await asyncio.sleep(0.01)


def chat_and_die(folder: Path, moment: str, number: int, options: dict[str, Any], threads: int) -> None:
    global dying
    dying = folder
    game(folder, Turns(), **options).train()


def test_an_agents_run_that_was_killed_reuses_what_had_ended(tmp_path, monkeypatch):
    """The last step is interrupted in its midst: rollouts that ended are not played again, and the run is the same."""
    monkeypatch.setattr("tests.training.test_journal_resume.play_and_die", chat_and_die)
    options: dict[str, Any] = {"keywords": {"agent": chat, "processing_class": TOKENIZER}}
    whole = game(tmp_path / "whole", Turns(), **options)
    whole.train()
    kill(tmp_path / "killed", "program", 0, **options)
    kept = turns_kept(tmp_path / "killed")
    resumed, sampled = resume(tmp_path / "killed", **options)
    a_step = 2 * ROLLOUTS
    assert a_step < kept < 2 * a_step
    assert sampled == 2 * a_step - kept
    assert_same(resumed, whole)
    assert played(tmp_path / "killed") == played(tmp_path / "whole")


class Playing:
    """A `rollout_func` that plays by the prompts alone, and kills its process, or breaks, when it is called again."""

    def __init__(self, deadly: int | None = None, *, odd: bool = False) -> None:
        self.deadly, self.odd, self.calls = deadly, odd, 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Play one episode for each prompt."""
        self.calls += 1
        if self.calls == self.deadly:
            if self.odd:
                raise KeyboardInterrupt
            die()
        answer: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "speed": []}
        for number, prompt in enumerate(prompts):
            draw = random.Random(f"{prompt} {number}")
            ids = [draw.randrange(132, 200) for _ in range(draw.randint(3, 6))]
            answer["prompt_ids"].append([7, 8])
            answer["completion_ids"].append(ids)
            answer["logprobs"].append([draw.uniform(-9, 0) for _ in ids])
            answer["env_mask"].append([0, *(draw.randrange(2) for _ in ids[2:]), 1])
            answer["speed"].append(
                {"first": draw.random(), "odd": np.float32(1)} if self.odd else {"first": draw.random()}
            )
        return answer


def by_speed(speed: list[dict[str, float]], **_: Any) -> list[float]:
    return [one["first"] for one in speed]


def custom(folder: Path, playing: Playing) -> Any:
    """A training of four steps with a checkpoint after two."""
    prompts = Dataset.from_list([{"prompt": f"p{i}"} for i in range(8)])
    return make_trainer(
        "grpo",
        folder,
        keywords={"rollout_func": playing},
        reward=by_speed,
        dataset=prompts,
        save_strategy="steps",
        save_steps=SAVED,
        max_steps=STEPS,
    )


def custom_and_die(folder: Path, moment: str, number: int, options: Any, threads: int) -> None:
    custom(folder, Playing(number)).train()


def test_what_a_rollout_func_made_is_not_asked_for_again(tmp_path, monkeypatch):
    """The third batch was finished and the fourth was not: one call is left, and the run is the same (`env_mask`,
    fields for the rewards and logprobs that the loss reads are given back as they were)."""
    monkeypatch.setattr("tests.training.test_journal_resume.play_and_die", custom_and_die)
    whole = custom(tmp_path / "whole", Playing())
    whole.train()
    kill(tmp_path / "killed", "call", STEPS)
    playing = Playing()
    resumed = custom(tmp_path / "killed", playing)
    resumed.train(resume_from_checkpoint=True)
    assert playing.calls == 1
    assert_same(resumed, whole)
    with Records(tmp_path / "killed") as records:
        summaries = records.summaries(superseded=True)
        assert [s.step for s in summaries] == [step for step in range(STEPS) for _ in range(ROLLOUTS)]
        assert all(s.rewards for s in summaries)


def test_what_would_come_back_otherwise_is_asked_for_again(tmp_path, caplog):
    """A NumPy number in a field: the batch is played again, and the page shows it once."""
    with pytest.raises(KeyboardInterrupt):
        custom(tmp_path, Playing(STEPS, odd=True)).train()
    playing = Playing(odd=True)
    custom(tmp_path, playing).train(resume_from_checkpoint=True)
    assert playing.calls == STEPS - SAVED
    assert "the field 'speed' of a rollout (float32)" in caplog.text
    with Records(tmp_path) as records:
        states = [s.state for s in records.summaries(superseded=True) if s.step == SAVED]
    assert states == [State.SUPERSEDED] * ROLLOUTS + [State.ENDED] * ROLLOUTS
