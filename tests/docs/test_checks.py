"""Every environment that README.md and docs/*.md print keeps its contract: `agentrl check` finds nothing that fails."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from agentrl.checks.environment import check_environment
from agentrl.checks.findings import Status
from agentrl.types import Task
from tests.docs.test_snippets import FILES, blocks

ROWS: dict[str, dict[str, Any]] = {
    "Counting": {"prompt": [{"role": "user", "content": "Increment the counter to 3."}], "columns": {"target": 3}}
}
"""A row of the page's data set, where it has one."""
ELSEWHERE = {
    "Shop": "its address is nobody's: tests/envs/test_browser.py has applications with a server",
    "FixTheBug": "it lives in the page's sandboxes: tests/envs/sandbox plays such environments",
}
"""Environments that are not checked here."""


def environments() -> list[tuple[Path, str]]:
    return [
        (path, node.name)
        for path in FILES
        for block in blocks(path)
        if block.reason is None
        for node in ast.parse(block.code).body
        if isinstance(node, ast.ClassDef)
        and any(getattr(part, "name", None) == "reset" for part in node.body)
        and node.name not in ELSEWHERE
    ]


def classes_of(path: Path) -> dict[str, Any]:
    """The page's imports and classes, without its runs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(path):
        if block.reason is None:
            kept = [
                node
                for node in ast.parse(block.code).body
                if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)
            ]
            exec(compile(ast.Module(kept, []), str(path), "exec"), namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), environments(), ids=lambda value: getattr(value, "stem", value))
def test_an_environment_of_a_page_passes(path: Path, name: str) -> None:
    environment = classes_of(path)[name]
    tasks = [Task(str(g), member, g + 1, **ROWS.get(name, {})) for g in range(2) for member in range(2)]
    scored = not hasattr(environment, "get_reward")  # the page's reward function does
    found = check_environment(environment, tasks, scored=scored)
    assert [str(finding) for finding in found if finding.status is Status.FAIL] == []


def test_pages_have_environments() -> None:
    assert len(environments()) >= 15
