"""Imports go one way, as docs/architecture.md says; and `import agentrl` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import agentrl
import agentrl.envs

ROOT = Path(__file__).parents[2]

BASE = {"types", "errors"}
BELOW_GENERATION = BASE | {"chat", "objectives"}
BELOW_ROLLOUT = BELOW_GENERATION | {"generation"}
BELOW_TRAINING = BELOW_ROLLOUT | {"rollout"}

MAY_IMPORT = {
    "agentrl": set(),  # its names are loaded on first use
    "types": set(),
    "errors": set(),
    "chat": BASE,
    "chat_templates": set(),
    "objectives": BASE,
    "generation": BELOW_GENERATION,
    "rollout": BELOW_ROLLOUT,
    "training": BELOW_TRAINING,
    "viewer": BELOW_TRAINING,
    "checks": BELOW_TRAINING | {"testing"},
    "cli": BELOW_TRAINING | {"training", "viewer", "checks", "envs"},
    "__main__": {"cli"},
    "testing": BELOW_TRAINING,
    "tools": BELOW_TRAINING,
    "envs": BELOW_TRAINING | {"tools"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every module of the package."""
    for folder, package in [
        ("agentrl", "agentrl"),
        ("envs", "agentrl.envs"),
        ("tools", "agentrl.tools"),
        ("chat_templates", "agentrl.chat_templates"),
    ]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def layer(module: str) -> str:
    """The part of the house that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def imports(module: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    """Module imported, line, and whether only for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from agentrl import chat` names a module, `from agentrl.chat import x` need not.
            names = [f"{source}.{alias.name}" for alias in node.names] if source == "agentrl" else [source]
        else:
            continue
        for name in names:
            if name == "agentrl" or name.startswith("agentrl."):
                yield name, node.lineno, id(node) in guarded


MODULES = list(modules())


def test_every_part_of_the_package_has_a_rule() -> None:
    assert {layer(module) for module, _ in MODULES} <= set(MAY_IMPORT)


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[module for module, _ in MODULES])
def test_imports_go_one_way(module: str, path: Path) -> None:
    here = layer(module)
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for imported, line, for_types in imports(module, path)
        if layer(imported) not in {here, *MAY_IMPORT[here]} and not (for_types and here in ("agentrl", "training"))
    ]
    assert not wrong, f"{here} may import {sorted(MAY_IMPORT[here])}: {wrong}"


def test_the_rule_is_the_documented_one() -> None:
    text = " ".join((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    assert "types, errors ← chat, objectives ← generation ← rollout ← training" in text


def test_importing_agentrl_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, agentrl; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "datasets", "numpy"} & set(loaded)


@pytest.mark.parametrize("package", [agentrl, agentrl.envs], ids=lambda package: package.__name__)
def test_type_checkers_see_the_public_names_from_where_they_are_loaded(package: ModuleType) -> None:
    """tests/docs/public_api.py has what they make of them."""
    path = Path(package.__file__ or "")
    seen = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert seen == package._PUBLIC
    assert (Path(agentrl.__file__).parent / "py.typed").exists()


def test_public_names_are_found() -> None:
    code = "import agentrl; print([name for name in agentrl.__all__ if getattr(agentrl, name, None) is None])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
