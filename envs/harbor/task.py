"""A Harbor task: a folder with `task.toml` (schema 1.x), an instruction and tests, read and checked.

Keys that are not known are left alone, as Harbor does. What is known and wrong is a `ConfigurationError` that names the
task and the field. Whether the task can be played here is the question of `unsupported`.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agentrl.envs.harbor.rewards import Gate
from agentrl.errors import ConfigurationError

VERIFIER_SECONDS = 600.0
BUILD_SECONDS = 600.0
COLLECT_SECONDS = 60.0
SIZES = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
NETWORKS = ("public", "no-network", "allowlist")
LEGACY_NETWORK = {True: "public", False: "no-network"}

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """A command that must succeed before the agent begins; times in seconds."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    start_period: float = 0.0
    start_interval: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class Place:
    """`[environment]`, or `[verifier.environment]`: what a sandbox is made of. None: the task does not say.

    Attributes:
        image: `docker_image`.
        dockerfile: Folder of the Dockerfile.
        files: Folder whose files are put where commands start, where no Dockerfile says what to do with them.
        workdir: Where commands start.
        network: `network_mode`.
    """

    image: str | None = None
    dockerfile: Path | None = None
    files: Path | None = None
    workdir: str | None = None
    network: str | None = None
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int | None = None
    build_timeout: float = BUILD_SECONDS
    env: Mapping[str, str] = field(default_factory=dict)
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True, slots=True)
class Collect:
    """A command that runs in the agent's sandbox before artifacts are taken."""

    command: str
    timeout: float = COLLECT_SECONDS
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Verifier:
    """Who judges.

    Attributes:
        place: Where, None for the agent's own sandbox.
        brings_tests: Whether the image of `place` is the verifier's own, so that `/tests` is in it.
        collect: What runs in the agent's sandbox before artifacts are taken.
    """

    timeout: float = VERIFIER_SECONDS
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None
    brings_tests: bool = False
    collect: tuple[Collect, ...] = ()


@dataclass(frozen=True, slots=True)
class Artifact:
    """A path of the agent's sandbox that a separate verifier gets; of a folder what matches no `exclude` of tar."""

    path: str
    exclude: tuple[str, ...] = ()


PUBLISHED = Artifact("/logs/artifacts")
"""Where an agent may leave what a separate verifier gets even if the task declares nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction with its tests; a task without steps is one step.

    Attributes:
        tests: Folders that become `/tests`, one over the other.
        workdir: Folder with files for the agent's folder, and perhaps a `setup.sh`.
        artifacts: What a separate verifier gets.
        timeout: Seconds of the agent, None for no limit.
    """

    name: str
    instruction: str
    tests: tuple[Path, ...]
    verifier: Verifier
    artifacts: tuple[Artifact, ...] = (PUBLISHED,)
    workdir: Path | None = None
    min_reward: Gate = None
    healthcheck: Healthcheck | None = None
    timeout: float | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task as it is played. `raw` is its `task.toml`, for whoever wants to see what else it says."""

    path: Path
    name: str
    place: Place
    steps: tuple[Step, ...]
    strategy: Literal["mean", "final"]
    raw: Mapping[str, Any]


def load_task(path: Path) -> HarborTask:
    """Read a task.

    Raises:
        ConfigurationError: Something is missing or wrong; names the task and the field.
    """
    reader = _Reader(path, "")
    try:
        raw = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise reader.error("task.toml", f"cannot be read: {error}") from None
    version = str(raw.get("schema_version", raw.get("version", "1.0")))
    if version.split(".")[0] != "1":
        raise reader.error("schema_version", f"is {version!r}; 1.x can be read")
    top = reader.within(raw)
    environment = top.table("environment")
    place = _place(environment, path / "environment")
    strategy = top.choice("multi_step_reward_strategy", ("mean", "final"), "mean")
    entries = top.tables("steps")
    steps = tuple(_step(top, entry, path / "steps" / entry.name(), place) for entry in entries)
    if not entries:
        steps = (_step(top, None, path, place),)
    name = top.table("task").get("name", str, path.name)
    return HarborTask(path, name, place, steps, strategy, raw)  # type: ignore[arg-type]


def instruction_text(text: str) -> str:
    """An instruction without the comment lines at its beginning that mark it for those who filter training data.

    Example:
        >>> instruction_text("<!-- harbor-canary GUID 1 -->\\n\\nSay hello.\\n")
        'Say hello.'
    """
    lines = text.splitlines()
    while lines and (not lines[0].strip() or _is_canary(lines[0].strip())):
        lines.pop(0)
    return "\n".join(lines).strip()


def _is_canary(line: str) -> bool:
    return line.startswith(("<!--", "#")) and "canary" in line.lower()


def _step(top: _Reader, entry: _Reader | None, folder: Path, place: Place) -> Step:
    own = top if entry is None else entry
    instruction = folder / "instruction.md"
    if not instruction.is_file():
        raise own.error("instruction.md", f"there is no {instruction}")
    shared = [top.path / "tests"] if entry is not None else []
    tests = tuple(tests for tests in [*shared, folder / "tests"] if tests.is_dir())
    agent, fallback = own.table("agent"), top.table("agent")
    entries = [*top.array("artifacts"), *(own.array("artifacts") if entry is not None else [])]
    artifacts = tuple(_artifact(own, artifact) for artifact in entries)
    published = () if any(artifact.path == PUBLISHED.path for artifact in artifacts) else (PUBLISHED,)
    return Step(
        name=folder.name if entry is not None else "",
        instruction=instruction_text(instruction.read_text(encoding="utf-8")),
        tests=tests,
        verifier=_verifier(top, own, folder, tests, place),
        artifacts=(*published, *artifacts),
        workdir=workdir if entry is not None and (workdir := folder / "workdir").is_dir() else None,
        min_reward=_gate(entry) if entry is not None else None,
        healthcheck=_healthcheck(entry) if entry is not None else None,
        timeout=agent.seconds("timeout_sec", fallback.seconds("timeout_sec", None)),
        user=agent.user(fallback.user(None)),
    )


def _verifier(top: _Reader, own: _Reader, folder: Path, tests: tuple[Path, ...], place: Place) -> Verifier:
    table, fallback = own.table("verifier"), top.table("verifier")
    judge, brings_tests = _judge(((table, folder / "tests"), (fallback, top.path / "tests")), place)
    if not brings_tests and not any((tests / "test.sh").is_file() for tests in tests):
        raise own.error("tests/test.sh", f"there is none in {top.path}")
    return Verifier(
        timeout=table.seconds("timeout_sec", fallback.seconds("timeout_sec", VERIFIER_SECONDS)) or VERIFIER_SECONDS,
        user=table.user(fallback.user(None)),
        env={**fallback.env(), **table.env()},
        place=judge,
        brings_tests=brings_tests,
        collect=tuple(
            Collect(each.need("command"), each.seconds("timeout_sec", COLLECT_SECONDS) or 0.0, each.user(None))
            for each in table.tables("collect") or fallback.tables("collect")
        ),
    )


def _judge(levels: Sequence[tuple[_Reader, Path]], place: Place) -> tuple[Place | None, bool]:
    """Where a separate verifier judges, None if it is not separate; and whether its image brings the tests.

    Args:
        levels: `verifier` and the folder of tests, first those of the step, then those of the task.
        place: The agent's, which is copied where nothing else is said.
    """
    if next(filter(None, (_mode(table) for table, _ in levels)), "shared") == "shared":
        return None, False
    described = next((table for table, _ in levels if "environment" in table.values), None)
    judge = place if described is None else _place(described.table("environment"), None)
    for table, tests in levels:
        image = table.table("environment").get("docker_image", str, None)
        if image is not None or (tests / "Dockerfile").is_file():
            return replace(judge, image=image, dockerfile=tests if image is None else None, files=None), True
    return replace(judge, image=place.image, dockerfile=place.dockerfile, files=place.files), False


def _mode(verifier: _Reader) -> str:
    """What a table says of where to judge, "" if nothing. To describe an environment is to want it."""
    return verifier.choice(
        "environment_mode", ("shared", "separate"), "separate" if "environment" in verifier.values else ""
    )


def _place(table: _Reader, folder: Path | None) -> Place:
    network = table.choice("network_mode", NETWORKS, "") or LEGACY_NETWORK.get(table.get("allow_internet", bool, None))
    dockerfile = folder if folder is not None and (folder / "Dockerfile").is_file() else None
    files = folder if folder is not None and dockerfile is None and folder.is_dir() else None
    image = table.get("docker_image", str, None)
    return Place(
        image=image,
        dockerfile=dockerfile if image is None else None,
        files=files,
        workdir=table.get("workdir", str, None),
        network=network,
        cpus=table.number("cpus", 1.0) or 1.0,
        memory_mb=int(table.number("memory_mb", None) or table.size("memory") or 2048),
        storage_mb=int(size) if (size := table.number("storage_mb", None) or table.size("storage")) else None,
        build_timeout=table.seconds("build_timeout_sec", BUILD_SECONDS) or BUILD_SECONDS,
        env=table.env(),
        healthcheck=_healthcheck(table),
    )


def _healthcheck(owner: _Reader) -> Healthcheck | None:
    if "healthcheck" not in owner.values:
        return None
    table = owner.table("healthcheck")
    plain = Healthcheck("")
    return Healthcheck(
        table.need("command"),
        table.number("interval_sec", plain.interval) or 0.0,
        table.seconds("timeout_sec", plain.timeout) or plain.timeout,
        table.number("start_period_sec", plain.start_period) or 0.0,
        table.number("start_interval_sec", plain.start_interval) or 0.0,
        int(table.number("retries", plain.retries) or 0),
    )


def _artifact(owner: _Reader, entry: Any) -> Artifact:
    """An artifact. Its `destination` says where Harbor keeps it on the host; nothing is kept here."""
    source, exclude = (entry.get("source"), entry.get("exclude", [])) if isinstance(entry, dict) else (entry, [])
    if not isinstance(source, str) or not source.startswith("/") or ".." in source.split("/"):
        raise owner.error("artifacts", f"{source!r} is not an absolute path without '..'")
    if not isinstance(exclude, list) or not all(isinstance(pattern, str) for pattern in exclude):
        raise owner.error("artifacts", f"of {source}: exclude = {exclude!r} is not a list of patterns")
    return Artifact(source.rstrip("/") or "/", tuple(exclude))


def _gate(entry: _Reader) -> Gate:
    gate = entry.values.get("min_reward")
    for least in gate.values() if isinstance(gate, dict) else [gate]:
        if least is not None and (isinstance(least, bool) or not isinstance(least, int | float)):
            raise entry.error("min_reward", f"is {gate!r}, neither a number nor numbers by name")
    return gate


class _Reader:
    """Fields of a table of `task.toml`, with errors that name them."""

    def __init__(self, path: Path, where: str, values: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.values: Mapping[str, Any] = values or {}
        self._where = where

    def error(self, field: str, problem: str) -> ConfigurationError:
        return ConfigurationError(f"the Harbor task {self.path}: {self._where}{field} {problem}")

    def within(self, values: Mapping[str, Any], where: str = "") -> _Reader:
        return _Reader(self.path, where, values)

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self.values.get(name, default)
        if value is not default and not isinstance(value, kind):
            raise self.error(name, f"is {value!r}, not of the type {kind.__name__}")
        return value

    def need(self, name: str) -> str:
        if not self.get(name, str, ""):
            raise self.error(name, "is missing")
        return str(self.values[name])

    def array(self, name: str) -> list[Any]:
        return list(self.get(name, list, []))

    def table(self, name: str) -> _Reader:
        return self.within(self.get(name, dict, {}), f"{self._where}{name}.")

    def tables(self, name: str) -> list[_Reader]:
        entries = self.array(name)
        if not all(isinstance(entry, dict) for entry in entries):
            raise self.error(name, "must be an array of tables")
        return [self.within(entry, f"{self._where}{name}[{number}].") for number, entry in enumerate(entries)]

    def name(self) -> str:
        """The name of a step, which is that of its folder."""
        if not re.fullmatch(r"[\w][\w.-]*", name := self.need("name")):
            raise self.error("name", f"is {name!r}, which names no folder in steps/")
        return name

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self.get(name, str, default)
        if value != default and value not in choices:
            raise self.error(name, f"is {value!r}; it must be one of {', '.join(choices)}")
        return str(value)

    def number(self, name: str, default: float | None) -> float | None:
        value = self.values.get(name, default)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not (usable and value >= 0):
            raise self.error(name, f"is {value!r}, not a number of 0 or more")
        return value

    def seconds(self, name: str, default: float | None) -> float | None:
        if (value := self.number(name, default)) == 0:
            raise self.error(name, "must be more than 0 seconds")
        return value

    def size(self, name: str) -> float | None:
        """MiB of a size as old tasks write it, "2G" say."""
        if (text := self.get(name, str, None)) is None:
            return None
        if (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", text, re.I)) is None:
            raise self.error(name, f"is {text!r}, not a size like '2G'")
        return float(match[1]) * SIZES[match[2].upper()]

    def user(self, default: str | None) -> str | None:
        value = self.values.get("user", default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
            raise self.error("user", f"is {value!r}, neither a name nor a number")
        return None if value is None else str(value)

    def env(self) -> dict[str, str]:
        """Variables; `${NAME}` and `${NAME:-default}` are those of this process."""
        table = self.table("env")
        return {name: _VARIABLE.sub(table._variable(name), str(value)) for name, value in table.values.items()}

    def _variable(self, name: str) -> Callable[[re.Match[str]], str]:
        def value(match: re.Match[str]) -> str:
            if (found := os.environ.get(match[1], match[2])) is None:
                raise self.error(name, f"wants the environment variable {match[1]}, which is not set here")
            return found

        return value
