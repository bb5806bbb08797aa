"""Tools that hang, fail or must not run too often at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import agentrl
from agentrl.errors import EnvironmentFailure, ToolBrokenError, ToolDefinitionError
from agentrl.rollout import tools as tools_module
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.policy import ToolPolicy, policy_of, tool
from agentrl.rollout.threads import Threads
from agentrl.rollout.tools import ToolRunner, make_tools
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome, Task, ToolCall, ToolResult
from tests.rollout.helpers import QUESTION, Counter, call, renderer, run_and_close, tasks, turn
from tests.waiting import alive, eventually, skip, wait_until

HUNG = 600.0
"""Seconds that nothing here waits for: what hangs, hangs for so long."""


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_module, "RETRY_DELAY", 0.0)


def run(threads: Threads, function: Any, *, times: int = 1, runner: ToolRunner | None = None) -> list[ToolResult]:
    """Answer so many calls of one tool in one turn."""
    runner = runner or ToolRunner(threads)
    written = [ToolCall(str(index), function.__name__) for index in range(times)]
    return asyncio.run(runner.run(written, make_tools([function])))


def play(turns: Any, rows: list[Task], **options: Any) -> list[Any]:
    """Play the same turns in every rollout, or those of a policy."""
    left: dict[str, list[list[int]]] = {}
    script = turns if callable(turns) else lambda session, *_: left.setdefault(session, list(turns)).pop(0)
    return run_and_close(RolloutEngine(ScriptedGenerator(script), renderer(), **options), rows)


# The decorator ------------------------------------------------------------------------------------------------


def test_the_decorator_leaves_the_function_as_it_is_and_is_seen_through_methods_and_partials() -> None:
    import functools

    class Env(Counter):
        @tool(timeout=3, retries=1)
        def dig(self, depth: int) -> str:
            """Dig.

            Args:
                depth: How deep.
            """
            return f"dug {depth}"

    assert agentrl.tool is tool
    assert Env().dig(2) == "dug 2"
    assert policy_of(Env().dig) == {"timeout": 3, "retries": 1, "max_concurrency": None}
    assert policy_of(functools.partial(Env().dig, depth=1))["timeout"] == 3
    assert policy_of(Env().inc) == {}


def test_what_the_author_does_not_say_comes_from_the_configuration(threads: Threads) -> None:
    async def slow() -> str:
        """Be slow."""
        await asyncio.sleep(HUNG)
        return ""

    @tool(retries=1)
    async def slow_too() -> str:
        """Be slow."""
        await asyncio.sleep(HUNG)
        return ""

    @tool(timeout=None)
    async def patient() -> str:
        """Be slow, but not for long."""
        await asyncio.sleep(0.2)
        return "there"

    for function, content in [(slow, "within 0.05 s"), (slow_too, "within 0.05 s"), (patient, "there")]:
        [result] = run(threads, function, runner=ToolRunner(threads, policy=ToolPolicy(timeout=0.05)))
        assert content in result.content


@pytest.mark.parametrize(
    "wrong", [{"timeout": 0}, {"timeout": float("inf")}, {"retries": -1}, {"max_concurrency": 0}, {"retries": 0.5}]
)
def test_wrong_policies_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match=next(iter(wrong))):
        tool(**wrong)


# Timeouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_timeout_is_told_to_the_model_and_the_episode_goes_on(kind: str) -> None:
    free = threading.Event()

    @tool(timeout=0.1)
    def sync() -> str:
        """Hang."""
        free.wait(HUNG)
        return ""

    @tool(timeout=0.1)
    async def hang_async() -> str:
        """Hang."""
        await asyncio.sleep(HUNG)
        return ""

    function = {"sync": sync, "async": hang_async}[kind]
    [trajectory] = play([turn(call(function.__name__)), turn("ok")], tasks(1), tools=[function])
    free.set()
    assert trajectory.outcome is Outcome.FINISHED
    name = function.__name__
    assert trajectory.completion[1]["content"] == f"Error: {name} did not end within 0.1 s; it was given up"
    assert (trajectory.tool_calls, trajectory.tool_failures, trajectory.tool_timeouts) == (1, 1, 1)


def test_a_timeout_error_of_the_tool_itself_is_an_ordinary_failure(threads: Threads) -> None:
    def impatient() -> str:
        """Time out."""
        raise TimeoutError("server too slow")

    [result] = run(threads, impatient)
    assert result.content == "Error: TimeoutError: server too slow"
    assert result.failed
    assert not result.timed_out


def test_an_async_tool_that_times_out_is_cancelled(threads: Threads) -> None:
    ended: list[str] = []

    @tool(timeout=0.05)
    async def slow() -> None:
        """Be slow."""
        try:
            await asyncio.sleep(HUNG)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    run(threads, slow)
    assert ended == ["cancelled"]


def test_hung_threads_do_not_use_up_the_pool() -> None:
    """Three hang where two threads are allowed; calls that wait for a thread get one all the same."""
    threads, free = Threads(max_threads=2), threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def wait() -> None:
        begun.append(1)
        free.wait(HUNG)
        ended.append(1)

    @tool(timeout=0.1)
    def hang() -> None:
        """Hang."""
        wait()

    async def main() -> Any:
        runner = ToolRunner(threads)
        await runner.run([ToolCall(str(n), "hang") for n in range(2)], make_tools([hang]))
        left = threads.abandoned  # both, unless one was given up before its thread had begun with it
        before = len(begun)
        hung = asyncio.gather(*(threads.run(wait) for _ in range(2)))
        waiting = asyncio.create_task(threads.run(int, 3))
        await eventually(lambda: len(begun) == before + 2)
        assert not waiting.done()
        hung.cancel()
        assert await waiting == 3
        return threads.abandoned - left

    assert asyncio.run(main()) == 2
    threads.close()
    assert not ended
    free.set()


def test_an_endless_loop_is_ended_from_outside(threads: Threads) -> None:
    """Else it would take the interpreter's lock from all others for the rest of the run."""
    spinning: list[threading.Thread] = []

    @tool(timeout=0.5)
    def spin() -> None:
        """Spin."""
        spinning.append(threading.current_thread())
        while True:
            try:
                len("x")
            except Exception:
                continue

    [result] = run(threads, spin)
    assert result.timed_out
    wait_until(lambda: not any(thread.is_alive() for thread in spinning))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows the thread that started a process")
def test_g11_processes_of_a_tool_that_was_given_up_are_killed_with_their_children(threads: Threads) -> None:
    """The shell, its background child, and one that moved into a session of its own."""
    started: list[psutil.Process] = []

    def shell() -> str:
        """Run a command."""
        own = subprocess.Popen(["sleep", "60"], start_new_session=True)
        started.append(psutil.Process(own.pid))
        outer = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
        started.append(psutil.Process(outer.pid))
        while len(started) < 4:
            started[2:] = psutil.Process(outer.pid).children()
        outer.wait()
        return ""

    async def main() -> None:
        calling = asyncio.create_task(ToolRunner(threads).run([ToolCall("0", "shell")], make_tools([shell])))
        await eventually(lambda: len(started) == 4)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(main())
    wait_until(lambda: not any(map(alive, started)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows the thread that started a process")
def test_processes_of_other_calls_are_spared(threads: Threads) -> None:
    """A sandbox that another environment's reset started, from the same thread, is not the hung tool's."""
    free = threading.Event()
    sandbox: list[subprocess.Popen[bytes]] = []

    @tool(timeout=0.3)
    def hang() -> None:
        """Hang."""
        subprocess.run(["sleep", "60"], check=False)
        free.wait(HUNG)

    async def main() -> list[ToolResult]:
        await threads.run(lambda: sandbox.append(subprocess.Popen(["sleep", "60"])))
        return await ToolRunner(threads).run([ToolCall("0", "hang")], make_tools([hang]))

    [result] = asyncio.run(main())
    free.set()
    assert result.timed_out
    time.sleep(0.2)
    assert sandbox[0].poll() is None
    sandbox[0].send_signal(signal.SIGKILL)
    sandbox[0].wait()


def test_an_instance_whose_method_was_given_up_is_discarded_and_its_episode_goes_on() -> None:
    free, made, served = threading.Event(), [], []

    class Env(Counter):
        def __init__(self) -> None:
            made.append(self)
            self.closed = 0

        def reset(self, **kwargs: Any) -> None:
            served.append(self)
            super().reset()

        @tool(timeout=0.1)
        def hang(self) -> str:
            """Hang."""
            free.wait(HUNG)
            return ""

        def close(self) -> None:
            self.closed += 1

    turns = [turn(call("hang")), turn(call("inc")), turn("ok")]
    left: dict[str, list[list[int]]] = {}
    generator = ScriptedGenerator(lambda session, *_: left.setdefault(session, list(turns)).pop(0))
    engine = RolloutEngine(generator, renderer(), environments=Env)
    for _ in range(2):
        [trajectory] = engine.run(tasks(1))
        assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
        engine.release([trajectory])
    wait_until(lambda: made[0].closed == 1)  # it is not kept until the end
    free.set()
    engine.close()
    assert len(made) == len(set(map(id, served))) == 2
    assert [env.closed for env in made] == [1, 1]


def test_a_hung_tool_keeps_neither_the_run_nor_the_exit(tmp_path: Any) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import asyncio, threading\n"
        "from agentrl.rollout.policy import tool\n"
        "from agentrl.rollout.threads import Threads\n"
        "threads = Threads()\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(threads.run(threading.Event().wait), 0.1)\n"
        "    except TimeoutError:\n"
        "        print('timed out')\n"
        "    print(await threads.run(str, 'next'))\n"
        "asyncio.run(main())\n"
        "threads.close()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HUNG, env=os.environ)
    assert done.stdout.splitlines() == ["timed out", "next"], done.stderr


# Retries ------------------------------------------------------------------------------------------------------


def counting(error: BaseException, *, fails: int, **policy: Any) -> tuple[Any, list[int]]:
    """A tool that raises so many times, and the list of its calls."""
    calls: list[int] = []

    @tool(**policy)
    def flaky() -> str:
        """Fail now and then."""
        calls.append(1)
        if len(calls) <= fails:
            raise error
        return "there"

    return flaky, calls


def test_a_call_is_never_repeated_unless_the_author_says_so(threads: Threads) -> None:
    function, calls = counting(ConnectionError("gone"), fails=1)
    assert run(threads, function)[0].content == "Error: ConnectionError: gone"
    assert len(calls) == 1


def test_an_author_can_have_calls_repeated(threads: Threads) -> None:
    function, calls = counting(ConnectionError("gone"), fails=2, retries=2)
    [result] = run(threads, function)
    assert (result.content, result.failed, len(calls)) == ("there", False, 3)
    function, calls = counting(ConnectionError("gone"), fails=9, retries=2)
    [result] = run(threads, function)
    assert (result.content, result.failed, len(calls)) == ("Error: ConnectionError: gone", True, 3)


@pytest.mark.parametrize("error", [ValueError("bad date"), KeyError("x"), agentrl.EpisodeDone("over"), SystemExit()])
def test_what_repeating_cannot_help_is_not_repeated(threads: Threads, error: BaseException) -> None:
    function, calls = counting(error, fails=9, retries=2)
    run(threads, function)
    assert len(calls) == 1


def test_a_call_that_timed_out_is_not_repeated(threads: Threads) -> None:
    """The first one may still be running."""
    calls: list[int] = []

    @tool(timeout=0.05, retries=3)
    async def slow() -> None:
        """Be slow."""
        calls.append(1)
        await asyncio.sleep(HUNG)

    assert run(threads, slow)[0].timed_out
    assert len(calls) == 1


# Concurrency --------------------------------------------------------------------------------------------------


def test_max_concurrency_holds_over_all_rollouts_and_after_a_restart() -> None:
    running: list[int] = []
    most: list[int] = []

    @tool(max_concurrency=2, timeout=50)
    async def busy() -> str:
        """Be busy, while 10 s pass."""
        running.append(1)
        most.append(len(running))
        skip(asyncio.get_running_loop(), 10)
        await asyncio.sleep(0.01)
        running.pop()
        return "done"

    left: dict[str, list[list[int]]] = {}
    turns = [turn(call("busy") * 2), turn("ok")]
    generator = ScriptedGenerator(lambda session, *_: left.setdefault(session, list(turns)).pop(0))
    engine = RolloutEngine(generator, renderer(), tools=[busy])
    for _ in range(2):
        trajectories = engine.run(tasks(8))
        engine.close()
        # 16 calls, two at a time, take longer than the timeout: the wait for a slot does not count.
        assert [t.tool_failures for t in trajectories] == [0] * 8
    assert max(most) == 2


def test_other_tools_do_not_wait_for_a_slot(threads: Threads) -> None:
    @tool(max_concurrency=1)
    def first() -> str:
        """Meet."""
        together.wait(HUNG)
        return "met"

    @tool(max_concurrency=1)
    def second() -> str:
        """Meet."""
        together.wait(HUNG)
        return "met"

    together = threading.Barrier(2)
    written = [ToolCall("0", "first"), ToolCall("1", "second")]
    results = asyncio.run(ToolRunner(threads).run(written, make_tools([first, second])))
    assert [result.content for result in results] == ["met", "met"]


# Broken tools -------------------------------------------------------------------------------------------------


def answer_with(error: BaseException | None, text: str = "fine") -> Any:
    def search(query: str = "") -> str:
        """Search.

        Args:
            query: What for.
        """
        if error is not None and query != "works":
            raise error
        return text

    return search


def rows(groups: int = 2, members: int = 3) -> list[Task]:
    return [Task(f"group{g}", m, 7, QUESTION, {"topic": g}) for g in range(groups) for m in range(members)]


SEARCH_THEN_ANSWER = [turn(call("search")), turn("ok")]


def test_a_tool_that_fails_everywhere_stops_the_run_and_says_why() -> None:
    with pytest.raises(ToolBrokenError) as raised:
        play(SEARCH_THEN_ANSWER, rows(), tools=[answer_with(ConnectionError("no key"))], tool_max_failures=6)
    message = str(raised.value)
    assert "the last 6 calls of the tool 'search' failed, in 2 groups" in message
    assert "6 times, was ConnectionError" in message
    assert "of group group0 (seed 7, columns {'topic': 0})" in message
    assert "ConnectionError: no key" in message
    assert "Traceback" in message
    assert "in search" in message
    assert "tool_max_failures" in message


def test_a_method_is_named_with_its_class_and_timeouts_count() -> None:
    class Env(Counter):
        @tool(timeout=0.02)
        async def search(self) -> str:
            """Search."""
            await asyncio.sleep(HUNG)
            return ""

    with pytest.raises(ToolBrokenError, match=r"the tool 'Env.search' failed.*DeadlineExceeded"):
        play(SEARCH_THEN_ANSWER, rows(), environments=Env, tool_max_failures=4)


def test_one_success_clears_a_tool() -> None:
    works = call("search", '{"query": "works"}')
    turns = [turn(call("search")), turn(call("search")), turn(works), turn(call("search")), turn(call("search"))]
    [one, two] = [Task(name, 0, 7, QUESTION) for name in "ab"]
    options: dict[str, Any] = {"tools": [answer_with(ConnectionError("gone"))], "tool_max_failures": 5}
    assert [t.tool_failures for t in play([*turns, turn("ok")], [one], **options)] == [4]
    with pytest.raises(ToolBrokenError):
        play([turn(call("search"))] * 5, [one, two], **options)


@pytest.mark.parametrize("error", [ValueError("no such date"), KeyError("x"), FileNotFoundError("x"), None])
def test_mistakes_of_the_model_never_break_a_tool(error: BaseException | None) -> None:
    """Values the tool cannot take; and bad arguments and unknown names, which never reach it."""
    if error is None:
        written = call("search", '{"wrong": 1}') + call("nothing") + "<call>{broken</call>"
    else:
        written = call("search")
    trajectories = play([turn(written), turn("ok")], rows(), tools=[answer_with(error)], tool_max_failures=2)
    assert all(t.outcome is Outcome.FINISHED and t.tool_failures for t in trajectories)


def test_a_single_group_breaks_no_tool() -> None:
    """Its row may hold what the tool cannot digest; only failures in several groups have the tool in common."""
    trajectories = play(
        SEARCH_THEN_ANSWER, rows(1, 8), tools=[answer_with(ConnectionError("gone"))], tool_max_failures=3
    )
    assert all(t.outcome is Outcome.FINISHED for t in trajectories)


def test_the_breaker_can_be_switched_off() -> None:
    broken = answer_with(ConnectionError("gone"))
    assert len(play(SEARCH_THEN_ANSWER, rows(), tools=[broken], tool_max_failures=None)) == 6


def test_a_failing_environment_is_no_broken_tool() -> None:
    class Env(Counter):
        def search(self) -> str:
            """Search."""
            raise EnvironmentFailure("sandbox gone")

    policy = FailurePolicy(retries=0, max_rate=1.0)
    trajectories = play(SEARCH_THEN_ANSWER, rows(), environments=Env, failures=policy, tool_max_failures=2)
    assert all(t.outcome is Outcome.ENV_FAILURE for t in trajectories)


def test_when_one_call_ends_the_rollout_the_others_of_its_turn_end_too() -> None:
    begun, ended = asyncio.Event(), []

    class Env(Counter):
        async def slow(self) -> str:
            """Be slow."""
            begun.set()
            try:
                await asyncio.sleep(HUNG)
            finally:
                ended.append("slow")
            return ""

        async def crash(self) -> str:
            """Crash."""
            await begun.wait()
            raise EnvironmentFailure("gone")

    policy = FailurePolicy(retries=0, max_rate=1.0)
    [trajectory] = play([turn(call("slow") + call("crash"))], tasks(1), environments=Env, failures=policy)
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert ended == ["slow"]
