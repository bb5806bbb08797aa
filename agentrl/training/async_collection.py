"""Collecting windows that are played ahead, while the optimizer works on earlier ones.

Windows are trained on in the order of the schedule, each as a whole; what is asynchronous is when they are played. A
window may start once the weights that the generator has are at most `max_staleness` optimizer steps older than those
that will train on it, which is known beforehand. So staleness is bounded by what is started, nothing that was played is
thrown away, and every process decides alike without asking the others. Starting is all that the trainer does; episodes
then go on by themselves on the engine's loop, across updates of the weights.

What a run that was killed has played of a window, it finds in the journal when it starts that again. Its last
checkpoint may lie behind: then tokens were drawn by weights that are gone, though trained again from the same rollouts
they come out the same where arithmetic is deterministic. So the journal knows weights by digests. A window is taken
from it if the weights that start it are those that had the same version before: all that drew its tokens are then at
most `max_staleness` steps away from them. And such a token counts as drawn by the very weights that train on it only if
those, too, are the same as before; else as a stale one, whose ratio is against its recorded logprob.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.errors import ConfigurationError
from agentrl.generation.base import Phased
from agentrl.generation.threaded import ThreadedGenerator
from agentrl.rollout.journal.entry import Window
from agentrl.rollout.play import Play
from agentrl.training.async_arguments import AsyncOptions
from agentrl.training.batching import MicroBatch
from agentrl.training.collection import Collector
from agentrl.training.draws import Draw
from agentrl.training.finished import FinishedRow, Place
from agentrl.training.metrics import MetricStore
from agentrl.training.windows import TrainingRow, drawn_before, mark_stale, staleness
from agentrl.types import Task, Trajectory


class Upcoming(NamedTuple):
    """A window to come.

    Attributes:
        step: The optimizer step that first trains on it.
        identity: Which window.
        tasks: This process's tasks.
    """

    step: int
    identity: Any
    tasks: list[Task]


@dataclass(slots=True)
class Ahead:
    """A window that was started.

    Attributes:
        tasks: This process's tasks.
        rows: Which of them are being played, in the order of the play.
        play: Those.
        window: Its place in the journal, which has what was played of it before the run was cut off.
        parts: What is rewarded already, and which rows that is.
    """

    tasks: list[Task]
    rows: list[int]
    play: Play
    window: Window
    parts: list[tuple[list[int], Draw]] = field(default_factory=list)

    @property
    def finished(self) -> dict[int, Trajectory]:
        """Episodes that have ended and are not rewarded yet, by row."""
        rewarded = {row for rows, _ in self.parts for row in rows}
        return {self.rows[i]: t for i, t in list(self.play.finished.items()) if self.rows[i] not in rewarded}


def may_start(step: int, version: int, max_staleness: int) -> bool:
    """Whether a window may start.

    Args:
        step: The optimizer step that first trains on it.
        version: Optimizer steps behind the weights that would begin to play it.
        max_staleness: How many steps these may differ by.
    """
    return step - version <= max_staleness


class AsyncCollector(Collector):
    """A collector that plays ahead; see `Collector` for the arguments.

    Raises:
        ConfigurationError: What samples cannot do so while the policy is trained.
    """

    args: AsyncOptions

    def __init__(self, *args: Any, **keywords: Any) -> None:
        if keywords["rollout_func"] is not None:
            raise ConfigurationError(
                "rollout_func plays in the thread of the trainer, so nothing could be played ahead; use the trainer of "
                "the same name without Async, or give `tools` or an `environment_factory` instead of it."
            )
        super().__init__(*args, **keywords)
        self._ahead: dict[Any, Ahead] = {}
        self._recovered: dict[Place, FinishedRow] = {}
        self._before: dict[int, str] | None = None  # weights of the run until it was cut off, by version
        self._noted: int | None = None
        self._as_before = False
        self.restart_clocks()

    def _prepare_generator(self) -> None:
        if not self.args.max_staleness:
            return
        if self.args.use_vllm and self.args.vllm_mode == "colocate":
            raise ConfigurationError(
                f"max_staleness={self.args.max_staleness} with vllm_mode='colocate': that engine rests while the "
                "policy is trained, so nothing could be played meanwhile; use vllm_mode='server', or max_staleness=0."
            )
        if isinstance(self.generator, ThreadedGenerator):
            self.generator.own_weights()
        if not self.generator.owns_weights:
            raise ConfigurationError(
                f"max_staleness={self.args.max_staleness}: a {type(self.generator).__name__} samples from the weights "
                "that are being trained, so it must rest meanwhile; use a generator that owns its weights "
                "(`owns_weights`), or max_staleness=0."
            )

    # Ahead of the trainer -----------------------------------------------------------------------------------

    def keep_pace(self, upcoming: Iterable[Upcoming]) -> None:
        """Begin an optimizer step: hand the weights over, and start the windows whose time has come.

        With `max_staleness=0` a window starts when it is asked for, like those of a `Collector`.

        Args:
            upcoming: The window that the step begins, if it begins one, and then all windows after it, in order.
        """
        began = time.monotonic()
        if self._synced is None or self.trainer.state.global_step % self.args.weight_sync_steps == 0:
            with self.clock.part("sync"):
                self._sync()
        elif isinstance(self.generator, Phased):  # its weights stay; a server may have lost them
            self.generator.wake()
        self._syncing += time.monotonic() - began
        assert self._synced is not None
        self.note_weights()
        for window in upcoming if self.args.max_staleness else ():
            if not may_start(window.step, self._synced, self.args.max_staleness):
                break
            if window.identity not in self._ahead:
                self._ahead[window.identity] = self._start(window.identity, window.tasks, window.step)

    def _start(self, identity: Any, tasks: list[Task], step: int | None = None) -> Ahead:
        """Play what is not finished already."""
        step = self.trainer.state.global_step if step is None else step
        window = self._open_window_ahead(identity, step)
        kept = {
            row: self._recovered.pop((task.group, task.member)).of(task)
            for row, task in enumerate(tasks)
            if self._may_use(self._recovered.get((task.group, task.member)), step)
        }
        rows = [row for row in range(len(tasks)) if row not in kept]
        ahead = Ahead(tasks, rows, self.engine.start([tasks[row] for row in rows]), window)
        if kept:
            ahead.parts.append((list(kept), Draw.of(kept.values())))
        return ahead

    def _may_use(self, kept: FinishedRow | None, step: int) -> bool:
        """Whether there is a rollout that is not too stale for a step: `max_staleness` may be another one by now."""
        oldest = step - self.args.max_staleness
        return kept is not None and all(turn.weights_version >= oldest for turn in kept.trajectory.turns)

    def _take(self, identity: Any, tasks: list[Task]) -> Draw:
        """Wait for a window; in evaluation play one."""
        if identity is None:
            return super()._take(identity, tasks)
        ahead = self._ahead.pop(identity, None) or self._start(identity, tasks)
        began = time.monotonic()
        with self.clock.part("rollouts"), self._interruptible():
            self.engine.wait(ahead.play, [other.play for other in self._ahead.values()])
        self._waited += time.monotonic() - began
        self._reward_finished(ahead)
        draw = Draw.join(len(tasks), ahead.parts)
        self._distrust(draw, set(range(len(tasks))).difference(ahead.rows), ahead.window)
        return draw

    def _draw_again(self, identity: Any, tasks: list[Task]) -> Draw:
        """In the journal too they belong to this window, not to the one that was begun last."""
        window = self._open_window_ahead(identity, self.trainer.state.global_step, again=True)
        draw = super()._draw_again(identity, tasks)
        self._distrust(draw, (), window)
        return draw

    def _distrust(self, draw: Draw, kept: Collection[int], window: Window) -> None:
        """Count nothing as drawn by the weights of now that was drawn before the run was cut off.

        Args:
            draw: The rows.
            kept: Those that a checkpoint has kept.
            window: Has the numbers of those that the journal has kept.
        """
        if not self.args.max_staleness or self._as_before:
            return
        found = set(window.found.values())
        for row, trajectory in enumerate(draw.trajectories):
            if row in kept or trajectory.record in found:
                draw.trajectories[row] = drawn_before(trajectory, self.trainer.state.global_step)

    def _open_window_ahead(self, identity: Any, step: int, *, again: bool = False) -> Window:
        """Say in the journal which window is played, and which optimizer step will train on it.

        Args:
            identity: Which window.
            step: The optimizer step.
            again: Whether this process has begun it already.
        """
        if not self.args.max_staleness:  # one policy plays it
            self._open_window(identity)
            return Window()
        assert self._synced is not None
        return self.recorder.open_window_ahead(
            identity,
            step,
            self._settings,
            version=self._synced,
            oldest_version=step - self.args.max_staleness,
            anew=not (again or self._as_before),
        )

    def _reward_finished(self, ahead: Ahead) -> None:
        finished = dict(sorted(ahead.finished.items()))
        if finished:
            ahead.parts.append((list(finished), self._reward(list(finished.values()))))

    # Staleness and measures ---------------------------------------------------------------------------------

    def _mark_stale(self, identity: Any, batches: list[MicroBatch], rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        if identity is None:
            return batches  # evaluation hands the weights over before it plays
        version = self.trainer.state.global_step
        self._staleness += [behind for row in rows for behind in staleness(row, version)]
        return mark_stale(batches, rows, version)

    def measure(self, metrics: MetricStore) -> None:
        """Add what was measured since the last call; called when an optimizer step has its windows."""
        now, asked = time.monotonic(), self.engine.asking.seconds
        if self._staleness:
            metrics.add("async/staleness/mean", fmean(self._staleness), len(self._staleness))
            metrics.add("async/staleness/max", max(self._staleness), how="max")
        metrics.add("async/trainer_wait", self._waited)
        metrics.add("async/sync_time", self._syncing)
        metrics.add("async/generator_idle", max(0.0, 1 - (asked - self._asked) / max(now - self._begun, 1e-9)))
        metrics.add("async/queue_depth", sum(len(ahead.play.finished) for ahead in self._ahead.values()))
        self.restart_clocks()

    # Beginning, saving, ending ------------------------------------------------------------------------------

    def recover(self, rows: dict[Place, FinishedRow]) -> None:
        """Use these rollouts, which a checkpoint has kept, in the place of playing them."""
        self._recovered = rows

    def note_weights(self) -> None:
        """Tell the journal which weights the optimizer has made, and see whether it had the same before."""
        version = self.trainer.state.global_step
        if not self.args.max_staleness or self._noted == version:
            return
        if self._before is None:
            self._before = self.recorder.weights()
        self._noted = version
        self._as_before = self.recorder.add_weights(self._noted) == self._before.get(self._noted)

    def _forget_weights(self) -> None:
        self._before, self._noted, self._as_before = None, None, False

    def restart_clocks(self) -> None:
        """Measure from now on."""
        self._staleness: list[int] = []
        self._waited = self._syncing = 0.0
        self._begun, self._asked = time.monotonic(), self.engine.asking.seconds

    def settle(self, metrics: MetricStore) -> Iterator[FinishedRow]:
        """Reward what has ended by now, and give back everything that waits to be trained on."""
        for ahead in self._ahead.values():
            self._reward_finished(ahead)
            for _, draw in ahead.parts:
                for name, value in draw.own_metrics:
                    metrics.add(name, value)
                draw.own_metrics.clear()
                yield from draw.rows()

    def close(self) -> None:
        """End what is being played, and close as `Collector` does."""
        for ahead in self._ahead.values():
            ahead.play.future.cancel()
        self._ahead.clear()
        self._recovered = {}
        self._forget_weights()
        super().close()
