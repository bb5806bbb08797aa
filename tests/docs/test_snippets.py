"""Every Python block of README.md and docs/*.md runs as it is printed.

The blocks of one file share a namespace, in order. What a reader would run with a pretrained model for a long time
runs here with a tiny random one for a step: the model's name becomes a folder, and the two configuration classes
cap the number of steps and of tokens. A server's address becomes that of one started here. Nothing else is changed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import agentrl
from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import qwen_like_tokenizer
from tests.envs.servers import Nursery
from tests.envs.stub_openenv import stub_server
from tests.waiting import LONG

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODEL = "Qwen/Qwen3-0.6B"
OPENENV = "http://127.0.0.1:8000"
ORS = "http://127.0.0.1:8080"
MOST_UNRUN = 3

NEEDED = {"browser.md": ["chromium"], "harbor.md": ["bwrap"], "sandboxes.md": ["bwrap"]}
"""Programs without which the blocks of a file cannot run."""

_BLOCK = re.compile(r"(?:<!--\s*not run:(?P<reason>[^>]*)-->\s*\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    line: int
    code: str
    reason: str | None


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, match.start("code")) + 1, match["code"], match["reason"])
        for match in _BLOCK.finditer(text)
    ]


def with_blocks() -> list[Path]:
    return [path for path in FILES if any(block.reason is None for block in blocks(path))]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    tokenizer = qwen_like_tokenizer("qwen3")
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=8192, **special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SHORT = {"max_steps": 1, "max_completion_length": 8, "logging_steps": 1}
"""Defaults of the configurations, and the most that a block gets when it asks for more."""


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shorten every run that a block makes, and let it write into a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for config in (agentrl.GRPOConfig, agentrl.RLOOConfig, agentrl.AsyncGRPOConfig, agentrl.AsyncRLOOConfig):
        monkeypatch.setattr(config, "__init__", _shortened(config.__init__))


def _shortened(init: Callable[..., None]) -> Callable[..., None]:
    def short_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {name: min(kwargs.get(name, most), most) for name, most in SHORT.items()})

    return short_init


@pytest.fixture(scope="module")
def openenv_url() -> Iterator[str]:
    with stub_server() as stub:
        yield stub.url


@pytest.fixture(scope="module")
def ors_url() -> Iterator[str]:
    """A real server; where there is none, the pages that need it are skipped."""
    nursery = Nursery("ors_server.py")
    yield nursery.start("guess").url
    nursery.close()


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("path", with_blocks(), ids=lambda path: path.name)
def test_the_blocks_of_a_file_run(
    path: Path, model_folder: str, openenv_url: str, request: pytest.FixtureRequest
) -> None:
    for program in NEEDED.get(path.name, ()):
        if shutil.which(program) is None and os.environ.get("AGENTRL_REQUIRE_SERVICES") != "1":
            pytest.skip(f"{program} is not installed")
    urls = {OPENENV: openenv_url}
    if ORS in path.read_text(encoding="utf-8"):
        urls[ORS] = request.getfixturevalue("ors_url")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    before = set(psutil.Process().children())
    for block in blocks(path):
        if block.reason is None:
            # Empty lines in front make the line numbers of errors those of the file.
            source = "\n" * (block.line - 1) + block.code.replace(MODEL, model_folder)
            for printed, url in urls.items():
                source = source.replace(printed, url)
            exec(compile(source, str(path), "exec"), namespace)
    left = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=LONG)[1]
    assert [process.cmdline() for process in left] == [], "the page leaves processes behind"


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    reasons = [
        (path.name, block.line, block.reason) for path in FILES for block in blocks(path) if block.reason is not None
    ]
    assert len(reasons) <= MOST_UNRUN, reasons
    assert all(len(reason.split()) >= 3 for _, _, reason in reasons), reasons


def test_every_fence_is_understood() -> None:
    """An indented or oddly written fence would be left out in silence."""
    for path in FILES:
        fences = re.findall(r"^\s*```\s*(?:python|py)\b.*$", path.read_text(encoding="utf-8"), re.M)
        assert len(fences) == len(blocks(path)), path
