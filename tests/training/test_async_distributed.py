"""Two processes play ahead, each its own share: alike in what they start, never waiting for each other in vain."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import TOKENIZER, chat_rows
from tests.training.runs import local, logged, make_trainer, rows, step_logs, untimed, weights
from tests.training.test_async import ROUNDED, Buttons, Unhurried, chat_model, pressing
from tests.training.worlds import run_world

pytestmark = pytest.mark.slow


class Uneven(Buttons):
    """A tool that is slow in one of the processes, at some times."""

    async def press(self) -> str:
        """Press the button."""
        await asyncio.sleep(0.05 if os.environ["RANK"] == "1" and int(self.count * 10) % 2 else 0.0)
        self.count += 1
        return "pressed"


def train_unevenly(folder: Path, steps: int, resume: bool) -> dict[str, Any]:
    played: list[int] = []

    def reward(row: list[int], **_: Any) -> list[float]:
        played.extend(row)
        return [float(r) for r in row]

    trainer = make_trainer(
        "async_grpo", folder, max_staleness=2, max_steps=steps, per_device_train_batch_size=2, shuffle_dataset=False,
        generator=pressing, dataset=chat_rows(12, row=list(range(12))), reward=reward, model=chat_model(),
        max_completion_length=120, save_strategy="steps", save_steps=2, learning_rate=1e-3,
        keywords={"environment_factory": Uneven, "processing_class": TOKENIZER},
    )  # fmt: skip
    Unhurried(trainer)
    trainer.train(resume_from_checkpoint=resume or None)
    return {"weights": weights(trainer), "logs": step_logs(trainer), "played": played}


def test_processes_of_unequal_speed_stay_in_step_and_resume(tmp_path):
    """Each trains its slice of each window once, in order; both log the same and end with the same weights."""
    first, second = run_world(train_unevenly, tmp_path / "a", tmp_path, 4, False)
    assert [first["played"], second["played"]] == [[0, 0, 2, 2, 4, 4, 6, 6], [1, 1, 3, 3, 5, 5, 7, 7]]
    assert first["logs"] == second["logs"]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert max(log["async/staleness/max"] for log in first["logs"]) == 2
    first, second = run_world(train_unevenly, tmp_path / "b", tmp_path, 6, True)
    assert [first["played"][-4:], second["played"][-4:]] == [[8, 8, 10, 10], [9, 9, 11, 11]]
    assert [log["rewards/reward/mean"] for log in first["logs"]] == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5]


def train(algorithm: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    trainer = make_trainer(
        algorithm, folder, generator=local, dataset=rows(8), per_device_train_batch_size=2, max_steps=3,
        max_completion_length=6, **options,
    )  # fmt: skip
    trainer.train()
    return {"weights": weights(trainer), "logs": step_logs(trainer), "rewards": logged(trainer, "reward")}


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_staleness_0_is_the_trainer_that_is_not_async_in_two_processes_too(algorithm, tmp_path):
    """Invariant 9."""
    ahead = run_world(train, tmp_path / "a", f"async_{algorithm}", tmp_path, {"max_staleness": 0})
    sync = run_world(train, tmp_path / "s", algorithm, tmp_path, {})
    for ours, theirs in zip(ahead, sync, strict=True):
        assert [n for n in ours["weights"] if not torch.equal(ours["weights"][n], theirs["weights"][n])] == []
        for log, expected in zip(ours["logs"], theirs["logs"], strict=True):
            for key in untimed(expected) - ROUNDED:
                assert log[key] == expected[key], key
