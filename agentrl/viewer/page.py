"""The page's files, and the page with its data as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.viewer.index import COLUMNS
from agentrl.viewer.shown import Shown

MODULES = (
    *("dom.js", "filters.js", "store.js", "chart.js", "tokens.js", "conversation.js"),
    *("overview.js", "list.js", "group.js", "rollout.js", "main.js"),
)
"""The page's modules; each imports from those before it only."""

FILES = ("index.html", "viewer.css", *MODULES)

TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


@cache
def read_file(name: str) -> str:
    """One of `FILES`."""
    return importlib.resources.files("agentrl.viewer").joinpath("static", name).read_text(encoding="utf-8")


def write_page(shown: Shown, path: Path, *, most: int) -> tuple[int, int]:
    """Write one HTML file that needs nothing else.

    Args:
        shown: What it shows.
        path: The file.
        most: So many rollouts get their content into the file, those of the last steps; all are in lists and charts.

    Returns:
        How many rollouts have their content in it, and how many there are.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    data = _data(shown, most)
    try:
        path.write_text(_page(data), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    return len(data["contents"]), sum(len(part["rows"]) for part in data["rollouts"])


def _data(shown: Shown, most: int) -> dict[str, Any]:
    rollouts = [index.changes() for index in shown.indexes]
    at = {name: COLUMNS.index(name) for name in ("rank", "id", "step")}
    all_ = [(row[at["step"]], source, row[at["rank"]], row[at["id"]]) for source, part in enumerate(rollouts)
            for row in part["rows"]]  # fmt: skip
    chosen = [key[1:] for key in sorted(all_, reverse=True)[:most]]
    contents = {"/".join(map(str, key)): shown.rollout(*key) for key in chosen}
    tokens = {"/".join(map(str, key)): shown.tokens(*key) for key in chosen}
    images = {}
    for name, value in contents.items():
        source = int(name.partition("/")[0])
        for digest in set(_digests(value)):
            if (png := shown.image(source, digest)) is not None:
                images[f"{source}/{digest}"] = "data:image/png;base64," + base64.b64encode(png).decode()
    return {
        "runs": shown.runs(),
        "rollouts": rollouts,
        "logs": [index.logs() for index in shown.indexes],
        "contents": contents,
        "tokens": {name: value for name, value in tokens.items() if value is not None},
        "images": images,
    }


def _digests(value: Any) -> Iterator[str]:
    blocks = [block for message in value["prompt"] for block in message["blocks"]]
    for turn in value["turns"]:
        blocks += turn["message"]["blocks"]
        blocks += [block for result in turn["results"] for block in result["blocks"]]
    return (block["image"] for block in blocks if "image" in block)


def _page(data: dict[str, Any]) -> str:
    style, script = read_file("viewer.css"), one_script()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # In JSON, `<` occurs in strings only. Escaped, nothing in them ends the script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page, charset = read_file("index.html"), '<meta charset="utf-8">'
    for old, new in [
        (charset, f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ('<link rel="stylesheet" href="/static/viewer.css">', f"<style>{style}</style>"),
        (
            '<script type="module" src="/static/main.js"></script>',
            f'<script type="application/json" id="data">{text}</script>\n<script type="module">{script}</script>',
        ),
    ]:  # fmt: skip
        assert old in page
        page = page.replace(old, new)
    return page


@cache
def one_script() -> str:
    """The modules as one: in order, without imports and exports. They use one name for one thing only."""
    return re.sub(r"^(import .*\n|export )", "", "".join(map(read_file, MODULES)), flags=re.M)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
