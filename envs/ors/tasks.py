"""`ORS`: an environment of an ORS server as a factory of instances and as a dataset of tasks."""

from __future__ import annotations

import json
import reprlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

from datasets import Dataset

from agentrl.envs.ors.client import Client
from agentrl.envs.ors.environment import ORSEnvironment
from agentrl.envs.ors.server import find_server
from agentrl.envs.ors.wire import ProtocolError, ToolList, read_tools
from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.rollout.loop import LoopThread

Ask = Callable[..., Awaitable[Any]]
"""Asks the server: a path under the environment's, and a body for a POST."""

PAGE = 1000
"""Tasks asked for at once."""


class ORS:
    """An environment behind the Open Reward Standard (https://openrewardstandard.io).

    Calling it makes an instance, so it is an `environment_factory`; `tasks` is the dataset that goes with it:

        ors = ORS(url="http://127.0.0.1:8080")
        trainer = GRPOTrainer(model, args=args, train_dataset=ors.tasks("train"), environment_factory=ors)

    Args:
        name: A name of the OpenReward catalogue, `owner/environment`. Or:
        url: Address of a server.
        env: Which environment of the server; may be left out where it has one only.
        split: Which tasks `tasks()` gives when it is not told.
        reward: How the rewards of an episode become one. "sum" (default): the reward of a tool's output is that of
            this step, and the return of an episode is the sum over its steps. "last": for environments that report
            a running score. An episode without any reward has 0.0; one that the environment ended without any has none.
        api_key: Key for the catalogue (default: the environment variable `OPENREWARD_API_KEY`), or for `url`.
        api_key_hosts: Hosts that may see `api_key`; needed with `url`. Nobody else is sent the key.
        call_timeout: Most seconds of one tool call. A call that takes longer is the environment's failure, because
            what it does on the server afterwards cannot be known.
        setup_timeout: Most seconds that the server may take to set a task up.
        silence: Seconds without a byte (servers send a sign of life every 10) after which a server is dead.
        ping_interval: Seconds between signs of life of a session; servers drop one after 900 seconds without.

    Raises:
        ConfigurationError: An argument does not fit.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        url: str | None = None,
        env: str | None = None,
        split: str | None = None,
        reward: Literal["sum", "last"] = "sum",
        api_key: str | None = None,
        api_key_hosts: Iterable[str] = (),
        call_timeout: float = 300.0,
        setup_timeout: float = 600.0,
        silence: float = 30.0,
        ping_interval: float = 30.0,
    ) -> None:
        if reward not in ("sum", "last"):
            raise ConfigurationError(f'reward={reward!r}: expected "sum" or "last"')
        self._server = find_server(
            name,
            url,
            api_key,
            api_key_hosts,
            call_timeout=call_timeout,
            setup_timeout=setup_timeout,
            silence=silence,
            ping_interval=ping_interval,
        )
        self._env = env
        self._split = split
        self._reward: Literal["sum", "last"] = reward
        self._lock = threading.Lock()
        self._prefix: str | None = None
        self._tools: ToolList | None = None

    def __call__(self) -> ORSEnvironment:
        """Make an instance. The first time the server is asked which tools there are.

        Raises:
            ConfigurationError: The server cannot be reached, has no such environment or says nonsense.
        """
        with self._lock:
            if self._tools is None:
                self._tools = self._visit(_shared_tools)
            assert self._prefix is not None
            return ORSEnvironment(self._server, self._prefix, self._tools, self._reward)

    def tasks(self, split: str | None = None, *, indices: Iterable[int] | None = None) -> Dataset:
        """The tasks of a split.

        Args:
            split: Its name; default: the `split` given to `ORS`.
            indices: Which of them, a `range` say; default: all.

        Returns:
            One row a task: `task` (what the server knows of it, as JSON text: Arrow would change nested values),
            `split` and `index`. There is no prompt, for that comes from the server when the task is played.

        Raises:
            ConfigurationError: There is no such split or index, or the server does not answer as it should.
        """
        split = split or self._split
        wanted = None if indices is None else list(indices)
        indices, tasks = self._visit(lambda ask: _fetch(ask, split, wanted))
        return Dataset.from_dict(
            {"task": [json.dumps(task) for task in tasks], "split": [split] * len(tasks), "index": list(indices)}
        )

    def _visit(self, question: Callable[[Ask], Awaitable[Any]]) -> Any:
        """Ask the server something in a short session, from any thread."""
        loop = LoopThread()
        try:
            return loop.run(self._visiting(question))
        except EnvironmentFailure as error:
            raise ConfigurationError(f"the ORS server at {self._server.url} cannot be used: {error}") from error
        finally:
            loop.close()

    async def _visiting(self, question: Callable[[Ask], Awaitable[Any]]) -> Any:
        client = Client(self._server)
        try:
            sid = await client.create_session()
            try:
                if self._prefix is None:
                    self._prefix = await self._find_prefix(client, sid)

                async def ask(path: str, body: Any = None) -> Any:
                    path = f"{self._prefix}{path}"
                    return await (client.get(path, sid) if body is None else client.post(path, sid, body))

                return await question(ask)
            finally:
                with suppress(EnvironmentFailure):  # nothing was created in it
                    await client.post("/delete_session", sid)
        finally:
            await client.aclose()

    async def _find_prefix(self, client: Client, sid: str) -> str:
        """The environment's path. A server of the catalogue knows by the name which one is meant."""
        if self._server.deployment is not None:
            return "" if self._env is None else f"/{self._env}"
        names = await client.get("/list_environments", sid)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ProtocolError(f"/list_environments gave {reprlib.repr(names)} in place of names")
        if self._env is None and len(names) == 1:
            return f"/{names[0]}"
        if self._env is None or self._env.lower() not in names:
            raise ConfigurationError(f"env={self._env!r}: the ORS server at {self._server.url} has {sorted(names)}")
        return f"/{self._env.lower()}"


async def _shared_tools(ask: Ask) -> ToolList:
    return read_tools(await ask("/tools"), "the tools of the environment")


async def _fetch(ask: Ask, split: str | None, wanted: list[int] | None) -> tuple[Sequence[int], list[Any]]:
    """The indices and tasks that were asked for."""
    known = await ask("/splits")
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in known if isinstance(known, list)]
    if split not in names:
        raise ConfigurationError(
            f"split={split!r}: the environment has {names}; name one (ors:...#SPLIT on the command line)"
        )
    count = (await ask("/num_tasks", {"split": split}) or {}).get("num_tasks")
    if not isinstance(count, int):
        raise ProtocolError(f"the number of tasks of {split!r} is {count!r}")
    indices: Sequence[int] = range(count) if wanted is None else wanted
    if outside := [index for index in indices if index not in range(count)]:
        raise ConfigurationError(f"indices {outside[:5]} are not among the {count} tasks of the split {split!r}")
    tasks: list[Any] = []
    for run in _runs(indices):
        got = (await ask("/task_range", {"split": split, "start": run.start, "stop": run.stop}) or {}).get("tasks")
        if not isinstance(got, list) or len(got) != len(run) or not all(isinstance(task, dict) for task in got):
            raise ProtocolError(f"{len(run)} tasks were asked for, and there came {reprlib.repr(got)}")
        tasks += got
    return indices, tasks


def _runs(indices: Sequence[int]) -> Iterator[range]:
    """Cut indices into ranges that can be asked for at once.

    Example:
        >>> list(_runs([0, 1, 2, 7, 3]))
        [range(0, 3), range(7, 8), range(3, 4)]
    """
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1 or end - start == PAGE:
            yield range(indices[start], indices[end - 1] + 1)
            start = end
