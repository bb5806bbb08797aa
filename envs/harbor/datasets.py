"""Which tasks there are: a task's folder, a folder of such folders, or a `registry.json` that lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError

REGISTRY = "registry.json"


def find_tasks(where: str | Path | Sequence[Path], dataset: str | None = None) -> list[Path]:
    """Folders of tasks, in the order of their names or of the registry.

    Args:
        where: A task, a folder of tasks or a registry's file; or the tasks, one by one.
        dataset: Which dataset of the registry, `name` or `name@version`; may be left out where there is one only.

    Raises:
        ConfigurationError: There are none, or not here.
    """
    if not isinstance(where, str | Path):
        if dataset is not None:
            raise ConfigurationError(f"dataset={dataset!r} names a dataset of a registry; tasks were given one by one")
        return [Path(task) for task in where]
    path = Path(where)
    if path.is_file():
        return _of_registry(path, dataset)
    if dataset is not None:
        raise ConfigurationError(f"dataset={dataset!r} names a dataset of a registry; {path} is no registry file")
    if (path / "task.toml").is_file():
        return [path]
    if path.is_dir() and (found := sorted(file.parent for file in path.glob("*/task.toml"))):
        return found
    raise ConfigurationError(f"{path} holds no Harbor tasks: neither it nor a folder in it has a task.toml")


def _of_registry(path: Path, dataset: str | None) -> list[Path]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        names = [f"{entry['name']}@{entry['version']}" for entry in entries]
        fits = [entry for entry, name in zip(entries, names, strict=True) if dataset in (None, entry["name"], name)]
        if len(fits) != 1:
            raise ConfigurationError(f"dataset={dataset!r}: {path} has {', '.join(names)}; name one, with its version")
        return [_local(path, task) for task in fits[0]["tasks"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} is no Harbor registry: {type(error).__name__}: {error}") from error


def _local(registry: Path, task: dict[str, Any]) -> Path:
    if task.get("git_url"):
        raise ConfigurationError(
            f"the task {task.get('name')!r} of {registry} is in the repository {task['git_url']}, which is not fetched "
            "from here; clone it and give its folder to Harbor"
        )
    return registry.parent / str(task["path"])
