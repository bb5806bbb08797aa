"""OpenEnv against its own servers: tools, rewards, sessions and how many there are."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs import OpenEnv
from agentrl.envs.openenv import connection as connection_module
from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.rollout.pool import EnvironmentPool
from agentrl.rollout.threads import Threads
from agentrl.types import Outcome
from tests.envs.playing import WELL, Model, engine, get, step, task
from tests.envs.servers import OPENENV, ServerProcess
from tests.envs.stub_openenv import stub_server
from tests.rollout.helpers import call
from tests.waiting import eventually, wait_until

pytestmark = OPENENV

Start = Callable[..., ServerProcess]


def play(server: ServerProcess, script: list[str], *tasks: Any, options: dict[str, Any] | None = None, **settings: Any):
    """The trajectories of rollouts that all follow a script; all sessions are closed afterwards."""
    playing = engine(Model({WELL: script}), OpenEnv(server.url, **settings), **(options or {}))
    try:
        trajectories = playing.run(list(tasks) or [task(WELL)])
        playing.release(trajectories)
    finally:
        playing.close()
    wait_until(lambda: get(f"{server.url}/sessions")["open"] == 0)
    return trajectories


def answers(trajectory: Any) -> list[Any]:
    return [result.content for turn in trajectory.turns for result in turn.results]


# Tools, observations, rewards ----------------------------------------------------------------------------------------


def test_an_action_model_is_the_tool_step_and_done_ends_the_episode(start_openenv: Start) -> None:
    """G14"""
    [trajectory] = play(start_openenv("guess"), [step(number=n) for n in (9, 4, 5, 6, 7, 8)])
    assert trajectory.prompt[-1]["content"] == f"{WELL}Guess my number between 0 and 9."
    assert answers(trajectory)[-1] == "correct"
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENV_DONE, 1.0)


def test_a_union_of_action_models_is_a_tool_each(start_openenv: Start) -> None:
    script = [call("move", '{"direction": "right"}'), call("take")]
    [trajectory] = play(start_openenv("corridor"), script)
    assert answers(trajectory) == ['{"position": 1, "items": ["lamp"]}'] * 2
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENV_DONE, pytest.approx(0.9))


@pytest.mark.parametrize(
    ("reward", "episode", "turns"), [("last", 1.0, None), ("steps", None, [-0.1, 1.0]), (None, None, None)]
)
def test_what_rewards_come_to(start_openenv: Start, reward: Any, episode: Any, turns: Any) -> None:
    script = [call("move", '{"direction": "right"}'), call("take")]
    [trajectory] = play(start_openenv("corridor"), script, reward=reward)
    assert (trajectory.reward, trajectory.turn_rewards) == (episode, turns)


def test_tools_of_an_mcp_server_bring_their_rewards(start_openenv: Start) -> None:
    look, borrow = call("look_up", '{"title": "Emma"}'), call("borrow", '{"title": "Emma"}')
    failing, wrong = call("look_up", '{"title": "?"}'), call("look_up", '{"title": 3}')
    [trajectory] = play(start_openenv("shelf"), [look, failing, wrong, borrow])
    told = answers(trajectory)
    assert told[0] == "Emma stands on shelf 1"
    assert told[1] == "Error: RuntimeError: Error calling tool 'look_up': a title has more than one letter"
    assert "'title' must be string, not 3" in told[2]
    assert (trajectory.outcome, trajectory.reward, trajectory.tool_failures) == (Outcome.ENV_DONE, 1.0, 2)


def test_columns_and_the_seed_reach_reset(start_openenv: Start) -> None:
    rows = [task(WELL, group=wanted, wanted=wanted, other="not sent") for wanted in ("Emma", "Ulysses")]
    trajectories = play(start_openenv("shelf"), [call("borrow", '{"title": "Emma"}')], *rows, columns=["wanted"])
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0]


def test_a_column_that_the_dataset_has_not_ends_the_run(start_openenv: Start) -> None:
    with pytest.raises(ConfigurationError, match="names 'level', but the dataset only has"):
        play(start_openenv("guess"), [], columns=["level"])


def test_a_column_that_is_no_json_ends_the_run(start_openenv: Start) -> None:
    with pytest.raises(ConfigurationError, match=r"names 'wanted', whose value .* is no JSON"):
        play(start_openenv("shelf"), [], task(WELL, wanted={1, 2}), columns=["wanted"])


def test_observations_can_be_rendered_otherwise(start_openenv: Start) -> None:
    script = [call("move", '{"direction": "right"}')]
    [trajectory] = play(start_openenv("corridor"), script, render=lambda fields: f"at {fields['position']}")
    assert trajectory.prompt[-1]["content"] == f"{WELL}at 0"
    assert answers(trajectory) == ["at 1"]


def test_calls_of_one_turn_are_steps_in_their_order_and_none_comes_after_the_end(start_openenv: Start) -> None:
    calls = call("move", '{"direction": "right"}') + call("take") + call("move", '{"direction": "left"}')
    [trajectory] = play(start_openenv("corridor"), [calls])
    first, second, third = answers(trajectory)
    assert (first, second) == ('{"position": 1, "items": ["lamp"]}',) * 2
    assert "the episode is over" in third
    assert trajectory.reward == pytest.approx(0.9)


def test_metrics_call_the_reward_by_the_name_given(start_openenv: Start) -> None:
    pool = EnvironmentPool(OpenEnv(start_openenv("guess").url, name="guessing"), Threads())
    assert pool.reward_owners == {None: "guessing"}


# Before the run ------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_an_error_before_the_run() -> None:
    with pytest.raises(ConfigurationError, match=r"http://127.0.0.1:9/schema: ConnectError"):
        EnvironmentPool(OpenEnv("http://127.0.0.1:9"), Threads())


def test_a_server_that_cannot_make_an_environment_is_an_error_before_the_run(start_openenv: Start) -> None:
    with pytest.raises(ConfigurationError, match="FACTORY_ERROR"):
        EnvironmentPool(OpenEnv(start_openenv("shelf", broken=True).url), Threads())


def test_a_typed_environment_taken_for_an_mcp_one_is_an_error_before_the_run(start_openenv: Start) -> None:
    with pytest.raises(ConfigurationError, match=r"could not list its tools.*\(style\)"):
        EnvironmentPool(OpenEnv(start_openenv("guess").url, style="mcp"), Threads())


# Sessions ------------------------------------------------------------------------------------------------------------


def test_a_session_is_used_again_by_the_next_episode_and_the_state_is_not(start_openenv: Start) -> None:
    """G03"""
    server = start_openenv("trouble")
    playing = engine(Model({WELL: [step(what="add")]}), OpenEnv(server.url))
    try:
        for _ in range(3):
            trajectories = playing.run([task(WELL, member=member) for member in range(2)])
            assert [trajectory.reward for trajectory in trajectories] == [1.0, 1.0]
            playing.release(trajectories)
        assert get(f"{server.url}/sessions") == {"open": 2, "made": 2, "closed": 0}
    finally:
        playing.close()


@pytest.mark.parametrize("settings", [{}, {"max_sessions": 2}], ids=["as many as the server has", "as many as we want"])
def test_more_rollouts_than_sessions_wait_for_each_other(start_openenv: Start, settings: dict[str, Any]) -> None:
    """G08: nobody starves, although instances stay leased until the rewards are known."""
    server = start_openenv("trouble", sessions=2 if not settings else 8)
    rows = [task(WELL, member=member) for member in range(8)]
    playing = engine(Model({WELL: [step(what="add"), step(what="add")]}), OpenEnv(server.url, **settings))
    most = []
    try:
        for _ in range(2):
            trajectories = playing.run(rows)
            most.append(get(f"{server.url}/sessions")["open"])
            assert [trajectory.reward for trajectory in trajectories] == [2.0] * 8
            playing.release(trajectories)
    finally:
        playing.close()
    wait_until(lambda: get(f"{server.url}/sessions")["open"] == 0)
    assert max(most) <= 2


def test_a_server_that_stays_full_is_a_failure_that_names_the_setting(start_openenv: Start) -> None:
    async def main() -> None:
        factory = OpenEnv(start_openenv("guess", sessions=1).url, capacity_timeout=0.2)
        holding, waiting = factory(), factory()
        await holding.reset(seed=1)
        with pytest.raises(EnvironmentFailure, match=r"no free session.*0.2 s \(capacity_timeout\)"):
            await waiting.reset(seed=1)
        await waiting.close()
        await holding.close()

    asyncio.run(main())


def test_a_session_that_hangs_behind_a_slow_step_is_waited_for(start_openenv: Start) -> None:
    """The server frees the session of a step that was given up only when the step has ended."""

    async def main() -> None:
        server = start_openenv("trouble", sessions=1)
        factory = OpenEnv(server.url)
        slow, next_one = factory(), factory()
        await slow.reset(seed=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow.call_tool("step", {"what": "wait"}), 0.2)
        await slow.close()
        opening = asyncio.create_task(next_one.reset(seed=1))
        await eventually(lambda: factory._server._queue()._waiting)  # it was refused
        await asyncio.to_thread(get, f"{server.url}/release", "POST")
        await opening
        assert await next_one.call_tool("step", {"what": "add"}) == '{"closed": false, "text": ""}'
        await next_one.close()

    asyncio.run(main())


def test_whoever_stops_waiting_for_an_answer_loses_the_connection(start_openenv: Start) -> None:
    """The answer would be taken for the next one, as the official client did until 0.10."""

    async def main() -> None:
        environment = OpenEnv(start_openenv("trouble").url)()
        await environment.reset(seed=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.call_tool("step", {"what": "wait"}), 0.1)
        with pytest.raises(EnvironmentFailure, match=r"was not waited for any more in step 1 \(step\) \(noticed"):
            await environment.call_tool("step", {"what": "add"})
        with pytest.raises(EnvironmentFailure):
            await environment.get_reward()
        await environment.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, RuntimeError])
def test_no_session_is_left_when_the_run_breaks_off(start_openenv: Start, error: type[BaseException]) -> None:
    """G08"""
    server = start_openenv("trouble")

    async def fail() -> None:
        raise error

    playing = engine(Model({WELL: [step(what="add")]}, {(WELL, 1): fail}), OpenEnv(server.url))
    try:
        with pytest.raises(BaseException):  # noqa: B017, PT011 (each in its own way)
            playing.run([task(WELL, member=member) for member in range(3)])
    finally:
        playing.close()
    wait_until(lambda: get(f"{server.url}/sessions")["open"] == 0)


def test_a_session_that_ends_between_two_episodes_is_replaced(start_openenv: Start) -> None:
    async def main() -> None:
        server = start_openenv("trouble")
        environment = OpenEnv(server.url)()
        for _ in range(2):
            await environment.reset(seed=1)
            await environment.call_tool("step", {"what": "add"})
            assert await environment.get_reward() == 1.0
            await asyncio.to_thread(get, f"{server.url}/reap", "POST")
        await environment.close()
        assert get(f"{server.url}/sessions")["made"] == 2

    asyncio.run(main())


def test_signs_of_life_find_a_session_that_has_ended(start_openenv: Start) -> None:
    async def main() -> None:
        server = start_openenv("trouble")
        environment = OpenEnv(server.url, keepalive=0.1)()
        await environment.reset(seed=1)
        await asyncio.to_thread(get, f"{server.url}/reap", "POST")
        await eventually(lambda: environment._connection.lost)
        with pytest.raises(EnvironmentFailure, match="has ended the session"):
            await environment.call_tool("step", {"what": "add"})
        await environment.close()

    asyncio.run(main())


def test_a_server_that_knows_nothing_of_its_sessions_is_played_with_all_the_same(
    start_openenv: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several workers another one may answer."""

    async def gone(self: Any) -> Any:
        return connection_module._Session.GONE

    monkeypatch.setattr(connection_module.Connection, "_ask_for_session", gone)
    with caplog.at_level(logging.WARNING):
        trajectories = play(start_openenv("trouble"), [step(what="add")], *(task(WELL, member=m) for m in range(3)))
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3
    assert caplog.text.count("several workers") == 1


def test_a_server_without_json_rpc_over_http_is_kept_awake_through_the_socket() -> None:
    async def main() -> None:
        with stub_server() as stub:
            environment = OpenEnv(stub.url, keepalive=0.05)()
            await environment.reset(seed=1)
            await eventually(lambda: stub.calls >= 3)
            await environment.call_tool("step", {"what": "add"})
            assert await environment.get_reward() == 1.0
            await environment.close()

    asyncio.run(main())


def test_headers_go_to_the_server_and_no_redirect_is_followed() -> None:
    async def main() -> None:
        with stub_server() as stub:
            environment = OpenEnv(stub.url, headers={"Authorization": "Bearer secret"})()
            await environment.reset(seed=1)
            await environment.close()
            assert stub.headers == {"/schema": "Bearer secret", "/ws": "Bearer secret"}
            stub.redirect = "http://127.0.0.1:9/ws"
            with pytest.raises(EnvironmentFailure, match="HTTP 302"):
                await environment.reset(seed=1)

    asyncio.run(main())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *names]
    subprocess.run(made, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def main() -> None:
        with stub_server(tls=tls) as stub:
            with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED"):
                OpenEnv(stub.url)()
            monkeypatch.setenv("SSL_CERT_FILE", certificate)
            environment = OpenEnv(stub.url)()
            await environment.reset(seed=1)
            await environment.call_tool("step", {"what": "add"})
            assert await environment.get_reward() == 1.0
            await environment.close()

    asyncio.run(main())


@pytest.mark.slow
def test_signs_of_life_keep_sessions_that_would_time_out(start_openenv: Start) -> None:
    """Over HTTP and over the socket, while the model thinks and in a long step; without them it is noticed."""

    async def main() -> None:
        server = start_openenv("trouble", session_timeout=6)
        kept, kept_by_socket, busy = (OpenEnv(server.url, keepalive=0.5)() for _ in range(3))
        left = OpenEnv(server.url, keepalive=60)()
        instances = [kept, kept_by_socket, busy, left]
        for environment in instances:
            await environment.reset(seed=1)
            await environment.call_tool("step", {"what": "add"})
        assert kept_by_socket._connection is not None
        kept_by_socket._connection.visible = False
        long = asyncio.create_task(busy.call_tool("step", {"what": "wait", "amount": 9}))
        await eventually(lambda: get(f"{server.url}/sessions")["open"] < 4)  # it looks for idle ones every 5 s
        await asyncio.to_thread(get, f"{server.url}/release", "POST")
        await long
        for environment in (kept, kept_by_socket, busy):
            assert await environment.call_tool("step", {"what": "add"}) == '{"closed": false, "text": ""}'
        assert [await environment.get_reward() for environment in (kept, kept_by_socket, busy)] == [2.0, 2.0, 11.0]
        assert await left.call_tool("step", {"what": "add"}) == '{"closed": true, "text": ""}'
        with pytest.raises(EnvironmentFailure, match=r"has ended the session.*`keepalive`"):
            await left.get_reward()
        for environment in instances:
            await environment.close()

    asyncio.run(main())


def test_closing_a_hung_server_takes_no_longer_than_it_may(
    start_openenv: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_SECONDS", 0.2)

    async def main() -> None:
        server = start_openenv("trouble")
        environment = OpenEnv(server.url)()
        await environment.reset(seed=1)
        server.pause()
        async with asyncio.timeout(9):  # the library's own patience is 10 s
            await environment.close()

    asyncio.run(main())
