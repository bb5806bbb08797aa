"""What comes of OpenEnv servers that die, hang and lie, beside rollouts that go well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl.envs import OpenEnv
from agentrl.errors import RolloutError
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.policy import ToolPolicy
from agentrl.types import Outcome
from tests.envs import test_openenv_container
from tests.envs.failures import Row, assert_came_true, assert_documented
from tests.envs.playing import HIT, WELL, Model, engine, get, step, task
from tests.envs.servers import OPENENV, ServerProcess
from tests.envs.stub_openenv import LIES, stub_server
from tests.waiting import eventually, wait_until

pytestmark = OPENENV

NAME = "openenv"
GOOD = step(what="add")
HEALTHY = 2.0
"""The reward of a rollout to which nothing happens: two honest steps."""


@dataclass(frozen=True)
class Play:
    """How a row is played.

    Attributes:
        world: The stub, or a world of the real servers.
        trouble: For `reset`: what goes wrong.
        calls: What the model calls in the rollout that is hit.
        act: What is done before its second turn.
        settings: For `OpenEnv`.
        options: For the real server.
        engine: For the engine.
        alone: It hits all sessions of the server, so there is only one.
        dies: The server is gone afterwards; another one is started at its port.
    """

    world: str = "stub"
    trouble: str = ""
    calls: tuple[str, ...] = (GOOD, GOOD)
    act: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    dies: bool = False

    @property
    def hurried(self) -> bool:
        """Whether there is a short limit of time. Only what hangs may meet it: the others play on an engine without."""
        return bool(self.engine) or any(name.endswith("_timeout") for name in self.settings)


def lie(event: str, trouble: str, says: str, outcome: Outcome = Outcome.ENV_FAILURE, **settings: Any) -> Row:
    """A row that the stub plays."""
    return Row(event, outcome, says, Play(trouble=trouble, settings=settings))


def real(event: str, says: str, outcome: Outcome = Outcome.ENV_FAILURE, **play: Any) -> Row:
    """A row that a real server plays."""
    return Row(event, outcome, says, Play(world="trouble", **play))


GOES_ON = Outcome.FINISHED
ROWS = [
    real("the server process dies in a step", "is gone", calls=(step(what="exit"),), dies=True),
    real("the server is killed between two steps", "is gone", act="kill", dies=True),
    real("the server is restarted between two steps", "is gone", act="restart", dies=True),
    lie("the socket is cut in a step", "cut", "is gone"),
    lie("the server closes the connection in a step", "closed", "closed the connection"),
    lie("the socket is cut in the midst of a message", "half", "is gone"),
    real(
        "a step takes longer than `step_timeout`",
        "did not answer within 0.3 s (step_timeout)",
        calls=(step(what="wait"),),
        settings={"step_timeout": 0.3},
    ),
    real(
        "the server hangs (SIGSTOP)",
        "did not answer a ping within 1 s (ping_timeout)",
        act="pause",
        settings={"ping_interval": 0.1, "ping_timeout": 1},
        dies=True,
    ),
    real(
        "a step is given up by the policy of tools, and another one follows",
        "was not waited for any more in step 1",
        calls=(step(what="wait"), GOOD),
        engine={"tool_policy": ToolPolicy(timeout=0.5)},
    ),
    real("the server has fewer sessions than there are rollouts", "", GOES_ON, options={"sessions": 1}),
    real("the server ends the session while the model thinks", "has ended the session", act="reap", alone=True),
    real(
        "the environment raises in a step", "RuntimeError: the environment raised", GOES_ON, calls=(step(what="raise"),)
    ),
    real(
        "the action does not fit the schema",
        "ValueError: Invalid message; amount: Input should be greater than or equal to 0",
        GOES_ON,
        calls=(step(what="add", amount=-1),),
    ),
    real(
        "a validator of the action raises, which openenv 0.10 cannot write down",
        "SESSION_ERROR",
        calls=(step(what="add", amount=13),),
    ),
    lie("the server answers `VALIDATION_ERROR`", "bad arguments", "amount: Input should be a number", GOES_ON),
    real("the environment raises in `reset`", "could not reset its environment", trouble="raise"),
    lie("the server answers `SESSION_ERROR`", "goodbye", "SESSION_ERROR"),
    lie("an error has an unknown code", "unknown error", "broke the protocol"),
    real(
        "an answer is larger than `max_message_size`",
        "sent more than 5000 bytes (max_message_size)",
        calls=(step(what="big", amount=10_000),),
        settings={"max_message_size": 5000},
    ),
    lie("an answer arrives twice", "twice", "a frame that nobody had asked for"),
    Row(
        "a second answer comes while the model thinks",
        Outcome.ENV_FAILURE,
        "a frame that nobody had asked for",
        Play(trouble="twice but late", act="think"),
    ),
    lie("an answer too many comes with the next one", "one too many", "a frame that nobody had asked for"),
    Row(
        "an answer too many comes when the episode has ended",
        Outcome.ENV_FAILURE,
        "answered the call 2 with Observation",
        Play(trouble="one too many", calls=(GOOD,)),
    ),
    lie("the answer is `{}`", "empty", "broke the protocol"),
    lie("an observation has no data", "no data", "broke the protocol"),
    lie("the data are null", "null", "not an object"),
    lie("an observation has no reward", "no reward", "an observation lacks ['reward']"),
    lie("the answer is of another type", "other type", "unknown type 'state'"),
    lie("the answer is of an unknown type", "unknown type", "unknown type 'greeting'"),
    lie('the reward is "abc"', "text reward", "`reward` is 'abc', not a number"),
    lie("the reward is NaN", "nan", "NaN, which is no JSON"),
    lie("the reward is 1e999", "infinite", "`reward` is inf, not a finite number"),
    lie("the reward has 400 digits", "huge", "not a finite number"),
    lie('`done` is "false"', "text done", "`done` is 'false', not true or false"),
    lie("`done` is 0", "number done", "`done` is 0, not true or false"),
    lie("the observation is a list", "list", "an observation is [1, 2], not an object"),
    lie("the answer is an array", "array", "a frame is [1, 2], not an object"),
    lie("the answer is no JSON", "no json", "a frame is no JSON"),
    lie("the answer is nested 100000 deep", "deep", "a frame is no JSON"),
    lie("the answer has two rewards", "two rewards", "a key twice"),
    lie("the answer is binary", "binary", "a binary frame"),
    lie("a picture is none", "picture", "a picture that cannot be read"),
]


@pytest.fixture(scope="module")
def stub() -> Iterator[Any]:
    with stub_server() as server:
        yield server


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_comes_of_a_failure(row: Row, stub: Any, start_openenv: Callable[..., ServerProcess]) -> None:
    how: Play = row.how
    server = stub if how.world == "stub" else start_openenv(how.world, **how.options)

    async def act() -> None:
        if how.act in ("kill", "restart"):
            server.kill()
        if how.act == "restart":
            start_openenv(how.world, port=server.port)
        if how.act == "pause":
            server.pause()
        if how.act == "reap":
            await asyncio.to_thread(get, f"{server.url}/reap", "POST")
        if how.act == "think":
            await eventually(lambda: any(made._connection is not None and made._connection.lost for made in instances))

    instances: list[Any] = []

    def instance() -> Any:
        instances.append(factory())
        return instances[-1]

    model = Model({HIT: how.calls, WELL: (GOOD, GOOD)}, {(HIT, 1): act})
    factory = OpenEnv(server.url, columns=["trouble"], **how.settings)
    with ExitStack() as ending:
        playing = patient = engine(model, instance, **how.engine)
        ending.callback(playing.close)
        if how.hurried:
            patient = engine(Model({WELL: (GOOD, GOOD)}), OpenEnv(server.url, columns=["trouble"]))
            ending.callback(patient.close)
        beside = not (how.alone or how.dies or how.hurried)
        well = [task(WELL, member=member, trouble="") for member in (1, 2)] if beside else []
        hit, *others = first = playing.run([task(HIT, trouble=how.trouble), *well])
        playing.release(first)
        if how.dies and how.act != "restart":
            server.kill()
            start_openenv(how.world, port=server.port)
        later = patient.run([task(WELL, group="later", member=member, trouble="") for member in (0, 1)])
        others += later
        patient.release(later)
        if how.world != "stub":
            get(f"{server.url}/release", "POST")

    def sessions() -> int:
        return stub.sessions if how.world == "stub" else get(f"{server.url}/sessions")["open"]

    wait_until(lambda: sessions() == 0)
    assert_came_true(row, hit, others, HEALTHY, sessions())


def test_the_documentation_has_this_table() -> None:
    assert_documented(NAME, ROWS)
    assert_documented(test_openenv_container.NAME, test_openenv_container.ROWS)


def test_every_lie_of_the_stub_is_in_the_table() -> None:
    assert set(LIES) - {row.how.trouble for row in ROWS} == {"hangs"}  # the test of many rollouts plays it


def test_a_server_that_comes_back_costs_an_attempt(start_openenv: Callable[..., ServerProcess]) -> None:
    server = start_openenv("trouble")
    started = [server]

    async def restart() -> None:
        if len(started) == 1:
            server.kill()
            started.append(start_openenv("trouble", port=server.port))

    model = Model({HIT: (GOOD, GOOD)}, {(HIT, 1): restart})
    playing = engine(model, OpenEnv(server.url), failures=FailurePolicy(delay=0.05))
    try:
        [trajectory] = playing.run([task(HIT)])
    finally:
        playing.close()
    assert (trajectory.outcome, trajectory.reward, trajectory.retries) == (Outcome.FINISHED, HEALTHY, 1)


def test_a_server_that_stays_away_ends_the_run_and_the_message_says_why(
    start_openenv: Callable[..., ServerProcess],
) -> None:
    server = start_openenv("trouble")

    async def kill() -> None:
        server.kill()

    model = Model({HIT: (GOOD, GOOD)}, {(HIT, 1): kill})
    playing = engine(model, OpenEnv(server.url), failures=FailurePolicy(delay=0.01, max_rate=0.5))
    try:
        with pytest.raises(RolloutError, match=f"(?s){server.url} cannot be connected to"):
            playing.run([task(HIT, member=member) for member in range(4)])
    finally:
        playing.close()
