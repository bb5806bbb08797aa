"""MCP servers as environments, against a real server in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentrl.envs.mcp import MCP
from agentrl.errors import ConfigurationError
from agentrl.types import Outcome
from tests.envs.scripts import play
from tests.rollout.helpers import call, turn
from tests.waiting import LONG, alive, wait_until

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


@pytest.fixture(scope="module")
def shop():
    return MCP(SERVER)


def answers(trajectory):
    return [result.content for turn in trajectory.turns for result in turn.results]


def test_the_servers_tools_are_offered_as_it_describes_them(shop):
    add = next(tool for tool in shop.tool_schemas if tool["name"] == "add")
    assert add["description"] == "Add two numbers."
    assert add["inputSchema"]["properties"]["a"]["type"] == "integer"
    assert add["inputSchema"]["required"] == ["a", "b"]


def test_only_some_tools_are_offered():
    assert [tool["name"] for tool in MCP(SERVER, only=["sell"]).tool_schemas] == ["sell"]
    with pytest.raises(ConfigurationError, match=r"only=\['buy'\].*'sell'"):
        MCP(SERVER, only=["buy"])


def test_each_rollout_has_a_session_of_its_own(shop):
    script = [turn(call("sell", '{"pieces": 2}')), turn(call("sell", '{"pieces": 3}')), turn("ok")]
    for trajectory in play(shop, script, rollouts=3):
        assert trajectory.outcome is Outcome.FINISHED
        assert answers(trajectory) == ["2 sold", "5 sold"]


def test_a_reused_session_keeps_what_the_server_remembers():
    script = [turn(call("sell", '{"pieces": 2}')), turn("ok")] * 2
    (first,) = play(factory := MCP(SERVER, reuse=True), script)
    assert answers(first) == ["2 sold"]
    instance = factory()

    async def twice():
        told = []
        for _ in range(2):
            await instance.reset()
            told.append(await instance.call_tool("sell", {"pieces": 1}))
        await instance.close()
        return told

    assert asyncio.run(twice()) == ["1 sold", "2 sold"]


def test_what_a_tool_or_the_server_refuses_is_told_to_the_model(shop):
    (trajectory,) = play(shop, [turn(call("fail")), turn(call("add", '{"a": 1, "b": 2}')), turn("ok")])
    failed, added = (turn.results[0] for turn in trajectory.turns[:2])
    assert failed.failed
    assert "fail" in failed.content
    assert (added.failed, added.content) == (False, "3")


def test_an_image_arrives_as_an_image(shop):
    instance = shop()

    async def drawn():
        await instance.reset()
        content = await instance.call_tool("draw", {})
        await instance.close()
        return content

    (image,) = asyncio.run(drawn())
    assert image.size == (1, 1)
    assert image.convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_a_server_that_ends_is_a_failure_of_the_environment_and_leaves_no_process(shop):
    """G: a broken connection is never a training signal."""
    before = set(psutil.Process().children())
    script = [turn(call("sell", '{"pieces": 2}')), turn(call("leave")), turn("ok")]
    (trajectory,) = play(shop, script)
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "leave" in trajectory.failure.error
    wait_until(lambda: not any(map(alive, set(psutil.Process().children()) - before)))


def test_a_server_that_is_not_there_is_an_error_at_construction():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
        with pytest.raises(ConfigurationError, match="opened no session"):
            MCP(url)
    with pytest.raises(ConfigurationError, match="no-such-command"):
        MCP(["no-such-command"])
    with pytest.raises(ConfigurationError, match="headers"):
        MCP(SERVER, headers={"Authorization": "Bearer x"})


def test_over_http_with_headers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + LONG
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < until, "the server does not start"
                time.sleep(0.1)
        factory = MCP(f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "Bearer x"})
        (trajectory,) = play(factory, [turn(call("add", '{"a": 20, "b": 22}')), turn("ok")])
        assert answers(trajectory) == ["42"]
    finally:
        process.kill()
        process.wait()
