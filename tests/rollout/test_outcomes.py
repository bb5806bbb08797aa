"""How rollouts end when something outside of the model goes wrong: typed, bounded, and never a reward."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from agentrl.errors import ConfigurationError, EnvironmentFailure, GenerationError, RolloutError
from agentrl.rollout import engine as engine_module
from agentrl.rollout import pool as pool_module
from agentrl.rollout.calling import deadline
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import LONGEST_DELAY, FailurePolicy, FailureWindow, backoff, failure_of
from agentrl.rollout.limits import Limits
from agentrl.rollout.policy import ToolPolicy, tool
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Limit, Outcome, Task, Trajectory
from tests.rollout.helpers import QUESTION, Counter, call, renderer, run_and_close, tasks, turn
from tests.waiting import skip, wait_until

AT_ONCE = FailurePolicy(delay=0)
CALL_THEN_ANSWER = [turn(call("inc")), turn("ok")]
HUNG = 600.0
"""Seconds that nothing here waits for: what hangs, hangs for so long."""
MINUTE = 60.0
"""A limit that only what hangs can meet, for its clock is moved on by `HUNG` then."""


def engine_of(script, **options):
    policy = script if callable(script) else looped(script)
    return RolloutEngine(ScriptedGenerator(policy), renderer(), **{"failures": AT_ONCE, **options})


def looped(turns):
    """A policy that plays the same turns in every session."""
    left = {}
    return lambda session, ids, params: left.setdefault(session, list(turns)).pop(0)


def play(script, rows, **options):
    return run_and_close(engine_of(script, **options), rows)


def instances_of(cls):
    """A factory that keeps what it made."""
    made = []

    def factory():
        made.append(cls())
        return made[-1]

    factory.made = made
    return factory


class Closing(Counter):
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


# Retries ------------------------------------------------------------------------------------------------------


def test_retries_are_counted_and_use_fresh_instances_with_the_same_task_and_seed():
    seen = []

    class Flaky(Closing):
        def reset(self, seed, number, **kwargs):
            seen.append((id(self), seed, number))
            super().reset()
            if len(seen) < 3:
                raise ConnectionError("gone")

    factory = instances_of(Flaky)
    [trajectory] = play(CALL_THEN_ANSWER, tasks(1, number=5), environments=factory)
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.retries == 2
    assert trajectory.reward == 1.0
    assert len({instance for instance, _, _ in seen}) == 3
    assert {(seed, number) for _, seed, number in seen} == {(7, 5)}
    assert [instance.closed for instance in factory.made] == [1] * 3


def test_a_rollout_is_given_up_after_its_retries():
    class Dead(Counter):
        tried = 0

        def reset(self, **kwargs):
            Dead.tried += 1
            raise ConnectionError("gone")

    policy = FailurePolicy(retries=3, delay=0, max_rate=1.0)
    [trajectory] = play([], tasks(1), environments=Dead, failures=policy)
    assert (trajectory.outcome, trajectory.retries, trajectory.reward) == (Outcome.ENV_FAILURE, 3, None)
    assert Dead.tried == 4


def test_the_wait_between_attempts_doubles_and_is_random_up_to_a_bound():
    for failures, longest in [(1, 2.0), (2, 4.0), (3, 8.0), (20, LONGEST_DELAY)]:
        waits = [backoff(failures, 2.0) for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest
    assert backoff(3, 0) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"retries": -1}, {"delay": -1.0}, {"delay": float("nan")}, {"max_rate": 1.5}, {"max_rate": -0.1}, {"window": 0}],
)
def test_wrong_failure_policies_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="expected"):
        FailurePolicy(**wrong)


# Deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["making an instance of Hangs", "Hangs.reset", "Hangs.get_reward"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_an_environment_does_has_a_deadline(where, kind, monkeypatch):
    """A hung reset or reward is a failure of the environment with the setting in its message, not a hung run."""
    released = threading.Event()

    def patient_elsewhere(seconds, what, setting):
        hangs = what == where and not (where.startswith("making") and not made)
        return deadline(seconds if hangs else HUNG, what, setting)

    monkeypatch.setattr(pool_module, "deadline", patient_elsewhere)

    class Hangs(Counter):
        def __init__(self):
            if where.startswith("making") and made:
                released.wait(HUNG)
            made.append(self)

    async def reset(self, **kwargs):
        Counter.reset(self)
        if where.endswith("reset"):
            await asyncio.sleep(HUNG)

    async def get_reward(self):
        if where.endswith("get_reward"):
            await asyncio.sleep(HUNG)
        return 1.0

    def sync_reset(self, **kwargs):
        Counter.reset(self)
        if where.endswith("reset"):
            released.wait(HUNG)

    def sync_get_reward(self):
        if where.endswith("get_reward"):
            released.wait(HUNG)
        return 1.0

    made = []
    Hangs.reset, Hangs.get_reward = (reset, get_reward) if kind == "async" else (sync_reset, sync_get_reward)
    policy = FailurePolicy(retries=0, max_rate=1.0)
    engine = engine_of(CALL_THEN_ANSWER, environments=Hangs, failures=policy, environment_timeout=0.1)
    first, second = engine.run(tasks(2))
    released.set()
    engine.close()
    hung = second if where.startswith("making") else first
    assert hung.outcome is Outcome.ENV_FAILURE
    assert f"{where} did not end within 0.1 s (environment_timeout)" in hung.failure.error


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_rollout_timeout_interrupts_a_tool_and_keeps_the_turn(kind):
    """The model's turn is whole; what was going on is given up and its instance is not used again."""
    free = threading.Event()

    class Slow(Closing):
        if kind == "sync":

            def dig(self) -> str:
                """Dig."""
                skip(loop[0], HUNG)
                free.wait(HUNG)
                return "dug"
        else:

            async def dig(self) -> str:
                """Dig."""
                skip(loop[0], HUNG)
                await asyncio.sleep(2 * HUNG)
                return "dug"

    class Generator(ScriptedGenerator):
        async def sample(self, session, ids, params):
            loop[:] = [asyncio.get_running_loop()]
            return await super().sample(session, ids, params)

    loop, factory = [], instances_of(Slow)
    script = [turn(call("inc")), turn(call("dig"))]
    limits = Limits(rollout_timeout=MINUTE)
    engine = RolloutEngine(Generator(looped(script)), renderer(), environments=factory, limits=limits)
    [trajectory] = engine.run(tasks(1))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TIMEOUT, Limit.ROLLOUT_TIME)
    assert_row_invariants(trajectory)
    assert [bool(t.results) for t in trajectory.turns] == [True, False]
    assert trajectory.loss_mask[-1] == 1
    assert sum(trajectory.loss_mask) == sum(map(len, script))
    assert trajectory.reward == 1.0, "the model played so far"
    assert trajectory.truncated
    engine.release([trajectory])
    [after] = engine.run(tasks(1))
    assert len(factory.made) == 2
    engine.release([after])
    free.set()
    engine.close()
    assert [instance.closed for instance in factory.made] == [1, 1]


def test_the_rollout_timeout_interrupts_sampling_and_cuts_the_row_at_the_last_sampled_token():
    class Hanging(ScriptedGenerator):
        async def sample(self, session, ids, params):
            if self.calls_of(session):
                skip(asyncio.get_running_loop(), HUNG)
                await asyncio.sleep(2 * HUNG)
            return await super().sample(session, ids, params)

    generator = Hanging(looped([turn(call("inc"))]))
    engine = RolloutEngine(generator, renderer(), environments=Counter, limits=Limits(rollout_timeout=MINUTE))
    [trajectory] = engine.run(tasks(1))
    engine.close()
    assert trajectory.outcome is Outcome.TIMEOUT
    assert trajectory.completion_ids == turn(call("inc"))
    assert [m["role"] for m in trajectory.completion] == ["assistant", "tool"]
    assert_row_invariants(trajectory)


def test_time_that_runs_out_before_the_first_turn_is_no_signal():
    """Nothing in such an episode is the model's, so a reward for it would be one for the infrastructure."""

    class Slow(Counter):
        def reset(self, **kwargs):
            super().reset()
            time.sleep(0.2)

    policy = FailurePolicy(retries=0, max_rate=1.0)
    limits = Limits(rollout_timeout=0.05)
    [trajectory] = play(CALL_THEN_ANSWER, tasks(1), environments=Slow, failures=policy, limits=limits)
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert trajectory.reward is None
    assert "rollout_timeout=0.05" in trajectory.failure.error


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0, -1, "5", True])
def test_f09_timeouts_are_finite_and_positive(value):
    with pytest.raises(ConfigurationError, match="rollout_timeout"):
        Limits(rollout_timeout=value)
    with pytest.raises(ConfigurationError, match="environment_timeout"):
        engine_of([], environments=Counter, environment_timeout=value)
    with pytest.raises(ConfigurationError, match="timeout"):
        ToolPolicy(timeout=value)
    with pytest.raises(ConfigurationError, match="timeout"):
        tool(timeout=value)


# Too many failures --------------------------------------------------------------------------------------------


def outcome(kind, group="g", where="Env.reset", error=None):
    failure = failure_of(where, error or ConnectionError("gone")) if kind is Outcome.ENV_FAILURE else None
    return Trajectory(Task(group, 1, 7, None, {"number": 5}), "", [], "", [], [], [], kind, failure=failure)


GOOD, BAD = Outcome.FINISHED, Outcome.ENV_FAILURE


def test_the_window_stops_the_run_as_soon_as_it_is_full_of_failures():
    window = FailureWindow(FailurePolicy(max_rate=0.5, window=4))
    for kind in [BAD, BAD, GOOD, GOOD, GOOD, BAD]:
        window.add(outcome(kind))
    window.add(outcome(BAD))  # good good bad bad: half, which is allowed
    with pytest.raises(RolloutError, match="3 of the last 4"):
        window.add(outcome(BAD))


def test_the_window_forgets_old_failures_and_ignores_cancelled_rollouts():
    window = FailureWindow(FailurePolicy(max_rate=0.5, window=2))
    window.add(outcome(BAD))
    for kind in [GOOD, GOOD, Outcome.CANCELLED, BAD, GOOD]:
        window.add(outcome(kind))
    window.check()


def test_the_message_has_the_commonest_cause_an_example_row_and_a_traceback():
    window = FailureWindow(FailurePolicy(max_rate=0.5, window=100))
    try:
        raise ConnectionError("no route to 10.0.0.7")
    except ConnectionError as error:
        window.add(outcome(BAD, "rare", "Env.get_reward", ValueError("rare")))
        window.add(outcome(BAD, "a", error=ConnectionError("no route to 10.0.0.6")))
        window.add(outcome(BAD, "b", error=error))
    with pytest.raises(RolloutError) as raised:
        window.check()
    message = str(raised.value)
    assert "3 of the last 3 rollouts" in message
    assert "2 times" in message
    assert "no route to 10.0.0.7' in Env.reset" in message
    assert "member 1 of group b (seed 7, columns {'number': 5})" in message
    assert "max_failure_rate=0.5" in message
    assert "Traceback" in message
    assert "test_outcomes.py" in message


def test_a_run_whose_environments_die_stops_before_all_tasks_are_played():
    class Dead(Counter):
        resets = 0

        def reset(self, **kwargs):
            Dead.resets += 1
            if Dead.resets > 4:
                time.sleep(0.05)  # those that come later are still at it when the window is full
            raise ConnectionError("gone")

    engine = engine_of([], environments=Dead, failures=FailurePolicy(retries=0, window=4))
    with pytest.raises(RolloutError, match="4 of the last 4"):
        engine.run(tasks(40))
    engine.close()


def test_a_small_run_that_fails_is_judged_with_the_runs_before_it():
    """Such as a group that is drawn again: two of six are lost, though all of the second run."""

    class Odd(Counter):
        def reset(self, number, **kwargs):
            super().reset()
            if number:
                raise ConnectionError("gone")

    engine = engine_of(CALL_THEN_ANSWER, environments=Odd, failures=FailurePolicy(retries=0))
    engine.run(tasks(4, number=0))
    assert [t.outcome for t in engine.run(tasks(2, number=1))] == [BAD, BAD]
    engine.close()


def test_a_few_failures_cost_nobody_else_their_rollout():
    class Odd(Counter):
        def reset(self, number, **kwargs):
            super().reset()
            if number % 4 == 0:
                raise ConnectionError("gone")

    rows = [Task("g", n, 7, QUESTION, {"number": n}) for n in range(16)]
    trajectories = play(CALL_THEN_ANSWER, rows, environments=Odd, failures=FailurePolicy(retries=1, delay=0))
    assert [t.reward for t in trajectories] == [None if n % 4 == 0 else 1.0 for n in range(16)]


# Cancellation -------------------------------------------------------------------------------------------------


def test_cancelled_rollouts_have_no_reward():
    def stop() -> str:
        """Stop everything."""
        engine.cancel()
        return "stopped"

    engine = engine_of(lambda *_: turn(call("stop")), tools=[stop], environments=Counter)
    trajectories = engine.run(tasks(2))
    engine.close()
    assert [(t.outcome, t.reward) for t in trajectories] == [(Outcome.CANCELLED, None)] * 2
    assert not any(t.outcome.is_signal for t in trajectories)


@pytest.mark.parametrize("kind", ["sync", "async", "stubborn"])
def test_an_error_in_one_rollout_ends_the_others_in_the_midst_of_hung_tools(kind, monkeypatch):
    """The generator breaks for the second rollout while the first one's tool hangs."""
    monkeypatch.setattr(engine_module, "CLOSE_SECONDS", 0.5)  # how long the stubborn one is waited for
    hanging, free = threading.Event(), threading.Event()

    class Hangs(Closing):
        def wait(self) -> str:
            """Wait."""
            hanging.set()
            free.wait(HUNG)
            return ""

        async def wait_async(self) -> str:
            """Wait."""
            hanging.set()
            await asyncio.sleep(HUNG)
            return ""

        async def wait_stubborn(self) -> str:
            """Wait."""
            hanging.set()
            while not free.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            return ""

    def policy(session, ids, params):
        if free.is_set() or (session.split("/")[1] == "1" and hanging.is_set()):
            raise GenerationError("out of memory")
        name = {"sync": "wait", "async": "wait_async", "stubborn": "wait_stubborn"}[kind]
        return turn(call("inc" if session.split("/")[1] == "1" else name))

    factory = instances_of(Hangs)
    engine = engine_of(policy, environments=factory)
    start = time.monotonic()
    with pytest.raises(GenerationError, match="out of memory"):
        engine.run(tasks(2))
    assert time.monotonic() - start < HUNG / 2
    free.set()
    engine.close()
    assert [instance.closed for instance in factory.made] == [1, 1]


def test_g08_ctrl_c_ends_the_run_closes_every_environment_and_leaves_no_thread():
    before, asked = set(threading.enumerate()), []
    free = threading.Event()

    class Hangs(Closing):
        def wait(self) -> str:
            """Wait."""
            if not asked:
                asked.append(signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
            free.wait(HUNG)
            return ""

    factory = instances_of(Hangs)
    engine = engine_of([turn(call("wait"))], environments=factory)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.run(tasks(3))
    free.set()
    engine.close()
    assert time.monotonic() - start < HUNG / 2
    assert all(instance.closed == 1 for instance in factory.made)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_keyboard_interrupt_raised_by_a_tool_reaches_the_caller_and_the_engine_lives_on():
    def interrupt() -> str:
        """Interrupt."""
        raise KeyboardInterrupt

    engine = engine_of([turn(call("interrupt"))], tools=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        engine.run(tasks(1))
    engine.close()
    engine = engine_of([turn("ok")])
    assert engine.run(tasks(1))[0].outcome is Outcome.FINISHED
    engine.close()


def test_a_close_that_hangs_is_left_behind(monkeypatch):
    monkeypatch.setattr(pool_module, "CLOSE_SECONDS", 0.1)
    free = threading.Event()

    class Hangs(Counter):
        def close(self):
            free.wait(HUNG)

    engine = engine_of(CALL_THEN_ANSWER, environments=Hangs)
    engine.run(tasks(2))
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < HUNG / 2
    free.set()


BLOCKS_THE_LOOP = """
import logging, os, signal, threading, time
import agentrl.rollout.loop as module
module.CLOSE_SECONDS = module.BLOCKED_SECONDS = 0.2

warned = threading.Event()

class Impatient(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        warned.set()

logging.basicConfig(handlers=[Impatient()])

def interrupt():
    warned.wait()
    os.kill(os.getpid(), signal.SIGINT)

async def forgetful():
    threading.Thread(target=interrupt, daemon=True).start()
    time.sleep(600)

loop = module.LoopThread()
try:
    loop.run(forgetful())
except KeyboardInterrupt:
    print("interrupted")
loop.close()
print("closed")
"""


def test_async_code_that_blocks_the_loop_is_named_and_keeps_neither_ctrl_c_nor_the_process():
    done = subprocess.run([sys.executable, "-c", BLOCKS_THE_LOOP], capture_output=True, text=True, timeout=HUNG)
    assert done.stdout.split() == ["interrupted", "closed"], done.stderr
    assert "the event loop has been blocked" in done.stderr
    assert "the event loop is blocked and left behind" in done.stderr
    assert "in forgetful" in done.stderr


def test_h13_a_failed_rollout_is_an_empty_row_without_a_reward():
    class Odd(Counter):
        def reset(self, number, **kwargs):
            super().reset()
            if number == 1:
                raise EnvironmentFailure("server error")

        def get_reward(self):
            return float(self.counter == 0)

    rows = [Task("g", n, 7, QUESTION, {"number": n}) for n in range(3)]
    played = looped(CALL_THEN_ANSWER)

    def script(session, ids, params):
        return played(session, ids, params) if session.split("/")[1] == "2" else turn("ok")

    trajectories = play(script, rows, environments=Odd, failures=FailurePolicy(retries=0))
    assert [t.completion_ids == [] for t in trajectories] == [False, True, False]
    assert [t.reward for t in trajectories] == [1.0, None, 0.0]


# What `get_reward` may ask for ------------------------------------------------------------------------------


class Graded(Counter):
    answers: list = []  # noqa: RUF012 - each test resets it

    def get_reward(self, turns, answer):
        type(self).answers.append((turns, answer))
        return 1.0


class EndsItself(Graded):
    @property
    def done(self):
        return self.counter > 0


@pytest.mark.parametrize(
    ("environment", "script", "limits", "seen"),
    [
        (Graded, CALL_THEN_ANSWER, None, (2, "ok")),
        (Graded, [turn("")], None, (1, "")),
        (Graded, [turn("o")[:1]], None, (1, None)),
        (Graded, CALL_THEN_ANSWER, Limits(max_tool_iterations=0), (1, None)),
        (EndsItself, CALL_THEN_ANSWER, None, (1, None)),
    ],
    ids=["answered", "answered with nothing", "cut by length", "cut by a limit", "ended by the environment"],
)
def test_get_reward_is_given_the_final_answer_if_there_is_one(environment, script, limits, seen):
    Graded.answers = []
    play(script, tasks(1), environments=environment, limits=limits)
    assert Graded.answers == [seen]
