"""The verifier's contract: what is run, where, as whom, and which files say what it found.

Reward files that are there already are removed, as root; the tests are put into `/tests`; `/tests/test.sh` runs, and
how it exits does not matter; what it wrote to `/logs/verifier/reward.json` or `reward.txt` counts. A separate verifier
does this in a fresh sandbox, which has of the agent's files only those that the task declares, and those in
`/logs/artifacts`. An image of its own has its tests in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
from pathlib import Path

from agentrl.envs.harbor.errors import Fault, HarborFailure
from agentrl.envs.harbor.rewards import Rewards, read_rewards
from agentrl.envs.harbor.sandboxes import Home, Source
from agentrl.envs.harbor.task import Artifact, Step

REWARD_BYTES = 2**20

PREPARE = """
test -d /logs/verifier -a ! -L /logs/verifier || { rm -rf /logs/verifier && mkdir -p /logs/verifier; }
rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt && chmod 777 /logs/verifier
"""
"""An agent may have left anything in their place, folders and links included."""

PICK = """
folder=$(mktemp -d) && echo "$folder" &&
tar -cf "$folder.tar" {patterns} -C {path} . && tar -xf "$folder.tar" -C "$folder"
status=$?; rm -f "$folder.tar"; exit "$status"
"""
"""Copy what matches no pattern into a new folder, and say which."""

EMPTY = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier && chmod 777 /logs/verifier"
RUN = "(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1"
LAST_WORDS = "tail -c 500 /logs/verifier/test-stdout.txt"


async def verify(step: Step, agent: Home, source: Source) -> Rewards:
    """Judge what the agent left behind.

    Args:
        step: What was to be done.
        agent: The agent's sandbox.
        source: Where a separate verifier's sandbox comes from.

    Raises:
        HarborFailure: There is no verdict; says why.
        SandboxFailure: A sandbox is gone.
    """
    if step.verifier.place is None:
        return await _judge(step, agent)
    with tempfile.TemporaryDirectory(prefix="agentrl-harbor-") as folder:
        taken = await _take(step, agent, Path(folder))
        judge = await source.start(step.verifier.place)
        async with judge.sandbox:
            for path, copy in taken.items():
                if copy.is_dir():  # nothing of the image's own stays among the agent's files
                    await _root(judge, f"rm -rf -- {shlex.quote(path)}", Fault.TESTS)
                await judge.sandbox.put(copy, path)
                await _root(judge, f"test ! -d {shlex.quote(path)} || chmod 777 {shlex.quote(path)}", Fault.TESTS)
            return await _judge(step, judge)


async def forget(home: Home) -> None:
    """Remove tests and verdicts between two steps."""
    await _root(home, EMPTY, Fault.SETUP)


async def _judge(step: Step, home: Home) -> Rewards:
    verifier = step.verifier
    await _root(home, PREPARE, Fault.TESTS)
    try:
        for tests in () if verifier.brings_tests else step.tests:
            await home.sandbox.put(tests, "/tests")
    except OSError as error:
        raise HarborFailure(Fault.TESTS, str(error)) from error
    await _root(home, "chmod +x /tests/test.sh", Fault.TESTS)
    result = await home.exec(RUN, timeout=verifier.timeout, user=verifier.user, env=verifier.env)
    if result.timed_out:
        raise HarborFailure(Fault.VERIFIER_TIMEOUT, f"it did not end within {verifier.timeout:g} s")
    found = [await _read(home, name) for name in ("reward.json", "reward.txt")]
    try:
        return read_rewards(*found)
    except HarborFailure as failure:
        words = (await home.root(LAST_WORDS)).stdout.strip() or "nothing"
        raise HarborFailure(
            failure.fault, f"{failure}; test.sh ended with exit code {result.exit_code} and wrote: {words}"
        ) from None


async def _take(step: Step, agent: Home, folder: Path) -> dict[str, Path]:
    """Copies here, under names of ours, of the artifacts that there are."""
    for collect in step.verifier.collect:
        await agent.exec(collect.command, timeout=collect.timeout, user=collect.user)
    taken: dict[str, Path] = {}
    for number, artifact in enumerate(step.artifacts):
        copy = folder / str(number)
        with contextlib.suppress(FileNotFoundError, ValueError):  # missing, too large, no file at all: all missing
            await _copy(agent, artifact, copy)
            taken[artifact.path] = copy
    return taken


async def _copy(agent: Home, artifact: Artifact, copy: Path) -> None:
    try:
        await asyncio.to_thread(copy.write_bytes, await agent.sandbox.get(artifact.path))
        return
    except IsADirectoryError:
        pass
    if not artifact.exclude:
        await agent.sandbox.get_folder(artifact.path, copy)
        return
    # Patterns are those of the sandbox's own tar, as in Harbor, so it does the picking.
    patterns = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in artifact.exclude)
    picked = await agent.root(PICK.format(patterns=patterns, path=shlex.quote(artifact.path)))
    folder = picked.stdout.strip()
    try:
        if not picked.ok:
            raise ValueError(f"{artifact.path} cannot be copied: {picked.stderr.strip()}")
        await agent.sandbox.get_folder(folder, copy)
    finally:
        await agent.root(f"rm -rf -- {shlex.quote(folder)}")


async def _read(home: Home, name: str) -> bytes | None:
    path = f"/logs/verifier/{name}"
    try:
        return await home.get(path, max_bytes=REWARD_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HarborFailure(Fault.REWARD_UNREADABLE, str(error)) from error


async def _root(home: Home, command: str, fault: Fault) -> None:
    result = await home.root(command)
    if not result.ok:
        raise HarborFailure(fault, result.stderr.strip() or f"exit code {result.exit_code}")
