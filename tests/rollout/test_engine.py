"""The engine on scripted turns: every row is known beforehand, so it is asserted to the id."""

import asyncio
import threading
from collections import Counter as Count
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.errors import ConfigurationError, EnvironmentFailure, GenerationError, RewardError, RolloutError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.environments import EpisodeDone
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import FinishReason, Limit, Outcome, Sample, Task
from tests.rollout.helpers import BOS, EOS, NEWLINE, QUESTION, Counter, call, echo, encode, renderer, tasks, turn
from tests.waiting import LONG, eventually, skip, wait_until


def play(script, *, rows=None, template="t0", limits=None, **engine_options):
    """Play one task for each script (a list of turns), assert the row invariants, and return trajectories and calls."""
    generator = ScriptedGenerator(script if callable(script) else by_index(script))
    engine_options = {"failures": FailurePolicy(delay=0), **engine_options}
    engine = RolloutEngine(generator, renderer(template), limits=limits or Limits(), **engine_options)
    try:
        trajectories = engine.run(rows or tasks(len(script)))
        engine.release(trajectories)
    finally:
        engine.close()
    for index, trajectory in enumerate(trajectories):
        attempts = [session for session in generator.sessions() if session.split("/")[1] == str(index)]
        assert_row_invariants(trajectory, generator.calls_of(attempts[-1]) if attempts else ())
    return trajectories, generator


def by_index(scripts):
    """A policy that plays `scripts[i]` for task i, from the start at every attempt; sessions are run/i/attempt."""
    left = {}

    def policy(session, ids, params):
        turns = left.setdefault(session, list(scripts[int(session.split("/")[1])]))
        return turns.pop(0)

    return policy


# Rows ---------------------------------------------------------------------------------------------------------


def test_rows_keep_sampled_ids_whatever_they_decode_to_A01_B01():
    """Sampled "ab" as two ids stays two ids, though encoding the text again would give one."""
    first = Sample(
        [197, 198, *encode(call("echo", '{"text": "7"}')), EOS],
        [-0.25] * (3 + len(encode(call("echo", '{"text": "7"}')))),
        FinishReason.STOP,
    )
    last = Sample([120, EOS], [-4.0, -5.0], FinishReason.STOP)
    [trajectory], generator = play([[first, last]], tools=[echo])
    suffix = [NEWLINE, BOS, *encode("tool\n7"), EOS, NEWLINE, BOS, *encode("assistant\n")]
    assert trajectory.completion_ids == [*first.ids, *suffix, *last.ids]
    assert trajectory.loss_mask == [1] * len(first.ids) + [0] * len(suffix) + [1, 1]
    assert [lp for lp, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if m] == [
        *first.logprobs,
        -4.0,
        -5.0,
    ]
    second_prompt = generator.calls[1].ids
    assert 50 not in second_prompt[len(trajectory.prompt_ids) :]
    assert second_prompt[len(trajectory.prompt_ids) :][:2] == [197, 198]


@pytest.mark.parametrize("template", ["t0", "grouped"])
def test_the_row_equals_a_full_rendering_of_the_conversation_B02_B07(template):
    [trajectory], _ = play([[turn(call("echo", '{"text": "5"}')), turn("ok")]], tools=[echo], template=template)
    bridge = renderer(template)
    whole = bridge._tokenizer.apply_chat_template(
        [*trajectory.prompt, *trajectory.completion], tools=[_schema(echo)], tokenize=False
    )
    row = trajectory.prompt_ids + trajectory.completion_ids
    assert bridge._tokenizer.decode(row) == whole.rstrip("\n")


def test_parallel_results_are_added_once_and_in_call_order_A04_A05():
    written = "".join(call("echo", f'{{"text": "r{i}"}}') for i in range(3))
    [trajectory], _ = play([[turn(written), turn("ok")]], tools=[echo], template="grouped")
    answers = [m["content"] for m in trajectory.completion if m["role"] == "tool"]
    assert answers == ["r0", "r1", "r2"]
    text = renderer("grouped").text(trajectory.completion_ids)
    assert text.count("user<r>r0</r><r>r1</r><r>r2</r>") == 1


def test_the_turn_cap_is_not_the_row_cap_A09():
    """Three turns of few tokens each do not fit the first turn's length, but the row's budget."""
    script = [turn(call("inc")), turn(call("inc")), turn("ok")]
    [trajectory], _ = play([script], environments=Counter, limits=Limits(max_completion_length=400))
    assert trajectory.outcome is Outcome.FINISHED
    assert sum(trajectory.loss_mask) == sum(map(len, script))


def test_standard_prompts_give_text_and_no_parsing():
    [trajectory], _ = play([[turn("<think>x</think>hi")]], rows=tasks(1, "Say"))
    assert trajectory.completion == "<think>x</think>hi"
    assert trajectory.prompt_ids == encode("Say")


def test_a_conversation_without_tools_keeps_its_text_whole():
    [trajectory], _ = play([[turn("<think>x</think>hi")]])
    assert trajectory.completion == [{"role": "assistant", "content": "<think>x</think>hi"}]


# Tools --------------------------------------------------------------------------------------------------------


def test_unknown_malformed_and_partial_calls_are_answered_D06_D07_D09():
    bad = [call("no_such_tool"), "<call>{broken</call>", '<call>{"name": "echo"}</call>', call("echo", '{"x": 1}')]
    [trajectory], _ = play([[turn("".join(bad)), turn("sorry")]], tools=[echo])
    answers = [m["content"] for m in trajectory.completion if m["role"] == "tool"]
    assert len(answers) == 4
    assert "no_such_tool" in answers[0]
    assert "echo" in answers[0]
    assert (trajectory.tool_calls, trajectory.tool_failures) == (4, 4)
    assert trajectory.outcome is Outcome.FINISHED


def test_one_bad_call_does_not_lose_the_others_D07():
    written = "<call>{broken</call>" + call("echo", '{"text": "fine"}')
    [trajectory], _ = play([[turn(written), turn("ok")]], tools=[echo])
    assert [r.failed for r in trajectory.turns[0].results] == [True, False]
    assert trajectory.completion[2]["content"] == "fine"
    ids = [c["id"] for c in trajectory.completion[0].get("tool_calls", [])]
    assert [m["tool_call_id"] for m in trajectory.completion[1:3]] == [r.call.id for r in trajectory.turns[0].results]
    assert len(set(ids)) == len(ids)


def test_call_ids_are_unique_within_a_rollout():
    [trajectory], _ = play([[turn(call("inc")), turn(call("inc") + call("inc")), turn("ok")]], environments=Counter)
    ids = [result.call.id for t in trajectory.turns for result in t.results]
    assert len(ids) == len(set(ids)) == 3


@pytest.mark.parametrize("complete", [False, True])
def test_a_turn_cut_by_its_length_runs_no_call_D14(complete):
    ran = []

    def write(p: str = "") -> str:
        """Write.

        Args:
            p: What.
        """
        ran.append(p)
        return "done"

    text = call("write", '{"p": "a"}') + "and th" if complete else '<call>{"name": "write", "arguments": {"p": "a'
    ids = encode(text)
    [trajectory], _ = play([[ids]], tools=[write], limits=Limits(max_completion_length=len(ids)))
    assert ran == []
    assert trajectory.outcome is Outcome.TRUNCATED
    assert trajectory.limit is Limit.COMPLETION
    assert trajectory.truncated
    assert trajectory.completion_ids == ids


def test_rollouts_do_not_wait_for_each_other_with_slow_tools():
    """Invariant 6: the tools of 64 rollouts wait for each other, so they must all be under way at once."""
    together = threading.Barrier(64)

    def wait() -> str:
        """Wait."""
        together.wait(LONG)
        return "met"

    trajectories, _ = play([[turn(call("wait")), turn("ok")] for _ in range(64)], tools=[wait])
    assert {trajectory.completion[1]["content"] for trajectory in trajectories} == {"met"}


def test_a_slow_rollout_holds_no_other_up():
    """Invariant 6: the quick one finishes its second tool round while the slow one is still in its first."""
    order = []

    async def wait(name: str) -> str:
        """Wait.

        Args:
            name: Who.
        """
        if name == "slow":
            await eventually(lambda: "quick1" in order)
        order.append(name)
        return name

    slow = [turn(call("wait", '{"name": "slow"}')), turn("ok")]
    quick = [turn(call("wait", f'{{"name": "quick{i}"}}')) for i in range(2)] + [turn("ok")]
    play([slow, quick], tools=[wait])
    assert order == ["quick0", "quick1", "slow"]


# Limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iterations", "calls"), [(0, 0), (1, 1), (None, 3)])
def test_tool_iterations_are_counted_E08(iterations, calls):
    script = [turn(call("inc"))] * (calls + 1) if iterations is not None else [turn(call("inc"))] * 3 + [turn("ok")]
    [trajectory], _ = play([script], environments=Counter, limits=Limits(max_tool_iterations=iterations))
    assert trajectory.reward == calls
    assert trajectory.loss_mask[-1] == 1
    if iterations is not None:
        assert trajectory.limit is Limit.TOOL_ITERATIONS
        assert not trajectory.truncated


def test_a_tool_result_without_room_is_dropped_whole_E04():
    first = turn(call("echo", '{"text": "long enough"}'))
    limits = Limits(max_completion_length=len(first) + 5)
    [cut, whole], _ = play([[first], [turn("ok")]], tools=[echo], limits=limits)
    assert cut.completion_ids == first
    assert cut.loss_mask == [1] * len(first)
    assert [m["role"] for m in cut.completion] == ["assistant"]
    assert (cut.outcome, cut.limit) == (Outcome.TRUNCATED, Limit.COMPLETION)
    assert whole.outcome is Outcome.FINISHED


def test_a_prompt_that_fills_the_context_is_not_sent_and_still_scored_E07():
    rows = [Task("x", 0, 0, "a" * 3 + "c" * 11), Task("y", 0, 0, "c" * 16), Task("z", 0, 0, "c" * 5)]
    script = [[encode("cc")], [turn("ok")]]
    generator = ScriptedGenerator(script)
    engine = RolloutEngine(generator, renderer(), limits=Limits(max_completion_length=8, max_context=16))
    x, y, z = engine.run(rows)
    engine.close()
    assert [call.params.max_tokens for call in generator.calls] == [2, 8]
    assert (x.outcome, x.limit) == (Outcome.TRUNCATED, Limit.CONTEXT)
    assert (y.outcome, y.limit, y.completion_ids, y.completion) == (Outcome.TRUNCATED, Limit.CONTEXT, [], "")
    assert z.outcome is Outcome.FINISHED


def test_each_turn_gets_only_the_budget_that_is_left():
    _, generator = play(
        [[turn(call("inc")), turn("ok")]], environments=Counter, limits=Limits(max_completion_length=300)
    )
    first, second = generator.calls
    assert first.params.max_tokens == 300
    used = len(second.ids) - len(first.ids)
    assert second.params.max_tokens == 300 - used


def test_flags_are_per_rollout_not_per_turn_E09():
    script = [[turn(call("inc")), encode("cut"), turn("never")], [turn("ok")]]
    trajectories, _ = play(script, environments=Counter)
    assert [t.truncated for t in trajectories] == [True, False]


def test_the_rollout_timeout_ends_an_episode_with_what_it_has():
    async def slow() -> str:
        """Be slow."""
        skip(asyncio.get_running_loop(), 600)
        await asyncio.sleep(1000)
        return "late"

    [trajectory], _ = play([[turn(call("slow")), turn("x")]], tools=[slow], limits=Limits(rollout_timeout=60))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TIMEOUT, Limit.ROLLOUT_TIME)
    assert len(trajectory.turns) == 1


def test_cancel_ends_all_rollouts_at_their_next_check():
    def stop() -> str:
        """Stop everything."""
        running.cancel()
        return "stopped"

    generator = ScriptedGenerator(lambda *_: turn(call("stop")))
    running = RolloutEngine(generator, renderer(), tools=[stop], limits=Limits())
    trajectories = running.run(tasks(2))
    running.close()
    assert {t.outcome for t in trajectories} == {Outcome.CANCELLED}


# Environments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (" go", [{"role": "user", "content": "Q: go"}]),
        (None, QUESTION),
        ([{"role": "system", "content": "S"}], [*QUESTION, {"role": "system", "content": "S"}]),
    ],
)
def test_the_model_sees_what_reset_gives_G01(observation, expected):
    class Speaks(Counter):
        def reset(self, **kwargs):
            super().reset()
            return observation

    [trajectory], generator = play([[turn("ok")]], environments=Speaks)
    assert trajectory.prompt == expected
    bridge = renderer()
    assert generator.calls[0].ids == bridge.prompt_ids(expected, [_schema(Counter().inc)])
    assert QUESTION == [{"role": "user", "content": "Q:"}], "the dataset's prompt is not changed"


def test_every_rollout_starts_from_a_reset_G03():
    class Fresh(Counter):
        resets = 0

    generator = ScriptedGenerator([[turn(call("inc")), turn("ok")]] * 6)
    engine = RolloutEngine(generator, renderer(), environments=Fresh, limits=Limits())
    rewards = []
    for _ in range(3):
        trajectories = engine.run(tasks(2))
        rewards += [t.reward for t in trajectories]
        engine.release(trajectories)
    engine.close()
    assert rewards == [1.0] * 6
    assert Fresh.resets == 6


def test_rewards_are_taken_before_the_instance_plays_on_F11():
    class Slow(Counter):
        async def get_reward(self):
            await asyncio.sleep(0)
            return self.counter

    script = [[*[turn(call("inc"))] * n, turn("ok")] for n in (1, 2, 3, 4)]
    trajectories, _ = play(script, environments=Slow)
    assert [t.reward for t in trajectories] == [1, 2, 3, 4]


def test_trajectories_keep_their_environment_until_released_G05():
    generator = ScriptedGenerator(by_index([[turn(call("inc"))] * n + [turn("ok")] for n in (1, 2, 3)]))
    engine = RolloutEngine(generator, renderer(), environments=Counter, limits=Limits())
    trajectories = engine.run(tasks(3))
    assert [t.environment.counter for t in trajectories] == [1, 2, 3]
    engine.release(trajectories)
    assert all(t.environment is None for t in trajectories)
    engine.close()


def test_members_of_a_group_share_their_seed_and_groups_differ():
    """Invariant 7."""
    seeds = []

    class Seeded(Counter):
        def reset(self, seed=None, **kwargs):
            seeds.append(seed)
            super().reset()

    rows = [Task(g, m, {"a": 1, "b": 2}[g], QUESTION) for g in "ab" for m in range(3)]
    _, generator = play([[turn("ok")]] * 6, rows=rows, environments=Seeded)
    assert Count(seeds) == {1: 3, 2: 3}
    assert len({c.params.seed for c in generator.calls}) == 6, "members still sample differently"


@pytest.mark.parametrize("raises", [True, False])
def test_an_environment_can_end_the_episode(raises):
    class Game(Counter):
        done = False

        def finish(self) -> str:
            """End the game."""
            if raises:
                raise EpisodeDone("you won")
            self.done = True
            return "you won"

    [trajectory], generator = play([[turn(call("finish"))]], environments=Game)
    assert trajectory.outcome is Outcome.ENV_DONE
    assert not trajectory.truncated
    assert trajectory.completion[-1]["content"] == "you won"
    assert len(generator.calls) == 1
    assert trajectory.loss_mask[-1] == 1


def test_tools_of_other_environments_are_not_offered_G04():
    class Other(Counter):
        def jump(self) -> str:
            """Jump."""
            return "jumped"

        inc = None

    rows = [Task("0", 0, 0, QUESTION, environment="a"), Task("1", 0, 0, QUESTION, environment="b")]
    script = [[turn(call("jump")), turn("ok")]] * 2
    first, second = play(script, rows=rows, environments={"a": Counter, "b": Other})[0]
    assert (first.tool_failures, second.tool_failures) == (1, 0)
    assert second.completion[1]["content"] == "jumped"


# Failures -----------------------------------------------------------------------------------------------------


def test_an_environment_failure_is_tried_again_on_a_fresh_instance_and_is_no_reward():
    """Invariant 4: the second attempt has the same task and seed; the broken instance is closed."""
    closed, seeds = [], []

    class Flaky(Counter):
        broken = 1

        def reset(self, seed=None, **kwargs):
            seeds.append(seed)
            if Flaky.broken:
                Flaky.broken -= 1
                raise ConnectionError("server gone")
            super().reset()

        def close(self):
            closed.append(self)

    [trajectory], _ = play([[turn(call("inc")), turn("ok")]], environments=Flaky)
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.reward == 1.0
    assert seeds == [7, 7]
    assert len(closed) == len(set(map(id, closed))) == 2


@pytest.mark.parametrize("where", ["reset", "get_reward", "a tool"])
def test_a_lasting_environment_failure_has_no_reward_and_a_cause(where):
    class Broken(Counter):
        bad = 0

        def reset(self, number, **kwargs):
            self.number = number
            super().reset()
            if where == "reset" and number == 0:
                raise ConnectionError("gone")

        def get_reward(self):
            if where == "get_reward" and self.number == 0:
                raise ConnectionError("gone")
            return 1.0

        def inc(self) -> str:
            """Go on."""
            if where == "a tool" and self.number == 0:
                raise EnvironmentFailure("gone")
            return "ok"

    rows = [Task("g", n, 0, QUESTION, {"number": n}) for n in range(3)]
    generator = ScriptedGenerator(by_index([[turn(call("inc")), turn("ok")]] * 3))
    engine = RolloutEngine(generator, renderer(), environments=Broken, failures=FailurePolicy(delay=0))
    first, *others = engine.run(rows)
    engine.release([first, *others])
    engine.close()
    assert first.outcome is Outcome.ENV_FAILURE
    assert first.reward is None
    assert first.failure is not None
    assert first.failure.where == f"Broken.{where}"
    assert "gone" in first.failure.error
    assert "Traceback" in first.failure.traceback
    assert [t.reward for t in others] == [1.0, 1.0]


def test_a_run_that_mostly_fails_stops_with_the_commonest_cause():
    class Dead(Counter):
        def reset(self, **kwargs):
            raise ConnectionError("no route to host")

    with pytest.raises(RolloutError, match=r"4 of the last 4 .* 4 times.*no route to host") as error:
        play([[]] * 4, environments=Dead)
    assert "Traceback" in str(error.value)


def test_a_wrong_reward_ends_the_run_instead_of_being_dropped():
    class Wrong(Counter):
        def get_reward(self):
            return "much"

    with pytest.raises(RewardError, match=r"Wrong.get_reward gave back 'much'"):
        play([[turn("ok")]], environments=Wrong)


def test_a_reset_that_breaks_the_contract_ends_the_run():
    class Wrong(Counter):
        def reset(self, **kwargs):
            return 3

    with pytest.raises(ConfigurationError, match=r"Wrong.reset gave back 3"):
        play([[turn("ok")]], environments=Wrong)


@pytest.mark.parametrize("_", range(5))
def test_a_broken_generator_ends_the_run_and_frees_the_environments(_):
    """Rollouts that fail side by side cancel one another while they give up their instances."""
    instances = []

    class Kept(Counter):
        def __init__(self):
            instances.append(self)
            self.closed = False

        def close(self):
            self.closed = True

    def policy(session, ids, params):
        raise GenerationError("out of memory")

    with pytest.raises(GenerationError, match="out of memory"):
        play(policy, rows=tasks(3), environments=Kept)
    assert all(instance.closed for instance in instances)


# Threads ------------------------------------------------------------------------------------------------------


async def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    await asyncio.sleep(0)
    return 2 * x


def run_once():
    [trajectory], _ = play([[turn(call("double", '{"x": 4}')), turn("ok")]], tools=[double])
    return trajectory.completion[1]["content"]


def test_the_engine_runs_in_every_place_F06():
    """The main thread, another thread, after asyncio.run, and inside a running loop give the same."""
    results = [run_once()]
    thread = threading.Thread(target=lambda: results.append(run_once()))
    thread.start()
    thread.join()
    asyncio.run(asyncio.sleep(0))
    results.append(run_once())

    async def inside():
        results.append(run_once())

    asyncio.run(inside())
    assert results == ["8"] * 4


def test_a_lock_that_async_tools_share_is_never_waited_for_in_vain_f05():
    """Two rollouts contend for it; the run is started from inside a running loop, and from another thread."""

    def contend():
        lock = asyncio.Lock()

        async def hold(x: int) -> int:
            """Hold the lock.

            Args:
                x: A number.
            """
            async with lock:
                await asyncio.sleep(0.01)
                return x

        trajectories, _ = play([[turn(call("hold", '{"x": 4}')), turn("ok")]] * 2, tools=[hold])
        return [trajectory.completion[1]["content"] for trajectory in trajectories]

    async def inside():
        return contend()

    with ThreadPoolExecutor(2) as threads:
        for run in (threads.submit(contend), threads.submit(asyncio.run, inside())):
            assert run.result(timeout=60) == ["4", "4"]


def test_threads_return_when_engines_are_closed_F08():
    before = set(threading.enumerate())
    for _ in range(5):
        run_once()
        play([[turn(call("inc")), turn("ok")]], environments=Counter)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_closed_engine_starts_again():
    generator = ScriptedGenerator([[turn(call("inc")), turn("ok")]] * 2)
    engine = RolloutEngine(generator, renderer(), environments=Counter, limits=Limits())
    for _ in range(2):
        [trajectory] = engine.run(tasks(1))
        assert trajectory.reward == 1.0
        engine.close()


def test_sessions_are_released():
    _, generator = play([[turn("ok")], [turn("ok")]])
    assert sorted(generator.released) == sorted(generator.sessions())


def _schema(function):
    from agentrl.rollout.tools import Tool

    return Tool.from_function(function).schema
