"""What is named on the command line: environments, functions, datasets, models.

An environment is `package.module:Class`, `path/to/file.py:Class`, `openenv:URL`, `ors:NAME` (or `ors:URL`, both with
`#SPLIT` if the environment has several), `harbor:FOLDER`, or `gym:ID`. In the place of a class there may be a dict of
several by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import ConfigurationError

Factories = Callable[[], Any] | Mapping[str, Callable[[], Any]]


def load_environment(name: str) -> Factories:
    """Find an environment: a class, any other factory of environments, or a dict of several by name.

    Args:
        name: A module and a name in it, or a Python file and a name in it, with a colon between. Modules are looked
            for in the current directory too; a file sees its neighbours, as a script does. Or a scheme and what it
            names: `openenv:http://127.0.0.1:8000`, `ors:owner/environment#train`, `ors:http://127.0.0.1:8080`,
            `harbor:tasks`, `gym:FrozenLake-v1`.

    Raises:
        ConfigurationError: It cannot be imported or reached, or is nothing that makes environments.

    Example:
        >>> load_environment("collections:Counter")
        <class 'collections.Counter'>
    """
    scheme, _, rest = name.partition(":")
    if scheme in _SCHEMES and rest:
        return _SCHEMES[scheme](rest)
    found = _load(name)
    several = isinstance(found, Mapping) and found and all(map(callable, found.values()))
    return found if several else _called(found, name)


def tasks_of(factory: Factories | None, times: int = 1) -> Sequence[Mapping[str, Any]]:
    """The rows to play where no dataset was named: those that the environment knows, if it does.

    Args:
        factory: The environment; of several, each gets rows of its own.
        times: How many rows each of several gets.

    Returns:
        The rows; none for an environment that makes its own tasks.
    """
    if isinstance(factory, Mapping):
        return [{"environment": name} for _ in range(times) for name in factory]
    rows: Sequence[Mapping[str, Any]] = getattr(factory, "tasks", list)()
    return rows


def load_callable(name: str) -> Callable[..., Any]:
    """Import a class or function named `package.module:name` or `file.py:name`.

    Raises:
        ConfigurationError: It cannot be imported, or cannot be called.
    """
    return _called(_load(name), name)


def _load(name: str) -> Any:
    """What stands under a name in a module."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigurationError(f"{name!r} names nothing; write package.module:Name or file.py:Name")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        names = sorted(name for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_")
        raise ConfigurationError(f"{where} has no class or function {attribute!r}; its classes: {', '.join(names)}")
    return found


def _called(found: Any, name: str) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigurationError(f"{name} is a {type(found).__name__}, which cannot be called")
    return found


def _openenv(url: str) -> Callable[[], Any]:
    from agentrl.envs.openenv import OpenEnv

    return OpenEnv(url)


def _ors(name: str) -> Callable[[], Any]:
    from agentrl.envs.ors import ORS

    name, _, split = name.partition("#")
    return ORS(url=name, split=split or None) if "://" in name else ORS(name, split=split or None)


def _harbor(path: str) -> Callable[[], Any]:
    from agentrl.envs.harbor import Harbor

    return Harbor(path)


def _gymnasium(name: str) -> Callable[[], Any]:
    try:
        from agentrl.envs.gymnasium import Gymnasium
    except ImportError:
        raise ConfigurationError("gym: needs the extra `gymnasium`: pip install 'agentrl[gymnasium]'") from None
    return Gymnasium(name)


_SCHEMES: dict[str, Callable[[str], Callable[[], Any]]] = {
    "openenv": _openenv,
    "ors": _ors,
    "harbor": _harbor,
    "gym": _gymnasium,
}


def _from_path(name: str) -> ModuleType:
    _search_in(Path.cwd())
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    _search_in(path.parent)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _search_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
