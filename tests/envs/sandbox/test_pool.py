"""The pool, and that nothing is left behind whatever happens to whoever started sandboxes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from agentrl.envs.sandbox import SandboxFailure, SandboxPool
from agentrl.envs.sandbox.docker_engine import owner, remove_orphans
from tests.envs.sandbox.conftest import IMAGE, Place, left, local_processes, wait_until_none_is_left
from tests.waiting import LONG, eventually


@pytest.mark.usefixtures("clean")
def test_the_next_sandbox_starts_while_one_is_used(place: Place) -> None:
    async def run() -> None:
        pool = SandboxPool(place.backend, place.spec(), warm=1)
        first = await pool.take()
        [ready] = pool._ready
        await eventually(ready.done)
        second = await pool.take()
        assert second is ready.result()
        await first.exec("touch /tmp/x", timeout=LONG)
        assert (await second.exec("ls /tmp", timeout=LONG)).stdout == ""
        await pool.give_back(first)
        with pytest.raises(SandboxFailure):
            await first.exec("true", timeout=LONG)
        await pool.close()
        with pytest.raises(SandboxFailure, match="stopped"):
            await second.exec("true", timeout=LONG)
        with pytest.raises(SandboxFailure, match="closed"):
            await pool.take()

    asyncio.run(run())


@pytest.mark.usefixtures("clean")
def test_a_pool_outlives_event_loops(place: Place) -> None:
    pool = SandboxPool(place.backend, place.spec(), warm=1)

    async def use() -> str:
        sandbox = await pool.take()
        try:
            return (await sandbox.exec("echo here", timeout=LONG)).stdout
        finally:
            await pool.give_back(sandbox)

    assert [asyncio.run(use()) for _ in range(2)] == ["here\n"] * 2
    asyncio.run(pool.close())


@pytest.mark.usefixtures("clean")
def test_what_a_pool_keeps_ready_ends_with_its_block(place: Place) -> None:
    async def use(pool: SandboxPool) -> None:
        await pool.give_back(await pool.take())

    with SandboxPool(place.backend, place.spec(), warm=1) as pool:
        asyncio.run(use(pool))
        ready = pool._ready[0]
    with pytest.raises(SandboxFailure, match="stopped"):
        asyncio.run(ready.result().exec("true", timeout=LONG))


@pytest.mark.usefixtures("clean")
def test_a_cancelled_take_keeps_the_sandbox_for_the_next(place: Place) -> None:
    async def run() -> None:
        pool = SandboxPool(place.backend, place.spec(), warm=0)
        taking = asyncio.create_task(pool.take())
        await asyncio.sleep(0)  # it has begun, and cannot have ended
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert len(pool._ready) == 1
        await pool.close()

    asyncio.run(run())


@pytest.mark.usefixtures("clean")
def test_a_cancelled_start_leaves_nothing(place: Place) -> None:
    async def run(pause: float) -> None:
        starting = asyncio.create_task(place.start())
        await asyncio.sleep(pause)
        if starting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:  # it was quicker than the longest pause
            await (await starting).stop()

    for pause in (0.0, 0.05, 0.2):
        asyncio.run(run(pause))


@pytest.mark.usefixtures("clean")
def test_an_exception_leaves_nothing(place: Place) -> None:
    async def run() -> None:
        async with await place.start() as sandbox:
            await sandbox.exec("setsid sleep 1000 & true", timeout=LONG)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        asyncio.run(run())


PARENT = f"""
import asyncio, os, sys
from agentrl.envs.sandbox import DockerBackend, LocalBackend, SandboxPool, SandboxSpec

async def main():
    if sys.argv[1] == "docker":
        pool = SandboxPool(DockerBackend(), SandboxSpec(image="{IMAGE}", memory_mb=64, pids=30), warm=1)
    else:
        pool = SandboxPool(LocalBackend(), SandboxSpec(memory_mb=64, pids=30), warm=1)
    sandboxes = [await pool.take() for _ in range(2)]
    for sandbox in sandboxes:
        await sandbox.exec("setsid sleep 1000 >/dev/null 2>&1 & true", timeout=60)
    if sys.argv[2] == "fork" and os.fork() == 0:
        import time
        time.sleep(600)  # holds every descriptor of its parent
    print("ready", flush=True)
    await sandboxes[0].exec("sleep 1000", timeout=1000)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "end", ["SIGKILL", *(pytest.param(end, marks=pytest.mark.slow) for end in ("SIGTERM", "SIGINT"))]
)
def test_nothing_outlives_a_parent_that_is_killed(place: Place, end: str) -> None:
    """SIGKILL runs none of our code; the others run all of it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, place.name, "plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert len(left(place, parent.pid)) >= 2
        parent.send_signal(getattr(signal, end))
        parent.wait(LONG)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until_none_is_left(place, parent.pid) == set()


def test_a_forked_child_that_keeps_the_connection_does_not_keep_sandboxes(place: Place) -> None:
    """`local` watches its parent; containers of a process that is gone are removed by the next backend."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, place.name, "fork"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert len(left(place, parent.pid)) >= 2
        children = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        if place.name == "docker":
            remove_orphans(place.backend.client)  # if no other backend, of another test, was quicker
        assert wait_until_none_is_left(place, parent.pid) == set()
        for child in children:
            child.kill()
    finally:
        parent.kill()
        parent.wait()


def test_a_killed_supervisor_takes_its_sandbox_along(place: Place) -> None:
    if place.name == "docker":
        pytest.skip("a container has no supervisor of ours")
    before = left(place, os.getpid())

    async def run() -> None:
        sandbox = await place.start()
        await sandbox.exec("setsid sleep 1000 & true", timeout=LONG)
        os.kill(sandbox.pid, signal.SIGKILL)
        await eventually(lambda: not local_processes(os.getpid()) - before)
        with pytest.raises(SandboxFailure, match="is gone"):
            await sandbox.exec("true", timeout=LONG)
        await sandbox.stop()

    asyncio.run(run())
    assert wait_until_none_is_left(place, os.getpid(), before) == set()


def test_own_containers_are_no_orphans(place: Place) -> None:
    if place.name == "local":
        pytest.skip("only containers have owners")

    async def run() -> int:
        async with await place.start() as sandbox:
            remove_orphans(place.backend.client)
            return (await sandbox.exec("true", timeout=LONG)).exit_code

    assert asyncio.run(run()) == 0
    assert f"/{os.getpid()}/" in owner()
