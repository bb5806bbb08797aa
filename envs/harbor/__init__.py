"""Harbor tasks as environments.

    harbor = Harbor("tasks")
    trainer = GRPOTrainer(model, args=args, train_dataset=harbor.tasks(), environment_factory=harbor)

A rollout plays a task in a sandbox of its own, and the task's verifier says what that was worth. A sandbox that breaks
and a verifier that gives no verdict are failures of the environment, never a reward. See docs/harbor.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset

from agentrl.envs.harbor.agent import TOOLS
from agentrl.envs.harbor.datasets import find_tasks
from agentrl.envs.harbor.environment import HarborEnvironment
from agentrl.envs.harbor.errors import Fault, HarborFailure
from agentrl.envs.harbor.package import HarborBackend, download
from agentrl.envs.harbor.rewards import KEY
from agentrl.envs.harbor.sandboxes import Source
from agentrl.envs.harbor.task import HarborTask, load_task
from agentrl.envs.harbor.unsupported import unsupported
from agentrl.envs.sandbox import Backend, DockerBackend, LocalBackend
from agentrl.errors import ConfigurationError
from agentrl.rollout.limits import require_seconds

__all__ = ["Fault", "Harbor", "HarborBackend", "HarborEnvironment", "HarborFailure", "HarborTask", "download"]

logger = logging.getLogger(__name__)

MOST_SHOWN = 20
"""Problems that an error lists."""


class Harbor:
    """Harbor tasks, as an `environment_factory`; `tasks` is the dataset that goes with it.

    All tasks are read and checked here: what cannot be played is refused before training starts.

    Args:
        path: A task's folder, a folder of such folders, or a local `registry.json`; or a list of tasks' folders.
        dataset: Which dataset of the registry, `name` or `name@version`.
        backend: "docker", "local" (bubblewrap, no images), or a backend with settings of its own, `HarborBackend` among
            them. None: "docker" if a task names an image or has a Dockerfile, else "local".
        tools: What the model acts with, of "bash", "python", "notes" and "submit". Tasks of several steps have "submit"
            in any case.
        reward_key: Which reward counts where a verifier gives several. One that gives a single reward may name it as
            it likes.
        image: Docker: the image of tasks that name none and have no Dockerfile.
        rootfs: Local: root filesystem (a folder or tar) that stands for every image; None for this machine's programs.
        network: Whether tasks may have a network; those that say "no-network" have none even so.
        timeout: Seconds of one call of `bash` or `python`.
        max_output: Bytes of output that one call shows.
        pids: Processes and threads of one sandbox.
        skip_unsupported: Leave out tasks that cannot be played here, with a warning, in place of refusing them all.

    Raises:
        ConfigurationError: Tasks cannot be read or played; names each task and field.
    """

    def __init__(
        self,
        path: str | Path | Sequence[Path],
        *,
        dataset: str | None = None,
        backend: Literal["docker", "local"] | Backend | None = None,
        tools: Sequence[str] = ("bash",),
        reward_key: str = KEY,
        image: str | None = None,
        rootfs: str | Path | None = None,
        network: bool = False,
        timeout: float = 60.0,
        max_output: int = 8192,
        pids: int = 256,
        skip_unsupported: bool = False,
    ) -> None:
        require_seconds("timeout", timeout)
        if unknown := sorted(set(tools) - set(TOOLS)):
            raise ConfigurationError(f"tools={unknown} are not known; {', '.join(TOOLS)} are")
        tasks = [load_task(task) for task in find_tasks(path, dataset)]
        self._source = _source(tasks, backend, image, rootfs, network, pids)
        problems = {task.path: self._problems(task) for task in tasks}
        bad = [f"{path}: {problem}" for path, found in problems.items() for problem in found]
        if bad and not skip_unsupported:
            raise ConfigurationError(
                "tasks that cannot be played here (leave them out with skip_unsupported=True):\n" + _listed(bad)
            )
        if bad:
            logger.warning("tasks that are left out:\n%s", _listed(bad))
        self._tasks = {str(task.path): task for task in tasks if not problems[task.path]}
        if not self._tasks:
            raise ConfigurationError(f"no task of {path} can be played here:\n{_listed(bad)}")
        self._settings: dict[str, Any] = {
            "tools": tuple(tools),
            "reward_key": reward_key,
            "timeout": timeout,
            "max_output": max_output,
        }

    def __call__(self) -> HarborEnvironment:
        """Make an instance."""
        return HarborEnvironment(self._tasks, self._source, **self._settings)

    def tasks(self) -> Dataset:
        """The tasks: a row each, with `task` (its folder, by which it is found) and `name`.

        There is no prompt, for that is the instruction, which comes when the task is played.
        """
        names = [task.name for task in self._tasks.values()]
        return Dataset.from_dict({"task": list(self._tasks), "name": names})

    def _problems(self, task: HarborTask) -> list[str]:
        problems = unsupported(task, network=self._source.network, builds=self._source.builds)
        if problems:
            return problems
        users = {*(step.user for step in task.steps), *(step.verifier.user for step in task.steps)}
        judges = [step.verifier.place for step in task.steps if step.verifier.place is not None]
        for place in [task.place, *(judge for judge in judges if judge is not task.place)]:
            try:
                for user in users:
                    self._source.backend.check(replace(self._source.spec(place), user=user))
            except ConfigurationError as error:
                return [str(error)]
        return []


def _source(
    tasks: Sequence[HarborTask],
    backend: Literal["docker", "local"] | Backend | None,
    image: str | None,
    rootfs: str | Path | None,
    network: bool,
    pids: int,
) -> Source:
    if backend is None:
        needed = image is not None or any(task.place.image or task.place.dockerfile for task in tasks)
        backend = "docker" if needed else "local"
    if isinstance(backend, str):
        if backend not in ("docker", "local"):
            raise ConfigurationError(f'backend={backend!r}: expected "docker", "local" or a backend')
        backend = DockerBackend() if backend == "docker" else LocalBackend()
    builds = not isinstance(backend, LocalBackend)
    if builds and rootfs is not None:
        raise ConfigurationError("rootfs= is for the local backend; the docker backend has images")
    if not builds and image is not None:
        raise ConfigurationError("image= is for the docker backend; the local backend has rootfs=")
    return Source(backend, builds, image, None if rootfs is None else Path(rootfs), network, pids)


def _listed(problems: Sequence[str]) -> str:
    more = [f"and {len(problems) - MOST_SHOWN} more"] if len(problems) > MOST_SHOWN else []
    return "\n".join([*problems[:MOST_SHOWN], *more])
