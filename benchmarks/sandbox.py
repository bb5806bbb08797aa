"""What sandboxes cost, and how much of that is agentrl's own, against plain `docker exec` in the same run.

Every figure is the median of `--repeats`; the peers' execs are done between ours, so both see the same machine.

- start: from nothing, and taken from a warm pool.
- exec: `Sandbox.exec(["true"])` with deadline, output cap, and death told apart, against the SDK's own
  `container.exec_run(["true"])`, which has none of these, and against the `docker` program if there is one.
- python: one call of the stateful `PythonTool`.
- parallel: rollouts of 4 commands a minute, 8 at a time, a fresh sandbox each, with a pool that keeps `--warm` ready.

A backend that is not there is left out, with the reason. Docker needs an image with a shell and Python: `--image`.

    python benchmarks/sandbox.py [--image agentrl-base:1] [--repeats 20] [--rollouts 24] [--warm 4] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.envs.sandbox import DockerBackend, LocalBackend, Sandbox, SandboxPool, SandboxSpec
from agentrl.errors import ConfigurationError
from agentrl.tools import PythonTool

Work = Callable[[], Awaitable[Any]]


async def median(repeats: int, *works: Work) -> list[float]:
    """Milliseconds of each work, which take turns; the first round does not count."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(repeats + 1):
        for work, taken in zip(works, times, strict=True):
            start = time.perf_counter()
            await work()
            if number:
                taken.append(1000 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


async def starts(backend: Any, spec: SandboxSpec, repeats: int) -> tuple[float, float, float]:
    """Milliseconds to start, to take from a pool that has one ready, and to stop."""
    cold, warm, stop = [], [], []
    pool = SandboxPool(backend, spec, warm=1)
    for _ in range(repeats):
        start = time.perf_counter()
        sandbox = await backend.start(spec)
        middle = time.perf_counter()
        await sandbox.stop()
        cold.append(middle - start)
        stop.append(time.perf_counter() - middle)
    await pool.give_back(await pool.take())
    for _ in range(repeats):
        await asyncio.sleep(3 * statistics.median(cold))  # the model thinks
        start = time.perf_counter()
        sandbox = await pool.take()
        warm.append(time.perf_counter() - start)
        await pool.give_back(sandbox)
    await pool.close()
    return tuple(1000 * statistics.median(times) for times in (cold, warm, stop))  # type: ignore[return-value]


def peers(backend: Any, sandbox: Sandbox) -> dict[str, Work]:
    """Plain execs in the same container."""
    if not isinstance(backend, DockerBackend):
        return {}
    container = backend.client.containers.get(sandbox.container)  # type: ignore[attr-defined]
    found: dict[str, Work] = {"SDK exec_run": lambda: asyncio.to_thread(container.exec_run, ["true"])}
    if shutil.which("docker"):
        command = ["docker", "exec", container.id, "true"]
        found["docker exec"] = lambda: asyncio.to_thread(subprocess.run, command, check=True)
    return found


async def rollouts(backend: Any, spec: SandboxSpec, count: int, warm: int) -> float:
    """Rollouts a minute, 8 at a time."""
    pool = SandboxPool(backend, spec, warm=warm)
    slots = asyncio.Semaphore(8)

    async def rollout() -> None:
        async with slots:
            sandbox = await pool.take()
            try:
                for _ in range(4):
                    result = await sandbox.exec("echo turn; cat /etc/passwd | wc -l", timeout=60)
                    assert result.ok, result
            finally:
                await pool.give_back(sandbox)

    start = time.perf_counter()
    await asyncio.gather(*(rollout() for _ in range(count)))
    seconds = time.perf_counter() - start
    await pool.close()
    return 60 * count / seconds


async def measure(name: str, backend: Any, spec: SandboxSpec, options: argparse.Namespace) -> None:
    cold, warm, stop = await starts(backend, spec, max(2, options.repeats // 4))
    print(f"{name:7} start {cold:8.1f} ms   from the warm pool {warm:6.2f} ms   stop {stop:8.1f} ms")
    async with await backend.start(spec) as sandbox:
        others = peers(backend, sandbox)
        ours, *theirs = await median(options.repeats, lambda: sandbox.exec(["true"], timeout=60), *others.values())
        print(f"{name:7} exec  {ours:8.1f} ms")
        for peer, taken in zip(others, theirs, strict=True):
            print(f"{'':7}       {taken:8.1f} ms   {peer}: ours takes {ours / taken:.2f} times as long")
        python = PythonTool(sandbox)
        (cell,) = await median(options.repeats, lambda: python("1 + 1"))
        await python.close()
        print(f"{name:7} python{cell:8.1f} ms   a cell in the stateful interpreter")
    rate = await rollouts(backend, spec, options.rollouts, options.warm)
    print(f"{name:7} {rate:.0f} rollouts a minute, 8 at a time, 4 commands each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="agentrl-base:1")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.rollouts, options.warm = 2, 2, 1
    specs = {"docker": SandboxSpec(image=options.image, memory_mb=256), "local": SandboxSpec(memory_mb=256)}
    for name, make in (("docker", DockerBackend), ("local", LocalBackend)):
        try:
            backend: Any = make()
        except ConfigurationError as error:
            print(f"{name:7} left out: {error}")
            continue
        asyncio.run(measure(name, backend, specs[name], options))


if __name__ == "__main__":
    main()
