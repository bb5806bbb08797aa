"""What a trainer tells the journal: which run and window its rollouts belong to, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.rollout.journal.entry import Window
from agentrl.rollout.journal.journal import Journal
from agentrl.training.arguments import RolloutConfig
from agentrl.training.fingerprint import policy_digest, settings_digest, weights_digest
from agentrl.types import Task, Trajectory


class Recorder:
    """Keeps the books of one process; without a journal it does nothing.

    Args:
        args: Says whether there is a journal, and where.
        algorithm: Of the training, for whoever reads the journal.
        model: The policy.

    Attributes:
        journal: The journal, for the engine.
    """

    def __init__(self, args: RolloutConfig, algorithm: str, model: torch.nn.Module) -> None:
        self._args = args
        self._algorithm = algorithm
        self._model = model
        self.journal: Journal | None = None
        if args.journal:
            folder = args.output_dir or "."
            self.journal = Journal(folder, rank=args.process_index, keep_steps=args.journal_keep_steps)

    def begin_run(self, *, resume: bool) -> None:
        """Training begins, or goes on."""
        if self.journal is not None:
            name = getattr(getattr(self._model, "config", None), "_name_or_path", "")
            info = {"algorithm": self._algorithm, "model": name, "config": self._args.to_dict()}
            self.journal.begin_run(info, resume=resume)

    def open_window(self, identity: Any, step: int, settings: Any) -> None:
        """A window is about to be played.

        Args:
            identity: Which window of training it is, None for one of evaluation.
            step: Optimizer steps so far.
            settings: What decides, besides weights and tasks, what is sampled.
        """
        if self.journal is None:
            return
        train = identity is not None
        policy = policy_digest(self._model, settings) if train else ""
        self.journal.open_window(
            kind="train" if train else "eval", step=step, identity=identity, policy=policy, weights_version=step
        )

    def open_window_ahead(
        self, identity: Any, step: int, settings: Any, *, version: int, oldest_version: int, anew: bool
    ) -> Window:
        """A window of training is about to be played, by weights that change meanwhile.

        Args:
            identity: Which one.
            step: Optimizer steps before it is trained on.
            settings: What decides, besides weights and tasks, what is sampled.
            version: Of the weights that begin to play it.
            oldest_version: What older weights have drawn of it, before the run was cut off, is played again.
            anew: All that was played of it before is played again.
        """
        if self.journal is None:
            return Window()
        return self.journal.open_window(
            kind="train",
            step=step,
            identity=identity,
            policy=settings_digest((settings, step)),
            weights_version=version,
            anew=anew,
            oldest_version=oldest_version,
        )

    def weights(self) -> dict[int, str]:
        """The digest that each version of the weights had in the run so far, also before it was cut off."""
        return {} if self.journal is None else self.journal.weights()

    def add_weights(self, version: int) -> str:
        """Note which weights the policy has now, under this version; gives their digest."""
        if self.journal is None:
            return ""
        digest = weights_digest(self._model)
        self.journal.add_weights(version, digest)
        return digest

    async def played(self, tasks: Sequence[Task]) -> list[Trajectory] | None:
        """What a `rollout_func` made of tasks before; None unless it is there of all of them.

        A function that was given some of its prompts only might play them otherwise.
        """
        if self.journal is None:
            return None
        records = await asyncio.gather(*map(self.journal.recorded, tasks))
        found = [record for record in records if record is not None]
        if len(found) < len(tasks):
            for record in found:
                self.journal.supersede(record)
            return None
        return [replace(record.trajectory(), task=task) for record, task in zip(found, tasks, strict=True)]

    async def keep(self, trajectories: Sequence[Trajectory], started: float) -> None:
        """Keep what a `rollout_func` made, from when it was called; returns when that is durable."""
        if self.journal is not None:
            await self.journal.keep(trajectories, started=started)

    def add_rewards(
        self, trajectories: Sequence[Trajectory], names: Sequence[str], rewards: Sequence[Sequence[float | None]]
    ) -> None:
        """The rewards of trajectories are known."""
        if self.journal is not None:
            self.journal.add_rewards(trajectories, names, rewards)

    def add_advantages(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> None:
        """The advantages of R trajectories are known, (R,) or (R, K) for each turn."""
        if self.journal is None:
            return
        if advantages.dim() == 1:
            rows = advantages[:, None].tolist()
        else:
            rows = [row[: len(t.turns)] for row, t in zip(advantages.tolist(), trajectories, strict=True)]
        self.journal.add_advantages(trajectories, rows)

    def add_log(self, step: int, logs: Mapping[str, Any]) -> None:
        """Something was logged; the first process keeps it for all."""
        if self.journal is not None and self._args.process_index == 0:
            self.journal.add_log(step, {name: value for name, value in logs.items() if isinstance(value, int | float)})

    def close(self) -> None:
        """Write everything; whatever is told later opens the journal again."""
        if self.journal is not None:
            self.journal.close()
