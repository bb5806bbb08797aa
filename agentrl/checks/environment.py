"""Whether an environment keeps the contract of `agentrl.rollout.environments`.

A random policy plays the same few tasks three times: on fresh instances, on fresh instances again, and one after the
other on one instance. What differs between the first two is chance in the environment; what differs between those and
the third leaks from one episode to the next. Everything is played by the engine that training uses, with a tokenizer
made here, so no model is needed.
"""

from __future__ import annotations

import asyncio
import inspect
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.checks.findings import Finding, failed, passed, warned
from agentrl.checks.images import DescribingRenderer, check_pictures, in_words, unreadable
from agentrl.checks.policy import RandomPolicy
from agentrl.errors import AgentRLError, EnvironmentFailure, ImageError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Outcome, Task, Trajectory

TOOL_ROUNDS = 12
PLAYED_AGAIN = 4
"""How many of the tasks are played again, those with most calls."""
CLOSE_SECONDS = 30.0
SEED_ADVICE = (
    "draw all that `reset` decides by chance from its argument `seed`, e.g. random.Random(seed): the members of a "
    "group have the same seed, and advantages compare rollouts of one task"
)
LEAK_ADVICE = "set in `reset` all that an episode changes: instances are reused, and `__init__` runs once"


def check_environment(
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
    tasks: Sequence[Task],
    *,
    tools: Sequence[Callable[..., Any]] = (),
    scored: bool = False,
) -> list[Finding]:
    """Play an environment with random valid calls and look at what it does.

    Args:
        factory: Makes instances; or several factories by name; None for tools alone.
        tasks: What to play, in groups of at least two.
        tools: Functions that are offered in every episode, besides the environment's own tools.
        scored: Whether reward functions score the episodes, so that the environment need not.

    Returns:
        The findings, in the order in which they were made. Where it cannot be played at all there are no further ones.
    """
    if isinstance(factory, Mapping) and len(factory) > 1:
        return [finding for name in factory for finding in _of_several(factory, name, tasks, tools, scored)]
    findings: list[Finding] = []
    try:
        for finding in _of_tools(tools, tasks) if factory is None else _findings(factory, list(tasks), tools, scored):
            findings.append(finding)
    except AgentRLError as error:
        findings.append(failed("definition", str(error), "change the environment as the message says"))
    return findings


def _of_several(
    factory: Mapping[str, Callable[[], Any]], name: str, tasks: Sequence[Task], tools: Sequence[Any], scored: bool
) -> list[Finding]:
    """The findings of one environment, which say its name: random calls are of its own tools."""
    own = [task for task in tasks if task.environment == name]
    if not own:
        return [warned("episodes", f"{name}: no task is played in it", "play more tasks (--groups)")]
    found = check_environment({name: factory[name]}, own, tools=tools, scored=scored)
    return [replace(finding, seen=f"{name}: {finding.seen}") for finding in found]


class _Stage:
    """An engine of its own, with instances of its own."""

    def __init__(self, factory: Any, tools: Sequence[Any], *, calls: bool = True) -> None:
        tokenizer = qwen_like_tokenizer("qwen2_5")
        renderer = DescribingRenderer(tokenizer, tools=True)
        policy = RandomPolicy(renderer, tokenizer)
        self.engine = RolloutEngine(
            policy,
            renderer,
            tools=tools,
            environments=factory,
            limits=Limits(max_tool_iterations=TOOL_ROUNDS),
            failures=FailurePolicy(retries=0, max_rate=1.0),
            tool_max_failures=None,
        )
        self.pool = self.engine.environments
        self.specs = [] if self.pool is None else list(self.pool.specs.values())
        self.tools = [*self.engine.tools.values(), *(tool for spec in self.specs for tool in spec.tools.values())]
        if calls:
            policy.schemas = [tool.schema for tool in self.tools]

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def play(self, tasks: Sequence[Task]) -> list[Trajectory]:
        trajectories = self.engine.run(tasks)
        self.engine.release(trajectories)
        return trajectories


def _findings(factory: Any, tasks: list[Task], tools: Sequence[Any], scored: bool) -> Iterator[Finding]:
    with _Stage(factory, tools) as stage:
        assert stage.pool is not None
        stage.pool.check_columns(tasks[0].columns)
        yield _offered(stage)
        first = stage.engine.run(tasks)
        broken = next((t for t in first if t.failure is not None), None)
        if broken is not None:
            if broken.prompt:
                yield from _silent(factory, tools, tasks[0])
            yield _breakage("reset" if not broken.prompt else "episode", broken)
            return
        yield _playable(first)
        yield from check_pictures(first)
        yield from _rewards(first, any(spec.has_reward for spec in stage.specs), scored)
        yield from _asked_again(stage, first)
        stage.engine.release(first)
    yield from _silent(factory, tools, tasks[0])
    yield from _seeds(first)
    yield from _again(factory, tools, tasks, first, replayable=all(spec.replayable for spec in stage.specs))
    yield from _tools(first)
    yield from _close(factory)


def _of_tools(tools: Sequence[Callable[..., Any]], tasks: Sequence[Task]) -> Iterator[Finding]:
    """What can be said of tools without an environment; rewards are given by functions then."""
    with _Stage(None, tools) as stage:
        yield _offered(stage)
        played = stage.play(tasks)
    yield _playable(played)
    yield from check_pictures(played)
    yield from _tools(played)


def _offered(stage: _Stage) -> Finding:
    names = [tool.name for tool in stage.tools]
    if names:
        return passed("tools", f"{len(names)}: {', '.join(names)}")
    return warned("tools", "there are none", "a public method with type hints and a docstring is a tool")


def _playable(played: Sequence[Trajectory]) -> Finding:
    turns = statistics.fmean(len(t.turns) for t in played)
    return passed("episodes", f"{len(played)} were played with random calls, {turns:.1f} turns on average")


def _breakage(check: str, trajectory: Trajectory) -> Finding:
    assert trajectory.failure is not None
    where, error = trajectory.failure.where, trajectory.failure.error
    if error.startswith(ImageError.__name__):
        return unreadable(where, error)
    return failed(
        check, f"{where} raised {error}", "a rollout whose environment raises is lost; see the traceback in Python"
    )


def total(trajectory: Trajectory) -> float | None:
    """What the environment gave a trajectory, rewards of turns included; None for nothing."""
    given = [value for value in (trajectory.reward, *(trajectory.turn_rewards or ())) if value is not None]
    return sum(given) if given else None


def _rewards(played: Sequence[Trajectory], owned: bool, scored: bool) -> Iterator[Finding]:
    rewards = [reward for t in played if (reward := total(t)) is not None]
    if not rewards:
        if scored:
            return
        advice = "return a finite number from `get_reward`, or pass reward functions (--reward)"
        seen = f"`get_reward` gave None for all {len(played)} episodes" if owned else "the environment gives no reward"
        yield failed("reward", seen, advice)
        return
    yield passed("reward", f"from {min(rewards):.4g} to {max(rewards):.4g}, mean {statistics.fmean(rewards):.4g}")
    groups: dict[str, list[float | None]] = defaultdict(list)
    for t in played:
        groups[t.task.group].append(total(t))
    flat = sum(len(set(group)) == 1 for group in groups.values())
    if flat == len(groups):
        yield warned(
            "variance",
            f"under random valid calls all rewards within each of {flat} groups are equal",
            "a policy that starts no better learns nothing: reward parts of the way, make some tasks easier, or start "
            "from a model that solves some (agentrl rollout tells)",
        )
    else:
        yield passed("variance", f"rewards differ within {len(groups) - flat} of {len(groups)} groups of random play")


def _asked_again(stage: _Stage, played: Sequence[Trajectory]) -> Iterator[Finding]:
    """Ask for the reward of an episode a second time, before anything else happens."""
    trajectory = next((t for t in played if t.reward is not None), None)
    if trajectory is None:
        return
    finished = trajectory.outcome is Outcome.FINISHED
    answer = trajectory.completion[-1].get("content") or "" if finished else None  # type: ignore[union-attr]
    assert stage.pool is not None
    asking = stage.pool.get_reward(trajectory.environment, turns=len(trajectory.turns), answer=answer)
    try:
        again = repr(stage.engine.await_(asking))
    except EnvironmentFailure:  # a session that ended with its reward, on a server say
        return
    except Exception as error:  # noqa: BLE001 (whatever it raises is what is to be told)
        again = f"raised {type(error).__name__}: {error}"
    if again != repr(trajectory.reward):
        yield warned(
            "get_reward",
            f"it gave {trajectory.reward:g}, and {again} when asked again",
            "compute the reward from the state of the episode without changing it",
        )


def _silent(factory: Any, tools: Sequence[Any], task: Task) -> Iterator[Finding]:
    """An episode whose model calls no tool must end like any other."""
    with _Stage(factory, tools, calls=False) as stage:
        [trajectory] = stage.play([task])
    if trajectory.failure is not None:
        yield failed(
            "no calls",
            f"after an answer without any call, {trajectory.failure.where} raised {trajectory.failure.error}",
            "set in `reset` whatever `get_reward` reads: a model that calls nothing must get a reward too",
        )


def _seeds(played: Sequence[Trajectory]) -> Iterator[Finding]:
    prompts: dict[str, list[str]] = defaultdict(list)
    for t in played:
        prompts[t.task.group].append(repr(in_words(t.prompt)))
    unequal = sum(len(set(group)) > 1 for group in prompts.values())
    distinct = len({group[0] for group in prompts.values()})
    if unequal:
        yield failed(
            "seed", f"two resets with one seed gave different tasks, in {unequal} of {len(prompts)} groups", SEED_ADVICE
        )
    elif distinct == 1 and len(prompts) > 1:
        yield warned(
            "seed",
            f"{len(prompts)} seeds gave one and the same first observation",
            "this is right only if all tasks begin alike; else take `seed` as an argument of `reset` and use it",
        )
    else:
        yield passed("seed", f"one seed gives one task; {len(prompts)} gave {distinct} tasks")


def _again(
    factory: Any, tools: Sequence[Any], tasks: Sequence[Task], first: Sequence[Trajectory], *, replayable: bool
) -> Iterator[Finding]:
    """Play some tasks again, on fresh instances and on a used one."""
    chosen = sorted(range(len(tasks)), key=lambda i: -first[i].tool_calls)[:PLAYED_AGAIN]
    with _Stage(factory, tools) as stage:
        fresh = stage.play([tasks[i] for i in chosen])
    difference = next((d for i, t in zip(chosen, fresh, strict=True) if (d := _difference(first[i], t))), None)
    if difference is not None and replayable:
        yield failed(
            "replay", f"the same calls on a fresh instance differ: {difference}",
            "draw chance from `seed` alone, or drop `replayable = True`: a cut-off rollout cannot be repeated",
        )  # fmt: skip
        return
    if difference is not None:
        yield warned(
            "determinism", f"the same calls on a fresh instance differ: {difference}",
            "draw chance from `seed` where you can; whether state leaks between episodes cannot be told so",
        )  # fmt: skip
        return
    yield passed("determinism", "the same calls gave the same" + ("" if replayable else "; it may be `replayable`"))
    with _Stage(factory, tools) as stage:
        used = [stage.play([tasks[i]])[0] for i in chosen]
    leak = next((d for i, t in zip(chosen, used, strict=True) if (d := _difference(first[i], t))), None)
    if leak is not None:
        yield failed("leaks", f"an episode on a used instance differs from one on a fresh one: {leak}", LEAK_ADVICE)
    else:
        yield passed("leaks", "an episode leaves nothing to the next one on its instance")


def _difference(before: Trajectory, after: Trajectory) -> str | None:
    """The first thing in which two trajectories of the same policy and task differ."""
    if after.failure is not None:
        return f"{after.failure.where} raised {after.failure.error}"
    prompts = [in_words(t.prompt) for t in (before, after)]
    if prompts[0] != prompts[1]:
        return f"the first observation was {_short(prompts[0])}, then {_short(prompts[1])}"
    results = [[r for turn in t.turns for r in turn.results] for t in (before, after)]
    for one, other in zip(*results, strict=False):
        told = [in_words(result.content) for result in (one, other)]
        if told[0] != told[1]:
            return f"{one.call.name} told {_short(told[0])}, then {_short(told[1])}"
    if len(before.turns) != len(after.turns):
        return f"it took {len(before.turns)} turns, then {len(after.turns)}"
    if total(before) != total(after):
        return f"the reward was {total(before)}, then {total(after)}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _tools(played: Sequence[Trajectory]) -> Iterator[Finding]:
    """Tools that fail whatever they are given."""
    results = defaultdict(list)
    for result in (r for t in played for turn in t.turns for r in turn.results):
        results[result.call.name].append(result)
    hopeless = {name: given for name, given in results.items() if len(given) >= 2 and all(r.failed for r in given)}
    for name, given in hopeless.items():
        yield warned(
            "tools",
            f"all {len(given)} random valid calls of {name} failed: {_short(given[0].content)}",
            "if it can succeed, say in its docstring what it takes (an enum or bounds help); else mend it",
        )
    if not hopeless:
        yield passed("calls", f"{sum(map(len, results.values()))} random valid calls; each tool succeeded at some")


def _close(factory: Any) -> Iterator[Finding]:
    for name, make in factory.items() if isinstance(factory, Mapping) else [("", factory)]:
        instance = make()
        close = getattr(instance, "close", None)
        if not callable(close):
            continue
        try:
            asyncio.run(_closed(close))
        except Exception as error:  # noqa: BLE001 (whatever it raises is what is to be told)
            seen = f"{name or type(instance).__name__}.close raised {type(error).__name__}: {error}"
            yield failed("close", seen, "it must work at any time, also on an instance that was never reset")
        else:
            yield passed("close", f"{name or type(instance).__name__}.close ended")


async def _closed(close: Callable[[], Any]) -> None:
    if inspect.iscoroutinefunction(close):
        closing: Any = close()
    else:
        closing = await asyncio.wait_for(asyncio.to_thread(close), CLOSE_SECONDS)
    if inspect.isawaitable(closing):
        await asyncio.wait_for(closing, CLOSE_SECONDS)
