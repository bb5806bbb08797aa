"""OpenEnv servers in containers, with a real engine (DOCKER_HOST)."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import DockerException

from agentrl.envs import OpenEnv
from agentrl.envs.openenv import Container
from agentrl.errors import ConfigurationError
from agentrl.rollout.pool import EnvironmentPool
from agentrl.rollout.threads import Threads
from agentrl.types import Outcome
from tests.envs.failures import Row, assert_came_true
from tests.envs.playing import HIT, WELL, Model, engine, step, task
from tests.waiting import LONG, wait_until

SERVER = Path(__file__).parent / "servers" / "stdlib_openenv.py"
IMAGE, BASE = "agentrl-test-openenv:1", "agentrl-base:1"
COMMAND = ["python3", "-u", "/server.py", "{port}"]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("openenv-container")]  # they count containers of one image


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    try:
        client = docker.from_env(timeout=LONG)
        client.ping()
        client.images.get(BASE)
    except DockerException as error:
        pytest.skip(f"no Docker engine with the image {BASE} to test with (DOCKER_HOST): {error}")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as files:
        files.add(SERVER, "server.py")
        recipe = f"FROM {BASE}\nCOPY server.py /server.py\n".encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(recipe)
        files.addfile(entry, io.BytesIO(recipe))
    client.images.build(fileobj=io.BytesIO(context.getvalue()), custom_context=True, tag=IMAGE)
    for left in containers(client):  # by a run of these tests that was killed
        left.remove(force=True)
    yield client
    assert containers(client) == []
    client.images.remove(IMAGE, force=True)
    client.close()


def containers(client: Any) -> list[Any]:
    return client.containers.list(
        all=True, ignore_removed=True, filters={"label": "agentrl=openenv", "ancestor": IMAGE}
    )


def container(**settings: Any) -> Container:
    return Container(IMAGE, command=COMMAND, **{"memory": "64m", "start_timeout": LONG, **settings})


def test_an_image_is_started_for_the_run_and_gone_after_it(client: Any) -> None:
    factory = OpenEnv(image=container(environment={"LEVEL": "3"}, pids=32))
    playing = engine(Model({WELL: [step(what="look")]}), factory)
    try:
        trajectories = playing.run([task(WELL, member=member) for member in range(3)])
        [running] = containers(client)
        limits = running.attrs["HostConfig"]
        playing.release(trajectories)
    finally:
        playing.close()
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3
    assert trajectories[0].turns[0].results[0].content == "look 3"
    assert (limits["Memory"], limits["MemorySwap"], limits["PidsLimit"]) == (64 * 2**20, 64 * 2**20, 32)
    assert (limits["Init"], limits["NetworkMode"]) == (True, "host")
    assert containers(client) == []


NAME = "openenv-container"
ROWS = [
    Row("the server ends in a step", Outcome.ENV_FAILURE, "ended with exit code 3; its last words", "exit"),
    Row("the server needs too much memory", Outcome.ENV_FAILURE, "code 137, out of memory (memory=64m)", "eat"),
    Row("the container is killed between two steps", Outcome.ENV_FAILURE, "ended with exit code 137", "look"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_comes_of_a_failure(row: Row, client: Any) -> None:
    """The next episode has another container."""

    async def kill() -> None:
        if row.how == "look":
            containers(client)[0].kill()

    look = step(what="look")
    model = Model({HIT: (step(what=row.how), look), WELL: (look, look)}, {(HIT, 1): kill})
    playing = engine(model, OpenEnv(image=container()))
    try:
        first = playing.run([task(HIT)])
        playing.release(first)
        later = playing.run([task(WELL, group="later", member=member) for member in range(2)])
        playing.release(later)
    finally:
        playing.close()
    assert_came_true(row, first[0], later, 2.0, len(containers(client)))


def test_a_server_that_does_not_start_is_an_error_before_the_run(client: Any) -> None:
    broken = Container(IMAGE, command=["python3", "/server.py", "port {port}"], memory="64m")
    with pytest.raises(ConfigurationError, match=r"(?s)did not start.*exit code 1.*ValueError"):
        EnvironmentPool(OpenEnv(image=broken), Threads())
    missing = Container(IMAGE, command=["no-such-program", "{port}"], memory="64m")
    with pytest.raises(ConfigurationError, match="exec no-such-program failed"):
        EnvironmentPool(OpenEnv(image=missing), Threads())
    silent = Container(IMAGE, command=["sh", "-c", "sleep 600 # {port}"], memory="64m", start_timeout=0.5)
    with pytest.raises(ConfigurationError, match=r"did not answer at .*/health within 0.5 s \(start_timeout\)"):
        EnvironmentPool(OpenEnv(image=silent), Threads())
    assert containers(client) == []


def test_an_image_that_is_not_there_is_not_pulled(client: Any) -> None:
    with pytest.raises(ConfigurationError, match="has no image 'nobody/has-this:1'"):
        EnvironmentPool(OpenEnv(image="nobody/has-this:1"), Threads())


def test_no_container_is_left_when_the_process_is_killed(client: Any) -> None:
    code = (
        "import time; from agentrl.envs.openenv import Container, OpenEnv\n"
        f"environment = OpenEnv(image=Container({IMAGE!r}, command={COMMAND!r}, memory='64m'))()\n"
        "print('up', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert len(containers(client)) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: containers(client) == [])


def test_without_an_engine_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(ConfigurationError, match=r"no Docker engine.*DOCKER_HOST"):
        EnvironmentPool(OpenEnv(image=IMAGE), Threads())
