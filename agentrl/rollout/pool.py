"""A pool of environment instances; each rollout leases one.

An instance is made for every environment at construction, to learn its tools; it is also the first one to be
leased. Further ones are made when all are out, in threads, so that slow constructors overlap. A released
instance is used again, so an expensive `__init__` is paid once; a discarded one is closed and gone, and so is an
isolated one whose process died meanwhile. What an instance does outside of its tools (being made, `reset`,
`get_reward`, `close`) has a deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from agentrl.errors import ConfigurationError, RolloutError, ToolDefinitionError
from agentrl.rollout.calling import call, deadline
from agentrl.rollout.environments import (
    EnvironmentSpec,
    apply_observation,
    check_columns,
    read_reward,
    reset_arguments,
)
from agentrl.rollout.isolation.factory import died_idle
from agentrl.rollout.limits import require_seconds
from agentrl.rollout.threads import Threads
from agentrl.rollout.tools import Tool
from agentrl.types import Prompt, Task

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]

CLOSE_SECONDS = 30.0
"""How long an instance may take to close before it is left behind."""

_SETTING = "environment_timeout"


class EnvironmentPool:
    """Instances of one environment, or of several that tasks choose from by name.

    With one factory the name of a task's environment does not matter.

    Args:
        factories: Makes instances; several by name.
        threads: Where sync code runs.
        timeout: Seconds that making an instance, `reset` and `get_reward` may each take, None for ever.

    Raises:
        ConfigurationError: A factory fails, or there is none.
        ToolDefinitionError: What it makes does not meet the contract.
    """

    def __init__(
        self, factories: Factory | Mapping[str, Factory], threads: Threads, *, timeout: float | None = None
    ) -> None:
        require_seconds("environment_timeout", timeout)
        self._timeout = timeout
        self._threads = threads
        self._lock = threading.Lock()
        self._factories: dict[str | None, Factory] = {}
        self._idle: dict[str | None, list[Any]] = {}
        self._leased: dict[int, tuple[EnvironmentSpec, Any]] = {}
        self._retired: set[int] = set()
        self._closings = 0
        self._under_way: set[asyncio.Future[None]] = set()
        self.specs: dict[str | None, EnvironmentSpec] = {}
        for name, factory in factories.items() if isinstance(factories, Mapping) else [(None, factories)]:
            probe = _probe(name, factory)
            self._factories[name] = factory
            self.specs[name] = EnvironmentSpec.of(probe, name)
            self._idle[name] = [probe]
        if not self.specs:
            raise ConfigurationError("`environment_factory` is an empty dict; name at least one environment")

    @property
    def reward_owners(self) -> dict[str | None, str]:
        """Class names of the environments that own a reward, by environment name."""
        return {name: spec.class_name for name, spec in self.specs.items() if spec.has_reward}

    def spec(self, name: str | None) -> EnvironmentSpec:
        """What is known of an environment.

        Raises:
            ConfigurationError: There is none of that name.
        """
        if None in self.specs:
            return self.specs[None]
        if name not in self.specs:
            raise ConfigurationError(
                f"there is no environment {name!r}; the column `environment` must name one of "
                f"{sorted(map(str, self.specs))}, the keys of `environment_factory`"
            )
        return self.specs[name]

    def tools(self, name: str | None) -> Mapping[str, Tool]:
        """The tools of an environment, not bound to an instance."""
        return self.spec(name).tools

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check that the dataset has what each environment's `reset` needs.

        Raises:
            ConfigurationError: Names class, parameter and the columns that there are.
        """
        columns = list(columns)
        for spec in self.specs.values():
            check_columns(spec, columns)

    async def acquire(self, name: str | None) -> Any:
        """Lease an instance that nobody else holds.

        Raises:
            ConfigurationError: There is no environment of that name.
            RolloutError: The pool was closed meanwhile.
        """
        spec = self.spec(name)
        closings = self._closings
        while True:
            with self._lock:
                if closings != self._closings:
                    raise RolloutError(f"the environment pool was closed while {spec.class_name} was being made")
                while idle := self._idle[spec.name]:
                    instance = idle.pop()
                    if not died_idle(instance):
                        self._leased[id(instance)] = spec, instance
                        return instance
                    self._keep(self._close(instance))
            # The thread itself puts the instance among the idle ones, and goes on if this rollout is cancelled
            # meanwhile: the instance is not lost.
            made = self._keep(call(self._create, self._threads, spec.name, closings))
            async with deadline(self._timeout, f"making an instance of {spec.class_name}", _SETTING):
                await asyncio.shield(made)

    def bound_tools(self, instance: Any) -> dict[str, Tool]:
        """The tools of a leased instance."""
        return self._leased_spec(instance).bind(instance)

    async def reset(self, instance: Any, task: Task) -> Prompt:
        """Start an episode on a leased instance; gives back the prompt that the model sees."""
        spec = self._leased_spec(instance)
        arguments = reset_arguments(spec.reset_parameters, task)
        async with deadline(self._timeout, f"{spec.class_name}.reset", _SETTING):
            observation = await call(instance.reset, self._threads, **arguments)
        return apply_observation(task.prompt, observation, spec.class_name)

    async def get_reward(
        self, instance: Any, *, turns: int = 0, answer: str | None = None
    ) -> float | list[float] | None:
        """The reward of the episode that a leased instance has played, None if it owns none.

        Args:
            instance: The instance.
            turns: How many turns were sampled.
            answer: What the model said in the end, None if it was cut short or the environment ended the episode.
        """
        spec = self._leased_spec(instance)
        if not spec.has_reward:
            return None
        offered = {"turns": turns, "answer": answer}
        arguments = {name: offered[name] for name in spec.reward_parameters}
        async with deadline(self._timeout, f"{spec.class_name}.get_reward", _SETTING):
            reward = await call(instance.get_reward, self._threads, **arguments)
        return read_reward(reward, spec.class_name, turns)

    def retire(self, instance: Any) -> None:
        """See to it that a leased instance is not used again: a call that was given up may still be acting on it."""
        self._retired.add(id(instance))

    def is_retired(self, instance: Any) -> bool:
        """Whether a leased instance is to be discarded instead of released."""
        return id(instance) in self._retired

    def release(self, instance: Any) -> None:
        """Give a leased instance back, from any thread; one that is not leased is ignored."""
        assert not self.is_retired(instance)
        with self._lock:
            if (lease := self._leased.pop(id(instance), None)) is not None:
                self._idle[lease[0].name].append(instance)

    async def discard(self, instance: Any) -> None:
        """Close a leased instance that failed; one that is not leased is ignored."""
        with self._lock:
            lease = self._leased.pop(id(instance), None)
            self._retired.discard(id(instance))
        if lease is not None:
            # A rollout that is cancelled while it gives up an instance must not leave it open.
            await asyncio.shield(self._keep(self._close(instance)))

    async def close(self) -> None:
        """Close every instance once, leased ones too; a later `acquire` makes new ones.

        Those that are being made are waited for, for as long as closing may take, and closed too.
        """
        with self._lock:
            self._closings += 1
            instances = [instance for idle in self._idle.values() for instance in idle]
            instances += [instance for _, instance in self._leased.values()]
            self._idle = {name: [] for name in self._idle}
            self._leased.clear()
            self._retired.clear()
        for instance in instances:
            self._keep(self._close(instance))
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=CLOSE_SECONDS + 1)
            self._under_way.clear()

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Start something that must come to its end even if whoever asked for it is cancelled."""
        future = asyncio.ensure_future(work)
        self._under_way.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: asyncio.Future[None]) -> None:
        self._under_way.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.debug("making or closing an instance failed", exc_info=error)  # whoever waits gets it too

    def _leased_spec(self, instance: Any) -> EnvironmentSpec:
        return self._leased[id(instance)][0]

    def _create(self, name: str | None, closings: int) -> None:
        instance = self._factories[name]()
        with self._lock:
            if closings == self._closings:
                self._idle[name].append(instance)
                return
        asyncio.run(_close(instance))  # nobody waits any more: the pool was closed while the factory ran

    async def _close(self, instance: Any) -> None:
        """Close an instance; it is gone either way, so an error is only logged."""
        if not callable(getattr(instance, "close", None)):
            return
        what = f"{type(instance).__name__}.close"
        try:
            async with deadline(CLOSE_SECONDS, what, "it is left behind"):
                await call(instance.close, self._threads)
        except Exception:
            logger.exception("%s failed", what)


async def _close(instance: Any) -> None:
    if callable(close := getattr(instance, "close", None)) and inspect.isawaitable(closing := close()):
        await closing


def _probe(name: str | None, factory: Factory) -> Any:
    what = "`environment_factory`" if name is None else f"`environment_factory[{name!r}]`"
    if not callable(factory):
        raise ToolDefinitionError(f"{what} must be a class or function that makes environments, not {factory!r}")
    try:
        instance = factory()
    except Exception as error:
        raise ConfigurationError(f"{what} could not make an environment: {error!r}") from error
    if inspect.isawaitable(instance):
        if inspect.iscoroutine(instance):
            instance.close()
        raise ToolDefinitionError(f"{what} is async; make the instance in a plain function, connect in `reset`")
    return instance
