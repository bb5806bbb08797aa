"""Plays tasks through the package `harbor`, in an interpreter that has it; writes what came of them as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.envs.harbor import Harbor, HarborBackend, download
from agentrl.envs.sandbox import SandboxSpec
from agentrl.errors import ConfigurationError
from tests.envs.harbor.package_environment import LocalEnvironment
from tests.envs.harbor.playing import play
from tests.envs.harbor.writing import KNOWN

HERE = "tests.envs.harbor.package_environment"


def verdicts(folder: Path, names: list[str]) -> dict[str, Any]:
    """What becomes of the tasks whose official verdicts are known."""
    found = {}
    for name in names:
        key = "accuracy" if name == "json-noreward-key" else "reward"
        task = KNOWN[name].write(folder / name)
        harbor = Harbor(task, backend=HarborBackend(f"{HERE}:LocalEnvironment"), reward_key=key)
        verdict = play(harbor, KNOWN[name].acts)
        found[name] = [verdict.rewards, verdict.fault and verdict.fault.name, verdict.error]
    return found


async def sandbox(folder: Path) -> dict[str, Any]:
    """What a sandbox's commands and files do."""
    (folder / "image").mkdir(parents=True)
    (folder / "image/Dockerfile").write_text("FROM any\nWORKDIR /app\n")
    spec = SandboxSpec(dockerfile=folder / "image", workdir="/work", env={"A": "1"})
    async with await HarborBackend(f"{HERE}:LocalEnvironment").start(spec) as box:
        said = await box.exec(
            'read -r word; echo "$word $A $B $(pwd)"; echo no >&2; exit 3', timeout=60, stdin=b"hi\n", env={"B": "2"}
        )
        late = await box.exec("sleep 600", timeout=1)
        long = await box.exec("seq 100000", timeout=60, max_output=1000)
        running = asyncio.create_task(box.exec("touch begun; sleep 601", timeout=900))
        async with asyncio.timeout(120):
            while not (await box.exec("test -e begun", timeout=60)).ok:  # noqa: ASYNC110 (a command sets no event)
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])
        left = await box.exec("grep -lsa 'sleep.60[1]' /proc/[0-9]*/cmdline", timeout=60)
        await box.put(b"1,2", "data/deep/numbers")
        (folder / "out").mkdir()
        await box.get_folder("data", folder / "out")
        errors = {}
        for name in ("missing", "data", "data/deep/numbers"):
            try:
                await box.get(name, max_bytes=2)
            except (OSError, ValueError) as error:
                errors[name] = type(error).__name__
        return {
            "said": [said.exit_code, said.stdout, said.stderr],
            "late": [late.timed_out, late.exit_code],
            "long": [long.truncated, len(long.stdout) < 2000],
            "cancelled": [running.cancelled(), left.stdout],
            "folder": (folder / "out/deep/numbers").read_text(),
            "errors": errors,
            "home": await box.image_folder(),
        }


def downloaded(folder: Path) -> list[str]:
    """The tasks of a registry, fetched by `harbor`."""
    for name in ("one", "two"):
        KNOWN["ok"].write(folder / "kept" / name)
    entries = [{"name": name, "path": str(folder / "kept" / name)} for name in ("one", "two")]
    registry = folder / "registry.json"
    registry.write_text(json.dumps([{"name": "set", "version": "1", "description": "", "tasks": entries}]))
    tasks = download("set@1", registry=registry)
    return sorted(Path(task).name for task in Harbor(tasks, backend="local").tasks()["task"])


def refused(folder: Path) -> list[str]:
    """What is refused when it is made."""
    tries = [
        lambda: HarborBackend("daytona"),
        lambda: HarborBackend("nowhere"),
        lambda: Harbor(KNOWN["ok"].write(folder / "task"), backend=HarborBackend(f"{HERE}:Publisher")),
        lambda: download("set@1", registry=folder / "missing.json"),
    ]
    errors = []
    for attempt in tries:
        try:
            attempt()
            errors.append("")
        except ConfigurationError as error:
            errors.append(str(error))
    return errors


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(
            json.dumps(
                {
                    "verdicts": verdicts(folder / "tasks", sys.argv[1:]),
                    "sandbox": asyncio.run(sandbox(folder / "sandbox")),
                    "open": LocalEnvironment.started - LocalEnvironment.stopped,
                    "downloaded": downloaded(folder / "registry"),
                    "refused": refused(folder / "refused"),
                }
            )
        )


if __name__ == "__main__":
    main()
