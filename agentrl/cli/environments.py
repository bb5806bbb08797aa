"""Environments named on the command line: `package.module:Class` or `path/to/file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import ConfigurationError


def load_environment(name: str) -> Callable[[], Any]:
    """Import an environment class, or any factory of environments.

    Args:
        name: A module and a name in it, or a Python file and a name in it, with a colon between. Modules are looked
            for in the current directory too; a file sees its neighbours, as a script does.

    Raises:
        ConfigurationError: It cannot be imported, or is nothing that makes environments.

    Example:
        >>> load_environment("collections:Counter")
        <class 'collections.Counter'>
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ConfigurationError(f"{name!r} names no environment; write package.module:Class or file.py:Class")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = sorted(name for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_")
        raise ConfigurationError(f"{where} has no class or function {attribute!r}; its classes: {', '.join(found)}")
    return factory


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
