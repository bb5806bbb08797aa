"""What comes of Harbor tasks whose sandboxes and verifiers die, hang and lie."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs import Harbor
from agentrl.envs.sandbox import LocalBackend, Sandbox, SandboxSpec
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome, Task, Trajectory
from tests.envs.failures import Row, assert_came_true, assert_documented
from tests.envs.harbor.writing import GREP, HEALTH, HELLO, says, write_task
from tests.envs.ors_play import use
from tests.envs.sandbox.conftest import containers, docker_backend, local_backend
from tests.rollout.helpers import renderer, turn

NAME = "harbor"
WRITE = use("bash", command=HELLO)
RETRIES = 1


class Counted(LocalBackend):
    """Knows all sandboxes that it started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Any] = []

    def start_blocking(self, spec: SandboxSpec) -> Any:
        self.started.append(super().start_blocking(spec))
        return self.started[-1]

    @property
    def running(self) -> list[Sandbox]:
        """Those that were not stopped, or whose process lives on."""
        return [each for each in self.started if not each._stopped or each._process.poll() is None]


class Stage:
    """An engine on Harbor tasks whose model says the same in every attempt."""

    def __init__(self, harbor: Harbor) -> None:
        self._says: Sequence[str | Callable[[], str]] = ()
        self._spoken: defaultdict[str, int] = defaultdict(int)
        failures = FailurePolicy(retries=RETRIES, delay=0.01, max_rate=1.0)
        self._engine = RolloutEngine(ScriptedGenerator(self._speak), renderer(), environments=harbor, failures=failures)

    def _speak(self, session: str, ids: list[int], params: Any) -> list[int]:
        said = self._says[self._spoken[session]]
        self._spoken[session] += 1
        return turn(said() if callable(said) else said)

    def play(self, task: Path, *says: str | Callable[[], str]) -> Trajectory:
        self._says = says
        [trajectory] = trajectories = self._engine.run([Task("g", 0, 7, None, {"task": str(task)})])
        assert_row_invariants(trajectory)
        self._engine.release(trajectories)
        return trajectory

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class Play:
    """How a row is played.

    Attributes:
        task: For `write_task`.
        calls: What the model calls.
        tries: Attempts.
        reward: Its reward.
        kill: The sandbox is killed before the last call.
        docker: It is played in a container.
    """

    task: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[str, ...] = (WRITE,)
    tries: int = 1
    reward: float | None = None
    kill: bool = False
    docker: bool = False


def fails(event: str, says: str, **play: Any) -> Row:
    return Row(event, Outcome.ENV_FAILURE, says, Play(**play))


def verifier(event: str, says: str, test: str, toml: str = "") -> Row:
    """A row whose verifier gives no verdict: it is not asked again."""
    return fails(event, says, task={"test": test, "toml": toml})


BAD_BUILD = {"dockerfile": "FROM agentrl-base:1\nRUN exit 3\n"}
TWO = '{"a": 1, "b": 0}'
TWICE = {"tries": 1 + RETRIES}
ROWS = [
    fails("the image cannot be built", "cannot be built", task=BAD_BUILD, docker=True, **TWICE),
    fails("the health check fails", "the health check failed", task={"toml": HEALTH}, **TWICE),
    fails("the sandbox is killed between two calls", "is gone", calls=(WRITE, WRITE), kill=True, **TWICE),
    fails(
        "the container is killed between two calls", "is gone", calls=(WRITE, WRITE), kill=True, docker=True, **TWICE
    ),
    fails(
        "the disk is full when the tests are put there",
        "the tests cannot be put into the sandbox",
        task={"toml": "[environment]\nstorage_mb = 8"},
        calls=(use("bash", command="head -c 20M /dev/zero > /tmp/x; head -c 1M /dev/zero > /tmp/y; true"),),
        **TWICE,
    ),
    verifier(
        "the verifier takes longer than its `timeout_sec`",
        "took too long",
        "sleep 600",
        "[verifier]\ntimeout_sec = 0.3",
    ),
    verifier("the verifier writes no reward", "wrote no reward", "echo broken; exit 1"),
    verifier("the reward file is empty", "is empty", ": > /logs/verifier/reward.txt"),
    verifier("the reward is NaN", "not a finite number", says("nan")),
    verifier('the reward is "pass"', "cannot be read", says("pass")),
    verifier("`reward.json` is a list", "in place of numbers by name", says("[1]", "reward.json")),
    verifier(
        "several rewards, none of them called `reward`", "say which one counts", says('{"a": 1, "b": 0}', "reward.json")
    ),
    verifier("the reward file is a folder", "cannot be read", "mkdir /logs/verifier/reward.txt"),
    Row(
        "the agent wrote a reward itself",
        Outcome.ENV_FAILURE,
        "wrote no reward",
        Play({"test": "true"}, (use("bash", command=says("1")),)),
    ),
    Row(
        "the agent's time is over: it is verified all the same",
        Outcome.ENV_DONE,
        "is over",
        Play({"toml": "[agent]\ntimeout_sec = 5"}, (use("bash", command=f"{HELLO}; sleep 600"),), reward=1.0),
    ),
    Row(
        "a command runs out of memory",
        Outcome.FINISHED,
        "exit code",
        Play(
            {"toml": "[environment]\nmemory_mb = 64"},
            (use("bash", command="python3 -c 'x = bytearray(300 << 20)'"),),
            reward=0.0,
        ),
    ),
    Row("`test.sh` fails, but there is a reward", Outcome.FINISHED, "", Play({"test": f"{GREP}; exit 7"}, reward=1.0)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder / "healthy")
    for row in ROWS:
        write_task(folder / row.name, **row.how.task)
    return folder


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[tuple[Stage, Counted]]:
    local_backend()
    backend = Counted()
    stage = Stage(Harbor(folder, backend=backend, skip_unsupported=True))
    yield stage, backend
    stage.close()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if not row.how.docker])
def test_what_comes_of_a_failure(row: Row, folder: Path, local: tuple[Stage, Counted]) -> None:
    stage, backend = local

    def last_call() -> str:
        if row.how.kill:
            backend.started[-1]._process.kill()
        return row.how.calls[-1]

    hit = stage.play(folder / row.name, *row.how.calls[:-1], last_call, "done")
    others = [stage.play(folder / "healthy", WRITE, "done")]
    assert hit.retries + 1 == row.how.tries
    assert hit.reward == row.how.reward
    assert_came_true(row, hit, others, 1.0, len(backend.running))


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS if row.how.docker])
def test_what_comes_of_a_failure_in_docker(row: Row, folder: Path) -> None:
    backend = docker_backend()

    def last_call() -> str:
        for container in containers(backend, os.getpid()) if row.how.kill else []:
            backend.client.api.kill(container)
        return row.how.calls[-1]

    stage = Stage(Harbor(folder, backend=backend))
    try:
        hit = stage.play(folder / row.name, *row.how.calls[:-1], last_call, "done")
        others = [stage.play(folder / "healthy", WRITE, "done")]
    finally:
        stage.close()
    assert hit.retries + 1 == row.how.tries
    assert_came_true(row, hit, others, 1.0, len(containers(backend, os.getpid())))
    backend.client.close()


def test_the_documentation_has_this_table() -> None:
    assert_documented(NAME, ROWS)


@pytest.mark.slow
def test_two_hundred_rollouts_of_which_a_tenth_dies_hangs_or_lies(tmp_path: Path) -> None:
    """No wrong reward and no sandbox left, whatever sandboxes and verifiers do."""
    local_backend()
    rng = random.Random(0)
    lies = [says("nan"), "exit 1", says("[1]", "reward.json"), ": > /logs/verifier/reward.txt", "sleep 600"]
    whole = {"toml": "[verifier]\ntimeout_sec = 60\n[environment]\nmemory_mb = 128"}
    write_task(tmp_path / "ok", **whole)
    for number, lie in enumerate(lies):
        write_task(tmp_path / f"lie{number}", toml="[verifier]\ntimeout_sec = 1", test=lie)
    backend = Counted()
    spoken: defaultdict[str, int] = defaultdict(int)
    killed = 0

    def speak(session: str, ids: list[int], params: Any) -> list[int]:
        nonlocal killed
        spoken[session] += 1
        if spoken[session] == 2:
            if rng.random() < 0.05 and (running := backend.running):
                killed += 1
                rng.choice(running)._process.kill()  # type: ignore[attr-defined]
            return turn("done")
        return turn(WRITE)

    engine = RolloutEngine(
        ScriptedGenerator(speak),
        renderer(),
        environments=Harbor(tmp_path, backend=backend),
        failures=FailurePolicy(retries=2, delay=0.01, max_rate=1.0),
    )
    names = ["ok" if rng.random() > 0.05 else f"lie{rng.randrange(len(lies))}" for _ in range(200)]
    lost = 0
    try:
        for step in range(10):
            tasks = [
                Task(f"g{step}", n, 7, None, {"task": str(tmp_path / name)})
                for n, name in enumerate(names[step * 20 : step * 20 + 20])
            ]
            trajectories = engine.run(tasks)
            for task, trajectory in zip(tasks, trajectories, strict=True):
                assert_row_invariants(trajectory)
                if trajectory.outcome is Outcome.ENV_FAILURE:
                    lost += 1
                else:
                    assert task.columns["task"].endswith("ok"), "a lie became a reward"
                    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
            engine.release(trajectories)
    finally:
        engine.close()
    assert killed > 3
    assert len([name for name in names if name != "ok"]) <= lost < 40
    assert backend.running == []
