"""What a task asks for that cannot be had here: named before training starts, not met in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.envs.harbor.dockerfile import read_plain
from agentrl.envs.harbor.task import HarborTask, Place


def unsupported(task: HarborTask, *, network: bool, builds: bool) -> list[str]:
    """Fields of a task that ask for what cannot be had, each with the reason.

    Args:
        task: The task.
        network: Whether sandboxes may have a network.
        builds: Whether the backend has images.
    """
    return list(_problems(task, network, builds))


def _problems(task: HarborTask, network: bool, builds: bool) -> Iterator[str]:
    if (task.path / "trajectory.json").exists():
        yield "trajectory.json: a task cannot begin in the middle of a conversation"
    for folder in (task.path / "environment", *step_tests(task)):
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if (folder / name).exists():
                yield f"{folder.name}/{name}: only single containers can be had, no docker compose"
    for folder in step_tests(task):
        for file in sorted(folder.rglob(".harborignore")):
            yield f"{file.relative_to(task.path)}: tests are put into the sandbox as they are, none is left out"
    places = {"environment": task.place}
    raw = [("environment", _table(task.raw, "environment"))]
    for label, table in _owners(task.raw):
        verifier = _table(table, "verifier")
        raw.append((f"{label}verifier.environment", _table(verifier, "environment")))
        for name in ("agent", "verifier"):
            yield from _phase(f"{label}{name}", _table(table, name), _table(task.raw, "environment"))
        yield from _artifacts(label, table, verifier)
    for where, table in raw:
        yield from _machine(where, table)
    for step in task.steps:
        if step.verifier.place is not None:
            places[f"{step.name and step.name + ': '}the separate verifier's environment"] = step.verifier.place
    for where, place in places.items():
        yield from _place(where, place, network, builds)


def step_tests(task: HarborTask) -> set[Any]:
    """The folders with tests of all steps."""
    return {tests for step in task.steps for tests in step.tests}


def _owners(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", raw
    for number, step in enumerate(raw.get("steps", [])):
        yield f"steps[{number}].", step


def _machine(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    if table.get("os", "linux") != "linux":
        yield f"{where}.os = {table['os']!r}: only Linux can be had"
    for name in ("gpus", "gpu_types", "tpu"):
        if table.get(name):
            yield f"{where}.{name}: sandboxes have no accelerators"
    if table.get("mcp_servers"):
        yield f"{where}.mcp_servers: the agent's tools are those of Harbor(tools=...); use agentrl.envs.mcp for servers"
    if table.get("skills_dir"):
        yield f"{where}.skills_dir: there is no agent that reads skills"
    if table.get("allowed_hosts"):
        yield f"{where}.allowed_hosts: egress cannot be limited to hosts"


def _phase(where: str, table: Mapping[str, Any], environment: Mapping[str, Any]) -> Iterator[str]:
    if table.get("allowed_hosts"):
        yield f"{where}.allowed_hosts: egress cannot be limited to hosts"
    mode = table.get("network_mode")
    if mode is not None and mode != environment.get("network_mode"):
        yield f"{where}.network_mode = {mode!r}: a sandbox keeps the network of [environment] from start to end"


def _artifacts(label: str, table: Mapping[str, Any], verifier: Mapping[str, Any]) -> Iterator[str]:
    for entry in table.get("artifacts", []):
        if isinstance(entry, dict) and entry.get("service") not in (None, "main"):
            yield f"{label}artifacts.service = {entry['service']!r}: there is no container but the agent's"
    for entry in verifier.get("collect", []):
        if isinstance(entry, dict) and entry.get("service") not in (None, "main"):
            yield f"{label}verifier.collect.service = {entry['service']!r}: there is no container but the agent's"


def _place(where: str, place: Place, network: bool, builds: bool) -> Iterator[str]:
    if place.network == "allowlist":
        yield f"{where}.network_mode = 'allowlist': egress cannot be limited to hosts"
    if place.network == "public" and not network:
        yield f"{where}.network_mode = 'public': sandboxes get a network only with Harbor(network=True)"
    if not builds and place.dockerfile is not None and read_plain(place.dockerfile / "Dockerfile") is None:
        yield f"{where}: its Dockerfile does more than FROM, WORKDIR and ENV, and the local backend builds no images"
    if not builds and place.image is not None:
        yield f"{where}.docker_image = {place.image!r}: the local backend has no images"


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}
