"""Episodes of Harbor tasks: users, steps, times, tools, and what a separate verifier sees."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.envs import Harbor
from agentrl.envs.harbor import Fault
from agentrl.errors import ConfigurationError, EpisodeDone
from tests.envs.harbor.playing import play
from tests.envs.harbor.writing import GREP, HELLO, STEPS, says, write_task
from tests.envs.sandbox.conftest import local_backend


def local(path: Path, **settings: object) -> Harbor:
    return Harbor(path, backend=local_backend(), **settings)  # type: ignore[arg-type]


def test_leaving_a_step_out_earns_no_more_than_failing_it(tmp_path: Path) -> None:
    """An agent that ends the episode after the first step has the second one verified, with nothing done in it."""
    second = f"test -f /app/second && {says('1')} || {says('0')}"
    task = write_task(
        tmp_path / "t",
        f'multi_step_reward_strategy = "mean"{STEPS}',
        steps={"s1": GREP, "s2": second},
        files={"steps/s2/workdir/setup.sh": "echo ready > ready"},
    )
    assert play(local(task), [HELLO]).reward == 0.5
    verdict = play(local(task), [HELLO, "cat ready; touch second; ls /tests /logs/verifier"])
    assert verdict.reward == 1.0
    assert "Do s2." in verdict.heard
    assert "ready" in verdict.heard
    assert "reward.txt" not in verdict.heard, "tests and verdicts of the first step are gone"


def test_who_runs_what_and_what_each_may_know(tmp_path: Path) -> None:
    """The agent is its user and does not see the verifier's secrets; the verifier may be another user."""
    toml = (
        '[agent]\nuser = 1000\n[verifier]\nuser = "0"\nenv = {KEY = "secret"}\n[environment]\nenv = {WHO = "all"}\n'
        'workdir = "/tmp"'
    )
    test = f'test "$KEY$WHO$(id -u)$(cat /tmp/who)" = "secretall0:all:1000" && {says("1")}'
    task = write_task(tmp_path / "t", toml, test)
    verdict = play(local(task), ['echo "$KEY:$WHO:$(id -u)" > who; pwd'])
    assert verdict.reward == 1.0, verdict
    assert "/tmp" in verdict.heard


def test_traps_left_for_the_verifier(tmp_path: Path) -> None:
    """G13: a folder, or a link, in place of the reward file is no reward; neither is a link in place of its folder.

    A file that the agent wrote there is gone when the verifier begins.
    """
    trap = "rm -rf /logs/verifier; mkdir -p /tmp/mine; ln -s /tmp/mine /logs/verifier; echo 1 > /tmp/mine/reward.txt"
    task = write_task(tmp_path / "t", "", "true")
    assert play(local(task), [trap]).fault is Fault.REWARD_MISSING
    assert play(local(task), ["mkdir -p /logs/verifier/reward.json/x"]).fault is Fault.REWARD_MISSING
    judged = write_task(tmp_path / "judged", "", says("0"))
    assert play(local(judged), [f"mkdir -p /logs/verifier; {says('1', 'reward.json')}"]).rewards == {"reward": 0.0}


def test_a_separate_verifier_gets_the_declared_artifacts_and_nothing_else(tmp_path: Path) -> None:
    """And what the agent left in /logs/artifacts, which Harbor takes in any case."""
    toml = (
        'artifacts = ["/app/out", "/app/missing", "/app/made"]\n[verifier]\nenvironment_mode = "separate"\n'
        '[[verifier.collect]]\ncommand = "echo collected > /app/made"'
    )
    test = (
        "test -f /app/out/a -a ! -e /app/secret -a ! -e /app/missing && grep -q collected /app/made"
        f" && test ! -e /app/out/passwd -a -f /logs/artifacts/b && {says('1')}"
    )
    task = write_task(tmp_path / "t", toml, test)
    left = "mkdir out; touch out/a secret /logs/artifacts/b; ln -s /etc/passwd out/passwd; ln -s / missing"
    verdict = play(local(task), [left])
    assert verdict.reward == 1.0, verdict


def test_files_of_the_environment_are_there_where_no_dockerfile_takes_them(tmp_path: Path) -> None:
    """And in a separate verifier that is a copy of the agent's sandbox."""
    test = f"test -f data/numbers.csv -a -x run.sh && {says('1')}"
    files = {"environment/data/numbers.csv": "1,2", "environment/run.sh": "#!/bin/sh"}
    toml = '[environment]\nworkdir = "/app"\n[verifier]\nenvironment_mode = "separate"'
    task = write_task(tmp_path / "t", toml, test, dockerfile=None, files=files)
    (task / "environment/run.sh").chmod(0o755)
    verdict = play(local(task), ["cat data/numbers.csv; ./run.sh && echo ran"])
    assert "1,2" in verdict.heard
    assert "ran" in verdict.heard
    assert verdict.reward == 1.0, verdict


def test_artifacts_are_taken_without_what_their_patterns_exclude(tmp_path: Path) -> None:
    toml = (
        'artifacts = [{source = "/app/out", exclude = ["*.o", "cache"]}, {source = "/app/gone", exclude = ["x"]}]\n'
        '[verifier]\nenvironment_mode = "separate"\n'
    )
    test = (
        "cd /app/out && test -f a -a -f deep/b -a ! -e c.o -a ! -e deep/d.o -a ! -e deep/cache -a ! -e /app/gone"
        f" && {says('1')}"
    )
    task = write_task(tmp_path / "t", toml, test)
    verdict = play(local(task), ["mkdir -p out/deep/cache; cd out; touch a c.o deep/b deep/d.o deep/cache/e"])
    assert verdict.reward == 1.0, verdict


def test_an_artifact_that_is_too_large_is_missing(tmp_path: Path) -> None:
    """Whether it is a file or a folder; the episode goes on to its verdict."""
    toml = 'artifacts = ["/app/file", "/app/folder"]\n[verifier]\nenvironment_mode = "separate"\n'
    task = write_task(tmp_path / "t", toml, f"test ! -e /app/file -a ! -e /app/folder && {says('1')}")
    huge = "mkdir folder; truncate -s 300M file; truncate -s 300M folder/file"
    verdict = play(local(task), [huge])
    assert verdict.reward == 1.0, verdict


def test_tools(tmp_path: Path) -> None:
    """The model has the tools that were chosen, and their state is that of one episode."""
    task = write_task(tmp_path / "t")
    harbor = local(task, tools=("python", "notes", "submit"))
    environment = harbor()
    assert [each["function"]["name"] for each in environment.tool_schemas] == ["python", "notes", "submit"]

    async def episode() -> float:
        assert await environment.reset(str(task)) == "Write hello to out.txt."
        assert await environment.call_tool("notes", {}) == "[no notes]"
        assert await environment.call_tool("notes", {"text": "x"}) == "x"
        with pytest.raises(ValueError, match="at most"):
            await environment.call_tool("notes", {"text": "x" * 9000})
        await environment.call_tool("python", {"code": "word = 'hello'"})
        await environment.call_tool("python", {"code": "open('out.txt', 'w').write(word)"})
        with pytest.raises(EpisodeDone):
            await environment.call_tool("submit", {})
        return await environment.get_reward()

    assert asyncio.run(episode()) == 1.0
    assert asyncio.run(episode()) == 1.0, "nothing is left of the last episode"


def test_only_tasks_that_were_given_are_played(tmp_path: Path) -> None:
    harbor = local(write_task(tmp_path / "t"))
    with pytest.raises(ConfigurationError, match="is none of this Harbor's 1 tasks"):
        play(harbor, [], task="/etc")
