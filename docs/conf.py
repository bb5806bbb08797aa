"""Sphinx configuration. Tables of arguments are written from the code, so that they cannot go stale."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

from transformers import TrainingArguments

import agentrl
from agentrl.training.argument_checks import REFUSED
from agentrl.training.arguments import GRPOConfig, RLOOConfig
from agentrl.training.async_arguments import AsyncGRPOConfig

project = "agentrl"
author = "the agentrl authors"
copyright = "the agentrl authors"
version = release = agentrl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = f"agentrl {release}"

myst_heading_anchors = 3
# Docstrings write code in single backticks.
default_role = "code"
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"show-inheritance": False}
python_use_unqualified_type_names = True
# Blocks of shell sessions and JSON may hold placeholders.
suppress_warnings = ["misc.highlighting_failure"]

GENERATED = Path(__file__).parent / "_generated"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _refused() -> str:
    """The refused arguments, those with the same reason together."""
    names = defaultdict(list)
    for name, reason in REFUSED.items():
        names[reason].append(f"`{name}`")
    return _table(("argument", "why"), [(", ".join(group), reason) for reason, group in names.items()])


def _default(field: dataclasses.Field) -> object:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _arguments(config: type, *, without: type) -> str:
    """The arguments of a configuration that another one lacks or has with another default."""
    known = {field.name: _default(field) for field in dataclasses.fields(without)}
    rows = [
        (f"`{field.name}`", f"`{_default(field)!r}`", field.metadata["help"])
        for field in dataclasses.fields(config)
        if field.name not in REFUSED and (field.name not in known or known[field.name] != _default(field))
    ]
    return _table(("argument", "default", "meaning"), rows)


def _grpo_only() -> str:
    """What RLOO has not."""
    rloo = {field.name for field in dataclasses.fields(RLOOConfig)}
    names = [f"`{field.name}`" for field in dataclasses.fields(GRPOConfig) if field.name not in rloo | REFUSED.keys()]
    return ", ".join(names) + ".\n"


def _write_tables(app: object = None) -> None:
    GENERATED.mkdir(exist_ok=True)
    tables = {
        "refused.md": _refused(),
        "grpo_arguments.md": _arguments(GRPOConfig, without=TrainingArguments),
        "grpo_only.md": _grpo_only(),
        "rloo_arguments.md": _arguments(RLOOConfig, without=GRPOConfig),
        "async_arguments.md": _arguments(AsyncGRPOConfig, without=GRPOConfig),
    }
    for name, text in tables.items():
        (GENERATED / name).write_text(text, encoding="utf-8")


def setup(app: object) -> None:
    app.connect("builder-inited", _write_tables)
