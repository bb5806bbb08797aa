"""Environments: the contract, what `reset` gets and gives, and the pool."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigurationError, RewardError, RolloutError, ToolDefinitionError
from agentrl.rollout.environments import (
    EnvironmentSpec,
    apply_observation,
    check_columns,
    environment_tools,
    episode_done,
    merge_tools,
    read_reward,
    reset_arguments,
)
from agentrl.rollout.pool import EnvironmentPool
from agentrl.rollout.threads import Threads
from agentrl.rollout.tools import ToolRunner, make_tools
from agentrl.types import Task, ToolCall
from tests.waiting import LONG

Q = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q:"},
    {"role": "assistant", "content": "A"},
]


class Counter:
    """Counts; `closed` lists the instances that were closed."""

    closed: list[Counter] = []  # noqa: RUF012 (shared on purpose)

    def reset(self, **columns: Any) -> None:
        self.count = 0
        self.columns = columns

    def inc(self, step: int) -> int:
        """Increment.

        Args:
            step: How far.
        """
        self.count += step
        return self.count

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return self.count

    def close(self) -> None:
        Counter.closed.append(self)


class Talker:
    async def reset(self) -> str:
        return " go"

    async def say(self, text: str) -> str:
        """Say.

        Args:
            text: What.
        """
        return text


@pytest.fixture
def threads() -> Iterator[Threads]:
    Counter.closed = []
    threads = Threads()
    yield threads
    threads.close()


def task(**options: Any) -> Task:
    return Task("g", 0, **{"seed": 7, **options})


def arguments(reset: Callable[..., Any], **options: Any) -> dict[str, Any]:
    return reset_arguments(inspect.signature(reset).parameters, task(**options))


# The contract


def test_reset_is_required() -> None:
    with pytest.raises(ToolDefinitionError, match="the environment object has no method `reset`"):
        EnvironmentSpec.of(object())


def test_only_public_methods_are_tools() -> None:
    class Base(Counter):
        def inherited(self) -> None:
            """Do."""

    class Env(Base):
        class Nested:
            """Not a tool."""

        limit = 3

        def __init__(self) -> None:
            self.callback = print

        def own(self) -> None:
            """Do."""

        def _private(self) -> None: ...

        @staticmethod
        def static() -> None: ...

        @classmethod
        def made(cls) -> None: ...

        @property
        def explosive(self) -> None:
            raise RuntimeError("properties must not be read")

        @functools.cached_property
        def cached(self) -> None:
            raise RuntimeError("properties must not be read")

    assert list(environment_tools(Env())) == ["inc", "inherited", "own"]


def test_a_method_that_cannot_be_a_tool_is_refused_naming_class_and_method() -> None:
    class Env(Counter):
        def helper(self) -> None: ...

    with pytest.raises(ToolDefinitionError, match="the tool 'helper' of the environment Env has no docstring"):
        EnvironmentSpec.of(Env())


def test_the_tools_of_two_instances_act_on_their_own(threads: Threads) -> None:
    first, second = Counter(), Counter()
    spec = EnvironmentSpec.of(first)
    for instance, step in [(first, 1), (second, 5)]:
        instance.reset()
        call = ToolCall("1", "inc", {"step": step})
        asyncio.run(ToolRunner(threads).run([call], spec.bind(instance)))
    assert (first.count, second.count) == (1, 5)


def test_get_reward_that_needs_arguments_is_refused() -> None:
    class Env(Counter):
        def get_reward(self, completion: str) -> float:  # type: ignore[override]
            return 0.0

    with pytest.raises(ToolDefinitionError, match=r"Env.get_reward is called without arguments.*completion"):
        EnvironmentSpec.of(Env())


def test_f10_a_method_named_like_a_standalone_tool_is_refused() -> None:
    def inc() -> None:
        """Do."""

    standalone, methods = make_tools([inc]), environment_tools(Counter())
    with pytest.raises(ToolDefinitionError, match=r"\['inc'\] are names of `tools` and of methods.*Counter"):
        merge_tools(standalone, methods, "Counter")
    assert list(merge_tools({}, methods, "Counter")) == ["inc"]


def test_done_is_an_attribute_or_property_and_never_a_method() -> None:
    class Property:
        @property
        def done(self) -> bool:
            return True

    class Method:
        def done(self) -> None: ...

    env = Counter()
    assert not episode_done(env)
    env.done = np.bool_(True)  # type: ignore[attr-defined]
    assert episode_done(env)
    assert episode_done(Property())
    assert not episode_done(Method())


# What reset gets


def test_reset_gets_the_columns_its_signature_takes() -> None:
    columns = {"target": 3, "other": 4, "prompt": "P", "environment": "E"}
    assert arguments(lambda target: None, columns=columns) == {"target": 3}
    assert arguments(lambda **kwargs: None, columns=columns) == {"target": 3, "other": 4, "seed": 7}
    assert arguments(lambda: None, columns=columns) == {}


def test_reset_gets_the_groups_seed_unless_the_dataset_has_one() -> None:
    assert arguments(lambda seed: None) == {"seed": 7}
    assert arguments(lambda seed=None: None, columns={"seed": 1}) == {"seed": 1}
    assert arguments(lambda **kwargs: None, columns={"seed": 1}) == {"seed": 1}


def test_c07_columns_reach_reset_as_they_are() -> None:
    state = {"a": 1, "nested": {"b": None}}
    assert arguments(lambda state: None, columns={"state": state})["state"] is state


def test_a_required_parameter_without_column_is_refused_before_anything_runs() -> None:
    class Env(Counter):
        def reset(self, target: int, level: int, seed: int, hint: str = "") -> None: ...  # type: ignore[override]

    spec = EnvironmentSpec.of(Env())
    with pytest.raises(ConfigurationError, match=r"Env.reset needs \['level'\].*columns \['target'\]"):
        check_columns(spec, ["prompt", "target"])
    check_columns(spec, ["target", "level"])


# What reset gives back


def test_g01_text_is_appended_to_the_last_user_message() -> None:
    assert apply_observation(Q, " go", "Env") == [Q[0], {"role": "user", "content": "Q: go"}, Q[2]]
    assert Q[1]["content"] == "Q:"


def test_g01_none_changes_nothing() -> None:
    assert apply_observation(Q, None, "Env") == Q
    assert apply_observation("Q:", None, "Env") == "Q:"


def test_g01_content_blocks_follow_the_text_as_a_block() -> None:
    blocks = [{"type": "image", "image": "I"}, {"type": "text", "text": "go"}]
    text = {"type": "text", "text": "Q:"}
    prompt = [{"role": "user", "content": "Q:"}]
    assert apply_observation(prompt, blocks, "Env") == [{"role": "user", "content": [text, *blocks]}]
    assert apply_observation(None, blocks, "Env") == [{"role": "user", "content": blocks}]
    prompt = [{"role": "user", "content": [text]}]
    assert apply_observation(prompt, " go", "Env")[0]["content"] == [text, {"type": "text", "text": " go"}]  # type: ignore[index]
    assert prompt == [{"role": "user", "content": [text]}]


def test_the_observation_is_the_prompt_when_the_dataset_has_none() -> None:
    message = {"role": "user", "content": "go"}
    assert apply_observation(None, "go", "Env") == [message]
    assert apply_observation(None, [message], "Env") == [message]
    assert apply_observation([Q[0]], "go", "Env") == [Q[0], message]


def test_messages_are_appended() -> None:
    message = {"role": "user", "content": "go"}
    assert apply_observation(Q, [message], "Env") == [*Q, message]
    assert len(Q) == 3


def test_text_is_concatenated_to_a_plain_text_prompt() -> None:
    assert apply_observation("Q:", " go", "Env") == "Q: go"


@pytest.mark.parametrize(
    "observation",
    [3, {"role": "user", "content": "x"}, ["go"], [{"type": "text"}, {"role": "user"}], ("a",), [{}]],
)
def test_other_observations_are_refused_naming_class_and_value(observation: Any) -> None:
    with pytest.raises(ToolDefinitionError, match=r"Env.reset gave back .*; it may give back None, a string"):
        apply_observation(Q, observation, "Env")


def test_messages_and_blocks_cannot_follow_plain_text() -> None:
    for observation, kind in [(Q, "messages"), ([{"type": "text", "text": "x"}], "content blocks")]:
        with pytest.raises(ToolDefinitionError, match=f"Env.reset gave back {kind}, which cannot be added"):
            apply_observation("Q:", observation, "Env")


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(ToolDefinitionError, match=r"no prompt: the dataset has none and Env.reset gave back None"):
        apply_observation(None, None, "Env")


# Rewards


def test_rewards_are_finite_numbers_or_none() -> None:
    for value in (1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1), np.array(1.0)):
        reward = read_reward(value, "Env")
        assert reward == 1.0
        assert type(reward) is float
    assert read_reward(None, "Env") is None


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", np.ones(1), torch.ones(1), 1j, {}])
def test_other_rewards_are_refused_naming_the_class(value: Any) -> None:
    with pytest.raises(RewardError, match=r"Env.get_reward gave back .*finite number"):
        read_reward(value, "Env")


# The pool


def test_f11_async_rewards_belong_to_the_episode_just_played(threads: Threads) -> None:
    pool = EnvironmentPool(Counter, threads)
    runner = ToolRunner(threads)

    async def play(steps: int) -> float | None:
        env = await pool.acquire(None)
        await pool.reset(env, task(prompt="P"))
        for _ in range(steps):
            await runner.run([ToolCall("1", "inc", {"step": 1})], pool.bound_tools(env))
        reward = await pool.get_reward(env)
        pool.release(env)
        return reward

    async def main() -> list[float | None]:
        first = await asyncio.gather(play(1), play(2))
        return [*first, *await asyncio.gather(play(3), play(4))]

    rewards = asyncio.run(main())
    assert rewards == [1.0, 2.0, 3.0, 4.0]
    assert all(type(reward) is float for reward in rewards)


def test_reset_gives_the_prompt_that_the_model_sees(threads: Threads) -> None:
    pool = EnvironmentPool(Talker, threads)

    async def main() -> Any:
        env = await pool.acquire(None)
        return await pool.reset(env, task(prompt="Q:")), await pool.get_reward(env)

    assert asyncio.run(main()) == ("Q: go", None)


def test_the_probe_is_the_first_instance_and_init_is_paid_once(threads: Threads) -> None:
    made: list[Counter] = []

    def factory() -> Counter:
        made.append(Counter())
        return made[-1]

    pool = EnvironmentPool(factory, threads)

    async def main() -> None:
        for _ in range(3):
            env = await pool.acquire(None)
            assert env is made[0]
            pool.release(env)

    asyncio.run(main())
    assert len(made) == 1
    assert pool.spec(None).class_name == "Counter"


def test_no_two_rollouts_hold_one_instance(threads: Threads) -> None:
    pool = EnvironmentPool(Counter, threads)

    async def main() -> None:
        first, second = await asyncio.gather(pool.acquire(None), pool.acquire(None))
        assert first is not second
        pool.release(first)
        pool.release(first)  # a second release must not offer it twice
        third, fourth = await asyncio.gather(pool.acquire(None), pool.acquire(None))
        assert len({id(second), id(third), id(fourth)}) == 3

    asyncio.run(main())


def test_g09_an_instance_whose_rollout_was_cancelled_meanwhile_is_not_lost(threads: Threads) -> None:
    Counter.closed = []
    begin, made = threading.Event(), []

    def factory() -> Counter:
        if made:
            begin.wait(LONG)
        made.append(Counter())
        return made[-1]

    pool = EnvironmentPool(factory, threads)

    async def main() -> None:
        await pool.acquire(None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.acquire(None), 0.01)
        begin.set()
        assert await pool.acquire(None) in made
        await pool.close()

    asyncio.run(main())
    assert sorted(map(id, Counter.closed)) == sorted(map(id, made))


def test_g09_an_instance_made_while_the_pool_closes_is_closed(threads: Threads) -> None:
    Counter.closed = []
    begin, made = threading.Event(), []

    def factory() -> Counter:
        if made:
            begin.wait(LONG)
        made.append(Counter())
        return made[-1]

    pool = EnvironmentPool(factory, threads)

    async def main() -> None:
        await pool.acquire(None)
        waiting = asyncio.create_task(pool.acquire(None))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.01)
        begin.set()
        await closing
        with pytest.raises(RolloutError, match="closed while Counter was being made"):
            await waiting

    asyncio.run(main())
    assert sorted(map(id, Counter.closed)) == sorted(map(id, made))


def test_g09_an_instance_whose_making_begins_after_closing_is_closed() -> None:
    """All threads are busy, so the pool closes while the factory still waits for one."""
    Counter.closed = []
    threads, gate, made = Threads(max_threads=1), threading.Event(), []

    def factory() -> Counter:
        made.append(Counter())
        return made[-1]

    pool = EnvironmentPool(factory, threads)

    async def main() -> None:
        await pool.acquire(None)
        busy = asyncio.create_task(threads.run(gate.wait, LONG))
        waiting = asyncio.create_task(pool.acquire(None))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(busy, closing)
        with pytest.raises(RolloutError, match="closed while Counter was being made"):
            await waiting

    asyncio.run(main())
    threads.close()
    assert len(made) == 2
    assert sorted(map(id, Counter.closed)) == sorted(map(id, made))


def test_slow_factories_overlap(threads: Threads) -> None:
    together = threading.Barrier(4)
    made = []

    def factory() -> Counter:
        if made:
            together.wait(LONG)  # opens only when four constructors run at once
        made.append(1)
        return Counter()

    pool = EnvironmentPool(factory, threads)

    async def main() -> None:
        instances = await asyncio.gather(*(pool.acquire(None) for _ in range(5)))
        assert len(set(map(id, instances))) == 5

    asyncio.run(main())
    assert len(made) == 5


def test_a_discarded_instance_is_closed_and_replaced(threads: Threads) -> None:
    pool = EnvironmentPool(Counter, threads)

    async def main() -> None:
        env = await pool.acquire(None)
        await pool.discard(env)
        await pool.discard(env)
        pool.release(env)
        assert Counter.closed == [env]
        assert await pool.acquire(None) is not env

    asyncio.run(main())


def test_closing_closes_each_instance_once_and_survives_errors(
    threads: Threads, caplog: pytest.LogCaptureFixture
) -> None:
    closed = []

    class Bad(Talker):
        def close(self) -> None:
            raise OSError("already gone")

    class Later(Talker):
        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(self)

    pool = EnvironmentPool({"bad": Bad, "later": Later, "without": Talker, "counter": Counter}, threads)

    async def main() -> None:
        leased = await pool.acquire("later")
        with caplog.at_level(logging.ERROR):
            await pool.close()
        await pool.close()
        pool.release(leased)
        assert closed == [leased]
        assert await pool.acquire("later") is not leased, "a closed pool makes new instances"

    asyncio.run(main())
    assert len(Counter.closed) == 1
    assert "Bad.close failed" in caplog.text


def test_an_instance_that_never_closes_is_left_behind(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentrl.rollout.pool.CLOSE_SECONDS", 0.01)

    class Slow(Talker):
        async def close(self) -> None:
            await asyncio.sleep(600)

    asyncio.run(asyncio.wait_for(EnvironmentPool(Slow, threads).close(), LONG))
    assert "Slow.close did not end within 0.01 s (it is left behind)" in caplog.text


def test_release_works_from_another_thread(threads: Threads) -> None:
    pool = EnvironmentPool(Counter, threads)
    env = asyncio.run(pool.acquire(None))
    other = threading.Thread(target=pool.release, args=[env])
    other.start()
    other.join()
    assert asyncio.run(pool.acquire(None)) is env


def test_g04_each_name_has_its_own_environment_and_tools(threads: Threads) -> None:
    pool = EnvironmentPool({"a": Counter, "b": Talker}, threads)

    async def main() -> list[str]:
        return [type(await pool.acquire(name)).__name__ for name in ("a", "b", "a", "b")]

    assert asyncio.run(main()) == ["Counter", "Talker", "Counter", "Talker"]
    assert [list(pool.tools(name)) for name in ("a", "b")] == [["inc"], ["say"]]
    assert pool.reward_owners == {"a": "Counter"}


def test_a_single_environment_serves_every_name(threads: Threads) -> None:
    assert EnvironmentPool(Counter, threads).spec("whatever").class_name == "Counter"


def test_an_unknown_name_is_refused_listing_the_known_ones(threads: Threads) -> None:
    pool = EnvironmentPool({"a": Counter, "b": Talker}, threads)
    for name in ("c", None):
        with pytest.raises(ConfigurationError, match=rf"no environment {name!r}.*\['a', 'b'\]"):
            pool.spec(name)


def test_every_environment_is_checked_against_the_columns(threads: Threads) -> None:
    class Env(Talker):
        async def reset(self, level: int) -> str:  # type: ignore[override]
            return str(level)

    pool = EnvironmentPool({"a": Counter, "b": Env}, threads)
    with pytest.raises(ConfigurationError, match=r"Env.reset needs \['level'\]"):
        pool.check_columns(["prompt", "environment"])


def test_bad_factories_are_refused_naming_them(threads: Threads) -> None:
    def broken() -> None:
        raise OSError("no server")

    async def later() -> Counter:
        return Counter()

    for factories, wrong in [
        (
            {"a": broken},
            r"`environment_factory\['a'\]` could not make an environment: OSError\('no server'\)",
        ),
        (later, "is async"),
        (Counter(), "must be a class or function"),
        ({}, "empty dict"),
    ]:
        with pytest.raises(ConfigurationError, match=wrong):
            EnvironmentPool(factories, threads)  # type: ignore[arg-type]


def test_slow_resets_and_rewards_do_not_hold_up_others(threads: Threads) -> None:
    together = threading.Barrier(16)  # opens only when all are there at once

    class Slow(Counter):
        def reset(self, **columns: Any) -> None:
            together.wait(LONG)

        def get_reward(self) -> float:  # type: ignore[override]
            together.wait(LONG)
            return 1.0

    pool = EnvironmentPool(Slow, threads)

    async def play() -> None:
        env = await pool.acquire(None)
        await pool.reset(env, task(prompt="P"))
        await pool.get_reward(env)

    async def main() -> None:
        await asyncio.gather(*(play() for _ in range(16)))

    asyncio.run(main())
