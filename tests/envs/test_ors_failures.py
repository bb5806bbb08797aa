"""What can go wrong with an ORS server: what it does to the rollout, to the run, and to the server's sessions.

Each test is a row of the table in `docs/environments.md`. A real server plays, a proxy between spoils what it says.
After each failure the same engine plays a sound rollout, and then the server holds no session.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from agentrl.envs import ORS
from agentrl.types import Outcome, Trajectory
from tests.envs.ors_play import Says, Stage, contents, state, use
from tests.envs.proxy import Link, Proxy, edited, lost, replaced, silent
from tests.envs.servers import ServerProcess

ADD = use("do", what="add", amount=2)


class Trial:
    """An engine whose ORS server stands behind a proxy.

    Args:
        server: The real server.
        proxy: In front of it.
        start: Starts another one.
        settings: For `Stage` and `ORS`.
    """

    def __init__(self, server: ServerProcess, proxy: Proxy, start: Callable[[], ServerProcess], **settings: Any) -> None:
        self.server, self.proxy, self._start = server, proxy, start
        self._before = len(state(server)["ran"])
        retries = settings.pop("retries", 0)
        self.ors = ORS(url=proxy.url, **settings)
        self.stage = Stage(self.ors, retries=retries)

    def play(self, *says: Says, task: dict[str, Any] | None = None) -> Trajectory:
        (trajectory,) = self.stage.play(*says, task=task)
        return trajectory

    def fails(self, *says: Says, told: str, task: dict[str, Any] | None = None) -> Trajectory:
        """Play a rollout that is lost to the environment."""
        trajectory = self.play(*says, task=task)
        assert trajectory.outcome is Outcome.ENV_FAILURE
        assert trajectory.reward is None
        assert told in trajectory.failure.error
        return trajectory

    def goes_on(self) -> None:
        """The run goes on, and in the end no session is left."""
        trajectory = self.play(ADD, "done")
        assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 2.0)
        self.stage.close()
        assert state(self.server)["open"] == 0

    @property
    def ran(self) -> list[str]:
        """Tools that ran since the trial began."""
        return state(self.server)["ran"][self._before :]

    def restart(self) -> None:
        self.server.kill()
        self.server, self._before = self._start(), 0
        self.proxy.upstream = self.server.port


@pytest.fixture(scope="module")
def shared(ors_nursery) -> Iterator[tuple[ServerProcess, Proxy]]:
    """A server for all tests that do not end or stop it."""
    server = ors_nursery.start("troubled", setup_wait=0.1)
    with Proxy(server.port) as proxy:
        yield server, proxy
    server.kill()


@pytest.fixture
def begin(shared, start_ors, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trial]]:
    """Begin a trial, `begin(silence=0.5)`, on a server of its own if asked; in the end the run must have gone on."""
    monkeypatch.setattr("agentrl.envs.ors.client.ATTEMPTS", 2)
    with ExitStack() as stack:

        def begin(own: bool = False, **settings: Any) -> Trial:
            server, proxy = shared
            if own:
                server = start_ors("troubled")
                proxy = stack.enter_context(Proxy(server.port))
            trial = Trial(server, proxy, lambda: start_ors("troubled"), **settings)
            stack.callback(trial.stage.close)
            trials.append(trial)
            return trial

        trials: list[Trial] = []
        yield begin
        for trial in trials:
            trial.goes_on()


def stream(end: str) -> Any:
    """An event stream in place of the server's."""
    body = f"event: task_id\ndata: t\n\nevent: end\ndata: {end}\n\n"
    return replaced("200 OK", body, kind="text/event-stream")


def answered(**changes: Any) -> Any:
    """A result in place of the server's, with something wrong in it."""
    output = {"blocks": [{"type": "text", "text": "ok"}], "metadata": None, "reward": 1.0, "finished": False} | changes
    return stream(json.dumps({"ok": True, "output": {key: value for key, value in output.items() if value != "-"}}))


# --- results arrive exactly ---


@pytest.mark.parametrize(("what", "character"), [("spaces", " "), ("accents", "é")])
def test_long_output_arrives_exactly(begin, what: str, character: str) -> None:
    trial = begin()
    trajectory = trial.play(use("do", what=what, amount=10_000), "done")
    (content,) = contents(trajectory)
    expected = "".join("x" if i % 97 == 0 and what == "spaces" else character for i in range(10_000))
    assert content == expected
    assert trajectory.reward == 1.0


def test_a_reward_that_is_nan_is_no_reward(begin) -> None:
    """The server writes null for it, which a client cannot tell from no reward."""
    trial = begin()
    assert trial.play(use("do", what="nan"), ADD, "done").reward == 2.0


# --- a call is never run twice ---


def test_response_lost_before_task_id(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/call", lost(b"event: task_id"))
    trajectory = trial.play(ADD, "done")
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "not made again" in trajectory.failure.error
    assert trial.ran == ["add"], "the tool ran once"


def test_response_lost_before_task_id_with_a_retry_of_the_rollout(begin) -> None:
    trial = begin(retries=1)
    trial.proxy.spoil("/call", lost(b"event: task_id"))
    trajectory = trial.play(ADD, "done")
    assert (trajectory.outcome, trajectory.retries, trajectory.reward) == (Outcome.FINISHED, 1, 2.0)


def test_connection_cut_before_the_answer(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/call", lost(b"HTTP/1.1"))
    trial.fails(ADD, "done", told="not made again")


def test_stream_ends_before_end(begin) -> None:
    """It is taken up again by the call's id: the tool runs once, and no piece is taken twice."""
    trial = begin()
    trial.proxy.spoil("/call", lost(b"event: end"))
    trajectory = trial.play(use("do", what="spaces", amount=9_000), "done")
    assert (trajectory.outcome, trajectory.reward, trial.ran) == (Outcome.FINISHED, 1.0, ["spaces"])
    assert len(contents(trajectory)[0]) == 9_000


def test_stream_ends_before_end_while_the_tool_runs(begin) -> None:
    trial = begin()

    async def cut(request: bytes, link: Link) -> None:
        async for data in link.stream(request):
            await link.say(data)
            if b"event: task_id" in data:
                return

    trial.proxy.spoil("/call", cut)
    trajectory = trial.play(use("do", what="sleep", amount=0.8), "done")
    assert (trajectory.outcome, trajectory.reward, trial.ran) == (Outcome.FINISHED, 0.8, ["sleep"])


def test_stream_ends_before_end_again_and_again(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/call", lost(b"event: end"), times=4)
    trajectory = trial.play(ADD, "done")
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert trial.ran == ["add"]


def test_stream_ends_and_the_server_has_forgotten_the_call(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/call", lost(b"event: end"))
    unknown = "event: error\ndata: unknown task_id\n\n"
    trial.proxy.spoil("/call", replaced("200 OK", unknown, kind="text/event-stream"))
    trial.fails(ADD, "done", told="unknown task_id")


def test_stream_ends_and_the_server_runs_another_call(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/call", lost(b"event: end"))
    trial.proxy.spoil("/call", stream('{"ok": true}'))
    trial.fails(ADD, "done", told="the server runs call 't', not")


# --- the server is gone, deaf or slow ---


def test_server_dies_in_call(begin) -> None:
    trial = begin(own=True)
    trial.fails(use("do", what="exit"), "done", told="not made again")
    trial.restart()


def test_server_dies_between_calls(begin) -> None:
    trial = begin(own=True)

    def dies() -> str:
        trial.server.kill()
        return ADD

    trial.fails(dies, "done", told="the connection broke")
    trial.restart()


def test_server_refuses_connections(start_ors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.envs.ors.client.ATTEMPTS", 2)
    server = start_ors("troubled")
    stage = Stage(ORS(url=server.url))
    try:
        server.kill()
        for _ in range(2):
            (trajectory,) = stage.play(ADD, "done")
            assert trajectory.outcome is Outcome.ENV_FAILURE
            assert "cannot be reached" in trajectory.failure.error
    finally:
        stage.close()


def test_server_restarted(begin) -> None:
    trial = begin(own=True, retries=1)
    restarts = iter([True])

    def restarted() -> str:
        if next(restarts, False):
            trial.restart()
        return ADD

    trajectory = trial.play(ADD, restarted, "done")
    assert (trajectory.outcome, trajectory.retries, trajectory.reward) == (Outcome.FINISHED, 1, 4.0)


def test_session_expired(begin) -> None:
    """The server drops a session that it has not heard of for 900 seconds."""
    trial = begin()
    trial.proxy.spoil("/call", replaced("404 Not Found", '{"detail": "Active environment not found"}'))
    trial.fails(ADD, "done", told="the session is gone")


def test_session_expired_is_learnt_from_a_ping(begin) -> None:
    trial = begin(ping_interval=0.1)
    trial.proxy.spoil("/ping", replaced("404 Not Found", '{"detail": "Active environment not found"}'))

    async def think() -> None:
        environment = trial.ors()
        await environment.reset("{}")
        await asyncio.sleep(0.4)
        with pytest.raises(Exception, match="the session is gone"):
            await environment.call_tool("do", {"what": "add"})
        await environment.close()

    asyncio.run(think())
    assert trial.ran == []


def test_hung_server(begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: sockets stay open, nothing comes."""
    monkeypatch.setattr("agentrl.envs.ors.session.DELETE_SECONDS", 0.3)
    trial = begin(own=True, silence=1)

    def hangs() -> str:
        trial.server.pause()
        return ADD

    trajectory = trial.play(ADD, hangs, "done")
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "silent for 1 s" in trajectory.failure.error
    trial.server.resume()


def test_silent_stream(begin) -> None:
    trial = begin(silence=1)

    async def nothing_more(request: bytes, link: Link) -> None:
        async for data in link.stream(request):
            await link.say(data)
            if b"event: task_id" in data:
                await asyncio.sleep(3600)

    trial.proxy.spoil("/call", nothing_more)
    trial.fails(use("do", what="sleep", amount=0.2), "done", told="silent for 1 s")


def test_slow_tool_whose_server_gives_signs_of_life(begin) -> None:
    trial = begin(silence=1)

    async def pinging(request: bytes, link: Link) -> None:
        await link.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for _ in range(6):
            await link.say(b": ping\r\n\r\n")
            await asyncio.sleep(0.25)
        answer = await link.ask(request)
        await link.say(b"event" + answer.split(b"event", 1)[1].split(b"\r\n0\r\n")[0])

    trial.proxy.spoil("/call", pinging)
    trajectory = trial.play(ADD, "done")
    assert trajectory.outcome is Outcome.FINISHED


def test_slow_tool_beyond_the_deadline(begin) -> None:
    trial = begin(call_timeout=0.5)
    trial.fails(use("do", what="sleep", amount=3), "done", told="did not end within 0.5 s (call_timeout)")


def test_silent_from_the_start(begin, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = begin(silence=1)
    trial.proxy.spoil("/create_session", silent)
    trial.fails(ADD, "done", told="silent")


# --- tools and tasks that break ---


def test_tool_raises(begin) -> None:
    begin().fails(use("do", what="raise"), "done", told="broke on the server: the tool\nexploded")


def test_tool_returns_nonsense(begin) -> None:
    begin().fails(use("do", what="nonsense"), "done", told="expected ToolOutput")


def test_setup_raises(begin) -> None:
    trial = begin()
    trajectory = trial.fails(ADD, "done", task={"setup": "raise"}, told="setup exploded")
    assert trajectory.failure.where == "ORSEnvironment.reset"


def test_setup_takes_too_long(begin) -> None:
    trial = begin(setup_timeout=0.5)
    trial.fails(ADD, "done", task={"setup": 5}, told="did not end within 0.5 s")


def test_answer_to_create_lost(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/create", lost(b"HTTP/1.1"))
    trial.fails(ADD, "done", told="the connection broke")


def test_deletion_lost(begin) -> None:
    """It is asked for again: what is deleted may be deleted once more."""
    trial = begin()

    async def unheard(request: bytes, link: Link) -> None:
        link.reset()

    trial.proxy.spoil("/delete", unheard)
    assert trial.play(ADD, "done").reward == 2.0


def test_refusals_that_are_not_the_models(begin) -> None:
    trial = begin()
    for reason in ("name_collision", "episode_finished", "quota"):
        trial.proxy.spoil("/call", stream(json.dumps({"ok": False, "error": "no", "reason": reason})))
        trial.fails(ADD, "done", told=reason)


# --- nonsense ---


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (stream('{"ok": tru'), "is not JSON"),
        (stream(""), "is not JSON"),
        (replaced("200 OK", "<html>sign in</html>", kind="text/html"), "text/html in place of an event stream"),
        (replaced("200 OK", "event: end\ndata: {}\n\n", kind="text/event-stream"), "has `ok` = None"),
        (replaced("200 OK", "garbage", kind="text/event-stream"), "not made again"),
        (answered(reward="-"), "no `reward`"),
        (answered(reward="1"), "`reward` = '1'"),
        (answered(finished="no"), "`finished` = 'no'"),
        (answered(blocks=[{"type": "audio", "data": ""}]), "type 'audio'"),
        (answered(blocks={}), "`blocks` = {}"),
        (replaced("200 OK", "", "Content-Encoding: gzip", kind="text/event-stream"), "not made again"),
    ],
)
def test_nonsense_from_the_server(begin, fault: Any, told: str) -> None:
    trial = begin()
    trial.proxy.spoil("/call", fault)
    trial.fails(ADD, "done", told=told)


def test_half_a_character(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/call", edited("é".encode(), b"\xc3x"))
    trial.fails(use("do", what="accents", amount=3), "done", told="not UTF-8")


def test_endless_answer(begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.envs.ors.client.MAX_BYTES", 50_000)
    begin().fails(use("do", what="spaces", amount=90_000), "done", told="longer than 50000 bytes")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/prompt", '[{"type": "text"}]'), ("/prompt", "{}"), ("/task_tools", '{"tools": 3}'), ("/create_session", "{}")],
)
def test_nonsense_while_a_session_opens(begin, path: str, body: str) -> None:
    trial = begin()
    trial.proxy.spoil(path, replaced("200 OK", body))
    trial.fails(ADD, "done", told="ProtocolError")


# --- statuses ---


@pytest.mark.parametrize("status", ["500 Internal Server Error", "410 Gone", "503 Busy", "429 Slow", "422 No", "302 Go"])
def test_status_on_a_call(begin, status: str) -> None:
    trial = begin()
    trial.proxy.spoil("/call", replaced(status, '{"detail": "why"}'))
    trial.fails(ADD, "done", told=f"the server answered {status}: " + '{"detail": "why"}')
    assert trial.ran == [], "the call was not made again"


@pytest.mark.parametrize("status", ["503 Busy", "429 Slow"])
def test_status_with_retry_after(begin, status: str) -> None:
    """By convention the server has not acted on the request."""
    trial = begin()
    trial.proxy.spoil("/call", replaced(status, "", "Retry-After: 0"))
    trajectory = trial.play(ADD, "done")
    assert (trajectory.outcome, trajectory.reward, trial.ran) == (Outcome.FINISHED, 2.0, ["add"])


def test_status_with_retry_after_for_ever(begin) -> None:
    trial = begin()
    trial.proxy.spoil("/call", replaced("429 Slow", "", "Retry-After: 0"), times=2)
    trial.fails(ADD, "done", told="429 Slow")
