"""What comes of ORS servers that die, hang and lie.

A real server plays, and a proxy in front of it spoils what it says: what the server did in truth can be asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl.envs import ORS
from agentrl.errors import EnvironmentFailure
from agentrl.types import Outcome
from tests.envs.failures import Row, assert_came_true, assert_documented
from tests.envs.ors_play import Stage, contents, state, use
from tests.envs.proxy import Fault, Link, Proxy, cut, edited, lost, replaced, silent, unheard
from tests.envs.servers import ServerProcess
from tests.waiting import eventually, wait_until

NAME = "ors"
ADD = use("do", what="add", amount=2)
HEALTHY = 2.0
"""The reward of a rollout to which nothing happens."""

EXPIRED = replaced("404 Not Found", '{"detail": "Active environment not found"}')
HUNG_DELETE_SECONDS = 0.5
"""Time that deleting may take while the server hangs, which would take it all."""


@dataclass(frozen=True)
class Play:
    """How a row is played.

    Attributes:
        faults: What the proxy spoils: ends of paths, and how.
        calls: What the model calls in the rollout that is hit.
        act: What is done before its last call.
        task: Its task.
        settings: For `ORS`.
        ran: What ran on the server, as far as the proxy let it hear of it.
        reward: Its reward.
        restart: The server is gone afterwards; another one takes its place.
    """

    faults: tuple[tuple[str, Fault], ...] = ()
    calls: tuple[str, ...] = (ADD,)
    act: str | None = None
    task: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ran: tuple[str, ...] | None = None
    reward: float | None = None
    restart: bool = False


def fails(event: str, says: str, *faults: Fault, path: str = "/call", **play: Any) -> Row:
    """A row whose rollout is lost to the environment."""
    return Row(event, Outcome.ENV_FAILURE, says, Play(tuple((path, fault) for fault in faults), **play))


def goes_on(event: str, says: str, *faults: Fault, reward: float = HEALTHY, **play: Any) -> Row:
    """A row whose rollout goes on."""
    faulty = tuple(("/call", fault) for fault in faults)
    return Row(event, Outcome.FINISHED, says, Play(faulty, reward=reward, **play))


def stream(end: str) -> Fault:
    """An event stream in place of the server's."""
    return replaced("200 OK", f"event: task_id\ndata: t\n\nevent: end\ndata: {end}\n\n", kind="text/event-stream")


def result(**changes: Any) -> Fault:
    """A result in place of the server's, with something wrong in it ("-": left out)."""
    output = {"blocks": [{"type": "text", "text": "ok"}], "metadata": None, "reward": 1.0, "finished": False} | changes
    return stream(json.dumps({"ok": True, "output": {key: value for key, value in output.items() if value != "-"}}))


def refusal(reason: str | None) -> Fault:
    return stream(json.dumps({"ok": False, "error": "not this one", "reason": reason}))


def status(line: str) -> Fault:
    return replaced(line, "why", kind="text/plain")


async def signs_of_life(request: bytes, link: Link) -> None:
    """The result comes after a while that is longer than the silence allowed, with comments in between."""
    answer = await link.ask(request)
    _head, _, events = answer.partition(b"\r\n\r\n")
    await link.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    for _ in range(6):
        await link.say(b": ping\r\n\r\n")
        await asyncio.sleep(1)
    await link.say(events[events.index(b"event") : events.rindex(b"\r\n0\r\n")])


MAY_HAVE_RUN = "may have run, so it is not made again"
QUIET = {"silence": 5}
ROWS = [
    goes_on(
        "the pieces of a result begin and end with spaces", "x", calls=(use("do", what="spaces", amount=9e3),), reward=1
    ),
    fails("the answer to a call is lost before it begins", MAY_HAVE_RUN, lost(b"HTTP/1.1"), ran=("add",)),
    fails("the answer to a call is lost before its `task_id`", MAY_HAVE_RUN, lost(b"event: task_id"), ran=("add",)),
    goes_on("the stream ends before `end`", "done", lost(b"event: end"), ran=("add",)),
    goes_on(
        "the stream ends while the tool runs",
        "done",
        cut(after=b"event: task_id"),
        calls=(use("do", what="sleep", amount=0.5),),
        ran=("sleep",),
        reward=0.5,
    ),
    fails(
        "the stream ends before `end` again and again", "the connection broke", *[lost(b"event: end")] * 4, ran=("add",)
    ),
    fails(
        "the stream ends, and the server has forgotten the call",
        "unknown task_id",
        lost(b"event: end"),
        replaced("200 OK", "event: error\ndata: unknown task_id\n\n", kind="text/event-stream"),
    ),
    fails("the stream ends, and the server runs another call", "the server runs", lost(b"event: end"), stream("{}")),
    fails("the server process dies in a call", MAY_HAVE_RUN, calls=(use("do", what="exit"),), restart=True),
    fails("the server is killed between two calls", "the connection broke", calls=(ADD, ADD), act="kill", restart=True),
    fails("the server is restarted between two calls", "the session is gone", calls=(ADD, ADD), act="restart"),
    fails("the session expired", "the session is gone", EXPIRED),
    fails("the server hangs (SIGSTOP)", "silent for 5 s (silence)", calls=(ADD, ADD), act="pause", settings=QUIET),
    fails("a call's stream falls silent", "silent for 5 s (silence)", silent, settings=QUIET),
    goes_on("a slow tool, while the server gives signs of life", "done", signs_of_life, settings=QUIET),
    fails(
        "a call takes longer than `call_timeout`",
        "did not end within 0.5 s (call_timeout)",
        calls=(use("do", what="sleep", amount=600),),
        settings={"call_timeout": 0.5},
    ),
    fails("the tool raises", "broke on the server: the tool", calls=(use("do", what="raise"),)),
    fails("the tool returns nonsense", "expected ToolOutput", calls=(use("do", what="nonsense"),)),
    goes_on("wrong arguments", "Tool input validation error", calls=(use("do", what="add", amount=1e9), ADD)),
    goes_on("an unknown tool", "there is no tool named 'fly'", calls=(use("fly"), ADD)),
    goes_on("the server refuses a call, and why is not said", "not this one", refusal(None), calls=(ADD, ADD)),
    fails("the server refuses a call: `name_collision`", "(name_collision)", refusal("name_collision")),
    fails("the server refuses a call: `episode_finished`, out of the blue", "did not run", refusal("episode_finished")),
    fails("the server refuses a call for an unknown reason", "(quota)", refusal("quota")),
    fails("the result is no JSON", "is not JSON", stream('{"ok": tru')),
    fails("the result is empty", "is not JSON", stream("")),
    fails("the result has two rewards", "a key is there twice", stream('{"ok": true, "ok": true}')),
    fails(
        "the answer is a web page", "text/html in place of an event stream", replaced("200 OK", "<a>", kind="text/html")
    ),
    fails("the answer is garbage", MAY_HAVE_RUN, replaced("200 OK", "garbage", kind="text/event-stream")),
    fails("half a character", "is not UTF-8", edited(b"done", b"d\xc3ne")),
    fails(
        "the answer is longer than may be",
        "is longer than 50000 bytes",
        calls=(use("do", what="spaces", amount=90_000),),
    ),
    fails("the result has no reward", "no `reward`", result(reward="-")),
    fails('the reward is "1"', "`reward` = '1'", result(reward="1")),
    fails("the reward is true", "`reward` = True", result(reward=True)),
    fails("the reward is NaN", "JSON has no NaN", result(reward=float("nan"))),
    fails("the reward has 400 digits", "it must be a finite number", result(reward=10**400)),
    goes_on("the reward is null (also what openreward writes for NaN)", "done", calls=(use("do", what="nan"), ADD)),
    fails('`finished` is "no"', "`finished` = 'no'", result(finished="no")),
    fails("a block is of an unknown type", "a block of the type 'audio'", result(blocks=[{"type": "audio"}])),
    fails("an image is none", "an image that cannot be decoded", result(blocks=[{"type": "image", "data": "aGk="}])),
    fails("status 500 on a call", "the server answered 500", status("500 Oops"), ran=()),
    fails("status 410 on a call", "the session is gone", status("410 Gone"), ran=()),
    fails("status 503 on a call", "the server answered 503", status("503 Busy"), ran=()),
    fails("status 429 on a call", "the server answered 429", status("429 Slow"), ran=()),
    goes_on("status 503 with `Retry-After`", "done", replaced("503 Busy", "", "Retry-After: 0"), ran=("add",)),
    goes_on("status 429 with `Retry-After`", "done", replaced("429 Slow", "", "Retry-After: 0"), ran=("add",)),
    fails(
        "status 429 with `Retry-After` for ever", "429 Slow", *[replaced("429 Slow", "", "Retry-After: 0")] * 2, ran=()
    ),
    fails("setup raises", "setup exploded", task={"setup": "raise"}),
    goes_on("setup takes long", "done", task={"setup": 0.4}),
    goes_on("constructing the environment takes long", "done", task={"construct": 6}, settings=QUIET),
    fails(
        "setup takes longer than `setup_timeout`", "within 0.5 s", task={"setup": 600}, settings={"setup_timeout": 0.5}
    ),
    fails("the answer to `/create` is lost", "the connection broke", lost(b"HTTP/1.1"), path="/create"),
    fails("`/prompt` is nonsense", "ProtocolError", replaced("200 OK", '[{"type": "text"}]'), path="/prompt"),
    fails("`/task_tools` is nonsense", "ProtocolError", replaced("200 OK", '{"tools": 3}'), path="/task_tools"),
    fails("`/create_session` is nonsense", "ProtocolError", replaced("200 OK", "{}"), path="/create_session"),
    Row("`/delete` is not heard", Outcome.FINISHED, "done", Play((("/delete", unheard),), reward=HEALTHY)),
    Row("the answer to `/delete` is lost", Outcome.FINISHED, "done", Play((("/delete", lost(b"H")),), reward=HEALTHY)),
]


@pytest.fixture(scope="module")
def shared(ors_nursery) -> Iterator[tuple[ServerProcess, Proxy, Stage]]:
    """A server for all rows that do not end or stop it, and an engine for those without settings of their own."""
    server = ors_nursery.start("troubled", setup_wait=0.1)
    with Proxy(server.port) as proxy:
        stage = Stage(ORS(url=proxy.url))
        yield server, proxy, stage
        stage.close()
    server.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.envs.ors.client.ATTEMPTS", 2)
    monkeypatch.setattr("agentrl.envs.ors.client.MAX_BYTES", 50_000)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "row",
    # Rows with settings are those that wait for something.
    [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.how.settings else []) for row in ROWS],
)
def test_what_comes_of_a_failure(
    row: Row, shared: Any, start_ors: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who play well afterwards are not held to the row's own limits of time."""
    how: Play = row.how
    server, proxy, stage = shared
    servers = [server]

    def restart() -> None:
        servers[-1].kill()
        servers.append(start_ors("troubled"))
        proxy.upstream = servers[-1].port

    def last_call() -> str:
        if how.act is not None:
            {"kill": servers[-1].kill, "pause": servers[-1].pause, "restart": restart}[how.act]()
        return how.calls[-1]

    with ExitStack() as ending:
        if how.act or how.restart:
            servers = [start_ors("troubled")]
            proxy = ending.enter_context(Proxy(servers[0].port))
        before = len(state(servers[0])["ran"])
        patient = stage
        if how.settings or how.act or how.restart:
            stage, patient = Stage(ORS(url=proxy.url, **how.settings)), Stage(ORS(url=proxy.url))
            ending.callback(stage.close)
            ending.callback(patient.close)
        for path, fault in how.faults:
            proxy.spoil(path, fault)
        with monkeypatch.context() as patch:
            if how.act == "pause":
                patch.setattr("agentrl.envs.ors.session.DELETE_SECONDS", HUNG_DELETE_SECONDS)
            [hit] = stage.play(*how.calls[:-1], last_call, "done", task=dict(how.task))
        if how.ran is not None:
            assert tuple(state(servers[0])["ran"][before:]) == how.ran
        if how.restart:
            restart()
        if how.act == "pause":
            servers[0].resume()
        others = patient.play(ADD, "done")
    assert hit.reward == how.reward
    assert not proxy.faults, "every fault was met"
    wait_until(lambda: state(servers[-1])["open"] == 0)
    assert_came_true(row, hit, others, HEALTHY, state(servers[-1])["open"])


def test_the_documentation_has_this_table() -> None:
    assert_documented(NAME, ROWS)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("what", "filling"), [("spaces", " "), ("accents", "é")])
def test_long_results_arrive_exactly(shared: Any, what: str, filling: str) -> None:
    """Also when the stream breaks in the midst of them: no piece is taken twice."""
    server, proxy, stage = shared
    proxy.spoil("/call", lost(b"event: end"))
    [trajectory] = stage.play(use("do", what=what, amount=10_000), "done")
    expected = "".join("x" if what == "spaces" and i % 97 == 0 else filling for i in range(10_000))
    assert (contents(trajectory), trajectory.reward) == ([expected], 1.0)
    assert state(server)["open"] == 0


@pytest.mark.usefixtures("quick")
def test_a_rollout_that_was_lost_is_played_again_on_a_session_of_its_own(shared: Any) -> None:
    server, proxy, _ = shared
    stage = Stage(ORS(url=proxy.url), retries=1)
    proxy.spoil("/call", lost(b"event: task_id"))
    try:
        [trajectory] = stage.play(ADD, "done")
    finally:
        stage.close()
    assert (trajectory.outcome, trajectory.reward, trajectory.retries) == (Outcome.FINISHED, HEALTHY, 1)
    assert state(server)["open"] == 0


@pytest.mark.usefixtures("quick")
def test_a_server_that_takes_no_connections_costs_attempts(start_ors: Callable[..., ServerProcess]) -> None:
    server = start_ors("troubled")
    stage = Stage(ORS(url=server.url))
    try:
        server.kill()
        [trajectory] = stage.play(ADD, "done")
    finally:
        stage.close()
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "cannot be reached" in trajectory.failure.error


@pytest.mark.usefixtures("quick")
def test_a_ping_learns_that_the_session_expired(shared: Any) -> None:
    server, proxy, _ = shared
    environment = ORS(url=proxy.url, ping_interval=0.1)()
    before = len(state(server)["ran"])
    proxy.spoil("/ping", EXPIRED)

    async def think() -> None:
        await environment.reset("{}")
        await eventually(lambda: environment._session._lost)
        with pytest.raises(EnvironmentFailure, match="the session is gone"):
            await environment.call_tool("do", {"what": "add"})
        await environment.close()

    asyncio.run(think())
    assert len(state(server)["ran"]) == before
    assert state(server)["open"] == 0
