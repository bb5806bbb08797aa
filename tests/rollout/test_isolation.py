"""Isolated environments: real processes that crash, hang and lie, and a parent that is not harmed by them."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agentrl import EnvironmentFailure, EpisodeDone, isolated
from agentrl.errors import ConfigurationError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.environments import EnvironmentSpec, apply_observation
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.isolation import wire
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome, StepReward
from tests.rollout.helpers import QUESTION, Counter, call, renderer, tasks, turn
from tests.waiting import alive, wait_until

METHODS = ("spawn", "forkserver")


class Room:
    """An environment in which everything can go wrong."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.done = False

    def reset(self, **columns: Any) -> str:
        self.counter = self.start
        return "look"

    def get_reward(self) -> float:
        return float(self.counter)

    def where(self) -> int:
        """The process."""
        return os.getpid()

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        self.counter += 1
        return "waited"

    def look(self) -> Image.Image:
        """Look."""
        return Image.new("RGB", (2, 2), (1, 2, 3))

    def leave(self) -> str:
        """Leave."""
        self.done = True
        return "left"

    def finish(self) -> str:
        """Finish."""
        raise EpisodeDone("over")

    def mistake(self) -> str:
        """Raise."""
        raise LookupError("no such door")

    def broken(self) -> str:
        """Say that it broke."""
        raise EnvironmentFailure("the door fell off")

    def segfault(self) -> str:
        """Crash."""
        return str(ctypes.string_at(0))

    def exit(self) -> str:
        """Exit."""
        os._exit(3)

    def kill(self) -> str:
        """Be killed."""
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def spin(self) -> str:
        """Never end."""
        while True:
            pass

    def hog(self) -> str:
        """Take too much memory."""
        return str(len(bytearray(4 * 2**30)))

    def start_child(self) -> int:
        """Start a process."""
        return subprocess.Popen(["sleep", "600"]).pid

    def lie(self, data: list[int]) -> str:
        """Write to the parent.

        Args:
            data: Bytes.
        """
        os.write(int(sys.argv[2]), bytes(data))
        return ""


class Gallery(Room):
    """A room that is seen."""

    def reset(self, seed: int = 0) -> list[dict[str, Any]]:
        super().reset()
        return [{"type": "text", "text": "look: "}, {"type": "image", "image": Image.new("RGB", (4, 3), (seed, 0, 0))}]


def play(environment: Any, script: list[list[int]], count: int = 1, **options: Any) -> list[Any]:
    """Play the same script `count` times through the engine."""
    turns: dict[str, int] = {}

    def policy(session: str, ids: list[int], params: Any) -> list[int]:
        turns[session] = number = turns.get(session, -1) + 1
        return script[number]

    generator = ScriptedGenerator(policy)
    engine = RolloutEngine(generator, renderer(), environments=environment, **options)
    try:
        trajectories = engine.run(tasks(count))
        engine.release(trajectories)
    finally:
        engine.close()
    return trajectories


def children() -> set[psutil.Process]:
    return set(filter(alive, psutil.Process().children(recursive=True)))


@pytest.fixture(autouse=True)
def _nothing_leaks():
    before, descriptors = children(), psutil.Process().num_fds()
    yield
    wait_until(lambda: children() <= before)
    wait_until(lambda: psutil.Process().num_fds() <= descriptors + 2)  # an event loop of pytest's own may have come


def use(factory: Any, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Make an instance, reset it, call methods and close it; gives what they gave back or raised."""

    async def go() -> list[Any]:
        instance = await asyncio.to_thread(factory)
        try:
            await instance.reset(seed=5)
            results = []
            for name, arguments in calls:
                try:
                    results.append(await getattr(instance, name)(**arguments))
                except Exception as error:
                    results.append(error)
            return results
        finally:
            await instance.close()

    return asyncio.run(go())


# The same environment --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_isolated_environment_plays_the_same_episodes(method):
    """Same tools, rows and rewards as the class itself; reward functions can read its attributes."""
    script = [turn(call("inc", '{"step": 2}')), turn(call("inc")), turn("ok")]
    plain = play(Counter, script, 3)
    apart = play(isolated(Counter, start_method=method), script, 3)
    for ours, theirs in zip(plain, apart, strict=True):
        assert_row_invariants(theirs)
        assert theirs.completion_ids == ours.completion_ids
        assert theirs.completion == ours.completion
        assert theirs.outcome is Outcome.FINISHED
        assert theirs.reward == ours.reward == 3.0

    factory = isolated(Counter, start_method=method)
    instance = factory()
    try:
        assert EnvironmentSpec.of(instance).tools["inc"].schema == EnvironmentSpec.of(Counter()).tools["inc"].schema
        asyncio.run(instance.reset())
        asyncio.run(instance.inc(step=4))
        assert instance.counter == 4
        with pytest.raises(AttributeError, match="colour"):
            _ = instance.colour
    finally:
        asyncio.run(instance.close())


class Slope:
    """Rewards its turns in all three ways."""

    def reset(self, **columns: Any) -> None:
        self.height = 0

    def get_reward(self, turns: int) -> list[float]:
        return [float(k) for k in range(turns)]

    def up(self) -> StepReward:
        """Go up."""
        return StepReward("higher", 0.5)

    def over(self) -> str:
        """Go over the top."""
        raise EpisodeDone(StepReward("on top", 2.0))


def test_rewards_of_turns_cross():
    """By tools, by the end of the episode, and as a list of as many as there were turns."""
    script = [turn(call("up") + call("up")), turn(call("over"))]
    for environment in (Slope, isolated(Slope, warm=0)):
        (trajectory,) = play(environment, script)
        assert trajectory.turn_rewards == [0.0 + 0.5 + 0.5, 1.0 + 2.0]
        assert trajectory.reward is None
        assert trajectory.outcome is Outcome.ENV_DONE
        assert [result.content for t in trajectory.turns for result in t.results] == ["higher", "higher", "on top"]


def test_images_cross_without_pickle():
    """What `reset` and tools give back as images is the same image here."""
    factory = isolated(Gallery, warm=0)

    async def go() -> tuple[Any, Any]:
        instance = await asyncio.to_thread(factory)
        try:
            return await instance.reset(seed=9), await instance.look()
        finally:
            await instance.close()

    observation, seen = asyncio.run(go())
    message = apply_observation(QUESTION, observation, "Room")[-1]
    assert message["content"][-1]["image"].getpixel((0, 0)) == (9, 0, 0)
    assert seen[0]["type"] == "image"
    assert seen[0]["image"].getpixel((1, 1)) == (1, 2, 3)


def test_ends_and_mistakes_arrive_as_what_they_were():
    """`EpisodeDone`, `done`, a failure said by the environment, and an ordinary exception by name and text."""
    over, mistake, broken = use(isolated(Room, warm=0), ("finish", {}), ("mistake", {}), ("broken", {}))
    assert isinstance(over, EpisodeDone)
    assert str(over) == "over"
    assert type(mistake).__name__ == "LookupError"
    assert str(mistake) == "no such door"
    assert "in mistake" in str(mistake.__cause__)
    assert isinstance(broken, EnvironmentFailure)
    assert "the door fell off" in str(broken)

    (trajectory,) = play(isolated(Room, warm=0), [turn(call("mistake")), turn(call("leave"))])
    first, second = (turn_.results[0] for turn_ in trajectory.turns)
    assert first.failed
    assert first.content == "Error: LookupError: no such door"
    assert not second.failed
    assert trajectory.outcome is Outcome.ENV_DONE


def test_a_class_that_cannot_be_made_raises_at_construction():
    class Unmakable(Room):
        def __init__(self) -> None:
            raise RuntimeError("no display")

    with pytest.raises(ConfigurationError, match="no display"):
        RolloutEngine(ScriptedGenerator([]), renderer(), environments=isolated(Unmakable, warm=0))


# What breaks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_die_is_an_environment_failure_that_says_how(method):
    """Segfault, `os._exit`, kill, an endless loop and too much memory cost one process each, F and G."""
    factory = isolated(Room, memory="1GiB", cpu_time=1, start_method=method, warm=0)
    expected = {
        "segfault": "was killed by SIGSEGV in `segfault`; its stderr ends with",
        "exit": "ended with exit code 3 in `exit`",
        "kill": "was killed by SIGKILL",
        "spin": "used more processor time than cpu_time=1 allows in `spin`",
        "hog": "out of memory",
    }
    for name, text in expected.items():
        dead, again = use(factory, (name, {}), ("where", {}))
        assert isinstance(dead, EnvironmentFailure)
        assert text in str(dead)
        assert isinstance(again, EnvironmentFailure), "a dead process does not answer"


def test_one_rollout_fails_and_the_others_go_on():
    """The rollout whose process dies is tried again on a fresh one, then given up; its neighbours are not touched."""

    def policy(session: str, ids: list[int], params: Any) -> list[int]:
        index = int(session.split("/")[1])
        played[session] = number = played.get(session, -1) + 1
        return turn("ok") if number else turn(call("exit" if index == 1 else "where"))

    played: dict[str, int] = {}
    failures = FailurePolicy(retries=1, delay=0)
    engine = RolloutEngine(ScriptedGenerator(policy), renderer(), environments=isolated(Room), failures=failures)
    try:
        trajectories = engine.run(tasks(3))
        engine.release(trajectories)
    finally:
        engine.close()
    outcomes = [trajectory.outcome for trajectory in trajectories]
    assert outcomes == [Outcome.FINISHED, Outcome.ENV_FAILURE, Outcome.FINISHED]
    assert "exit code 3" in trajectories[1].failure.error
    assert trajectories[1].reward is None
    pids = {trajectories[i].turns[0].results[0].content for i in (0, 2)}
    assert len(pids) == 2, "each instance has a process of its own"


class Shop(Room):
    """A room that wants to be closed."""

    def close(self) -> None:
        """Close."""
        self.closed = True


def test_a_dead_process_is_not_asked_to_close_its_instance(caplog):
    """Nor does the log say that closing failed, after each crash."""
    (trajectory,) = play(isolated(Shop, warm=0), [turn(call("exit"))], failures=FailurePolicy(retries=0, max_rate=1))
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "close failed" not in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_a_cancelled_call_ends_its_process_and_what_that_started(method):
    async def go() -> psutil.Process:
        instance = await asyncio.to_thread(isolated(Room, start_method=method, warm=0))
        try:
            await instance.reset()
            child = psutil.Process(int(await instance.start_child()))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(instance.spin(), 0.2)
            with pytest.raises(EnvironmentFailure, match="took too long or was cancelled"):
                await instance.where()
            return child
        finally:
            await instance.close()

    child = asyncio.run(go())
    wait_until(lambda: not alive(child))  # dying takes a moment


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 8,
        b"\xff" * 64,
        wire.FRAME.pack(4) + b"junk",
        wire.FRAME.pack(2**40),
        wire.FRAME.pack(len(body := pickle.dumps(os.getcwd))) + body,
        wire.FRAME.pack(len(body := wire.encode({"value": "no done"}))) + body,
    ],
    ids=["empty", "noise", "junk", "huge", "pickle", "no-answer"],
)
def test_a_lying_process_is_a_failure_and_nothing_of_it_is_run(data):
    (answer,) = use(isolated(Room, warm=0), ("lie", {"data": list(data)}))
    assert isinstance(answer, EnvironmentFailure)
    assert "unreadable answer" in str(answer)


# Processes ---------------------------------------------------------------------------------------------------------


def test_a_warm_instance_is_ready_before_it_is_wanted():
    """`warm` processes wait beyond those in use, a new one starts when one is taken, and all end with the last."""
    before = children()
    factory = isolated(Room, warm=2)
    first = factory()
    wait_until(lambda: len(children() - before) == 3)
    waiting = {process.pid for process in factory._ready}
    second = factory()
    assert second._process.pid in waiting
    wait_until(lambda: len(children() - before) == 4)
    asyncio.run(first.close())
    asyncio.run(first.close())
    wait_until(lambda: len(children() - before) == 3)
    asyncio.run(second.close())
    wait_until(lambda: children() <= before)


def test_a_warm_process_that_died_is_not_taken_although_it_had_made_its_instance():
    factory = isolated(Room, warm=1)
    first = factory()
    [waiting] = factory._ready
    wait_until(lambda: select.select([waiting._connection], [], [], 0)[0])  # its word that the instance is made
    os.kill(waiting.pid, signal.SIGKILL)
    wait_until(lambda: waiting.gone)
    second = factory()
    assert second._process.pid != waiting.pid
    for instance in (first, second):
        asyncio.run(instance.close())


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_died_while_it_waited_costs_no_attempt(method):
    """Killed between two rollouts, or before its first one: it is replaced, and so is a dead fork server."""
    before = children()
    generator, failures = ScriptedGenerator(lambda *_: turn("ok")), FailurePolicy(retries=0)
    factory = isolated(Room, start_method=method)
    engine = RolloutEngine(generator, renderer(), environments=factory, failures=failures)

    def noticed() -> bool:
        """Whether the dead have hung up, which is a moment after they became zombies."""
        waiting = [*factory._ready, *(instance._process for instance in engine.environments._idle[None])]
        return all(process.gone for process in waiting) and (method == "spawn" or factory._starter.gone)

    try:
        for _ in range(2):
            (trajectory,) = engine.run(tasks(1))
            engine.release([trajectory])
            assert trajectory.outcome is Outcome.FINISHED
            for process in children() - before:  # others have processes here too
                process.kill()
            wait_until(noticed)
    finally:
        engine.close()


@pytest.mark.parametrize("method", METHODS)
def test_processes_end_with_a_killed_parent(method, tmp_path):
    """`kill -9` of the trainer leaves nothing behind, not even an endless loop."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, os
        from agentrl import isolated

        class Spinner:
            def reset(self): ...
            def where(self) -> int:
                "The process."
                return os.getpid()
            def spin(self) -> str:
                "Never end."
                while True: pass

        instance = isolated(Spinner, start_method={method!r})()
        async def go():
            print(await instance.where(), flush=True)
            await instance.spin()
        asyncio.run(go())
        """)
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        processes = [psutil.Process(int(parent.stdout.readline()))]
        processes += psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(alive, processes)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"environment": lambda: Room()}, "needs a class"),
        ({"start_method": "fork"}, "start_method='fork' is not one of"),
        ({"memory": "much"}, "memory='much' is not a size"),
        ({"cpu_time": 0}, "cpu_time=0 must be above 0"),
        ({"warm": -1}, "warm=-1"),
    ],
)
def test_bad_arguments_are_refused(options, text):
    with pytest.raises(ConfigurationError, match=text):
        isolated(**{"environment": Room} | options)


def test_a_partial_of_a_class_is_made_over_there():
    async def go() -> float:
        instance = await asyncio.to_thread(isolated(functools.partial(Room, start=4), warm=0))
        try:
            await instance.reset()
            return await instance.get_reward()
        finally:
            await instance.close()

    assert asyncio.run(go()) == 4.0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(values)
def test_what_crosses_is_what_arrives(value):
    assert wire.decode(wire.encode(value)) == value


@given(st.binary())
def test_whatever_bytes_arrive_decoding_raises_nothing_but_value_errors(body):
    with pytest.raises(ValueError):  # noqa: PT011
        wire.decode(body)
