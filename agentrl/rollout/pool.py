"""A pool of environment instances; each rollout leases one.

An instance is made for every environment at construction, to learn its tools; it is also the first one to be
leased. Further ones are made when all are out, in threads, so that slow constructors overlap. A released
instance is used again, so an expensive `__init__` is paid once; a discarded one is closed and gone.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentrl.errors import ConfigurationError, RolloutError, ToolDefinitionError
from agentrl.rollout.environments import (
    EnvironmentSpec,
    apply_observation,
    check_columns,
    read_reward,
    reset_arguments,
)
from agentrl.rollout.threads import Threads, call
from agentrl.rollout.tools import Tool
from agentrl.types import Prompt, Task

logger = logging.getLogger(__name__)

Factory = Callable[[], Any]

CLOSE_SECONDS = 30.0
"""How long an instance may take to close before it is left behind."""


class EnvironmentPool:
    """Instances of one environment, or of several that tasks choose from by name.

    With one factory the name of a task's environment does not matter.
    """

    def __init__(self, factories: Factory | Mapping[str, Factory], threads: Threads) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._factories: dict[str | None, Factory] = {}
        self._idle: dict[str | None, list[Any]] = {}
        self._leased: dict[int, tuple[EnvironmentSpec, Any]] = {}
        self._closings = 0
        self._closing: set[asyncio.Future[None]] = set()
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
                if idle := self._idle[spec.name]:
                    instance = idle.pop()
                    self._leased[id(instance)] = spec, instance
                    return instance
            # The thread itself puts the instance among the idle ones: if this rollout is cancelled meanwhile,
            # the instance is not lost.
            await call(self._create, self._threads, spec.name)

    def bound_tools(self, instance: Any) -> dict[str, Tool]:
        """The tools of a leased instance."""
        return self._leased_spec(instance).bind(instance)

    async def reset(self, instance: Any, task: Task) -> Prompt:
        """Start an episode on a leased instance; gives back the prompt that the model sees."""
        spec = self._leased_spec(instance)
        arguments = reset_arguments(spec.reset_parameters, task)
        observation = await call(instance.reset, self._threads, **arguments)
        return apply_observation(task.prompt, observation, spec.class_name)

    async def get_reward(self, instance: Any, *, turns: int = 0) -> float | list[float] | None:
        """The reward of the episode that a leased instance has played in `turns` turns; None if it owns none."""
        spec = self._leased_spec(instance)
        if not spec.has_reward:
            return None
        arguments = {"turns": turns} if spec.counts_turns else {}
        return read_reward(await call(instance.get_reward, self._threads, **arguments), spec.class_name, turns)

    def release(self, instance: Any) -> None:
        """Give a leased instance back, from any thread; one that is not leased is ignored."""
        with self._lock:
            if (lease := self._leased.pop(id(instance), None)) is not None:
                self._idle[lease[0].name].append(instance)

    async def discard(self, instance: Any) -> None:
        """Close a leased instance that failed; one that is not leased is ignored."""
        with self._lock:
            lease = self._leased.pop(id(instance), None)
        if lease is not None:
            # A rollout that is cancelled while it gives up an instance must not leave it open.
            closing = asyncio.ensure_future(self._close(instance))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    async def close(self) -> None:
        """Close every instance once, leased ones too; a later `acquire` makes new ones."""
        with self._lock:
            self._closings += 1
            instances = [instance for idle in self._idle.values() for instance in idle]
            instances += [instance for _, instance in self._leased.values()]
            self._idle = {name: [] for name in self._idle}
            self._leased.clear()
        await asyncio.gather(*self._closing, *(self._close(instance) for instance in instances))

    def _leased_spec(self, instance: Any) -> EnvironmentSpec:
        return self._leased[id(instance)][0]

    def _create(self, name: str | None) -> None:
        closings = self._closings
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
        try:
            await asyncio.wait_for(call(instance.close, self._threads), CLOSE_SECONDS)
        except Exception:
            logger.exception("closing an instance of the environment %s failed", type(instance).__name__)


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
