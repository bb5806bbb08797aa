"""Dockerfiles that build nothing: a base image, a folder to work in, variables. The local sandbox can do as much."""

from __future__ import annotations

import posixpath
import re
import shlex
from pathlib import Path
from typing import NamedTuple


class Plain(NamedTuple):
    """What such a Dockerfile says."""

    workdir: str | None
    env: dict[str, str]


def read_plain(dockerfile: Path) -> Plain | None:
    """What a Dockerfile of nothing but `FROM`, `WORKDIR` and `ENV NAME=value` says, None for any other."""
    workdir: str | None = None
    env: dict[str, str] = {}
    bases = 0
    for line in dockerfile.read_text(encoding="utf-8", errors="replace").splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#"):
            continue
        if "$" in rest or rest.endswith("\\"):
            return None
        match word.upper():
            case "FROM" if re.fullmatch(r"\s*\S+\s*", rest):
                bases += 1
            case "WORKDIR":
                workdir = posixpath.join(workdir or "/", rest.strip())
            case "ENV":
                try:
                    pairs = [pair.partition("=") for pair in shlex.split(rest)]
                except ValueError:
                    return None
                if not all(separator for _, separator, _ in pairs):
                    return None
                env |= {name: value for name, _, value in pairs}
            case _:
                return None
    return Plain(workdir, env) if bases == 1 else None
