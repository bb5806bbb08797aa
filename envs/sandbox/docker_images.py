"""Which image a container starts from: one that the engine has, or one built from a Dockerfile."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from agentrl.envs.sandbox.base import SandboxFailure, SandboxSpec
from agentrl.errors import ConfigurationError

REPOSITORY = "agentrl-build"

LOG_LINES = 30
"""Lines of a failed build that its error quotes."""

_building: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def check_images(client: Any, spec: SandboxSpec, *, pull: bool) -> None:
    """See to it that the engine has the image, or those that the Dockerfile builds on.

    Raises:
        ConfigurationError: It lacks one and may not or cannot pull it, or there is no Dockerfile.
    """
    wanted = [spec.image] if spec.image is not None else []
    if spec.dockerfile is not None and not _has_image(client, built_name(spec.dockerfile)):
        wanted = base_images(spec.dockerfile / "Dockerfile")
    for name in wanted:
        _need_image(client, name, pull=pull)


def build_image(client: Any, folder: Path, seconds: float) -> str:
    """Name of the image of a Dockerfile, built if need be.

    Raises:
        ConfigurationError: It cannot be built.
        SandboxFailure: That took longer than `seconds`.
    """
    name = built_name(folder)
    with _building[name]:  # rollouts of one task start together; one of them builds
        if not _has_image(client, name):
            _build(client, folder, name, seconds)
    return name


def built_name(folder: Path) -> str:
    """The name that tells what a folder holds."""
    return f"{REPOSITORY}:{_digest(folder)[:32]}"


def _need_image(client: Any, name: str, *, pull: bool) -> None:
    import docker.errors

    if _has_image(client, name):
        return
    if not pull:
        raise ConfigurationError(
            f"the engine has no image {name!r}; run `docker pull {name}` first, or let agentrl do it with "
            "DockerBackend(pull=True)"
        )
    try:
        client.images.pull(name)
    except docker.errors.APIError as error:
        raise ConfigurationError(f"the image {name!r} cannot be pulled: {error}") from error


def _has_image(client: Any, name: str) -> bool:
    import docker.errors

    try:
        client.images.get(name)
    except docker.errors.ImageNotFound:
        return False
    return True


def _digest(folder: Path) -> str:
    """A hash of what a folder holds: names, modes and contents."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        whole.update(repr((path.relative_to(folder).as_posix(), kind, path.lstat().st_mode)).encode())
        if kind == "link":
            whole.update(os.readlink(path).encode())
        elif kind == "file":
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def base_images(dockerfile: Path) -> list[str]:
    """Images that a Dockerfile builds on, so that building pulls none by surprise.

    Raises:
        ConfigurationError: There is no Dockerfile, or the name of an image hangs on an argument without a default.
    """
    if not dockerfile.is_file():
        raise ConfigurationError(f"there is no {dockerfile}; dockerfile= names the folder that holds it")
    arguments: dict[str, str] = {}
    stages = {"scratch"}
    images = []
    for line in dockerfile.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := re.match(r"\s*ARG\s+(\w+)=(\S+)", line, re.I):
            arguments[match[1]] = match[2].strip("\"'")
        elif match := re.match(r"\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", line, re.I):
            try:
                image = re.sub(r"\$\{?(\w+)(?::-[^}]*)?\}?", lambda m: arguments[m[1]], match[1])
            except KeyError as error:
                raise ConfigurationError(f"{dockerfile}: {line.strip()!r} needs a default for ARG {error}") from None
            if image.lower() not in stages:
                images.append(image)
            if match[2]:
                stages.add(match[2].lower())
    return images


def _build(client: Any, folder: Path, name: str, seconds: float) -> None:
    import docker.errors

    deadline = time.monotonic() + seconds
    log: list[str] = []
    try:
        # Leaving the stream ends the build: the engine sees that nobody reads it.
        for entry in client.api.build(path=str(folder), tag=name, rm=True, forcerm=True, decode=True):
            log += str(entry.get("stream") or entry.get("error") or "").splitlines()
            if "error" in entry:
                raise ConfigurationError(f"{folder}/Dockerfile cannot be built:\n" + "\n".join(log[-LOG_LINES:]))
            if time.monotonic() > deadline:
                raise SandboxFailure(f"building {folder}/Dockerfile took longer than build_timeout={seconds:g} s")
    except docker.errors.APIError as error:
        raise ConfigurationError(f"{folder}/Dockerfile cannot be built: {error}") from error
