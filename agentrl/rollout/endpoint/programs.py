"""Programs that play episodes themselves, as functions or as commands.

A program gets the base URL and the API key of an OpenAI-compatible endpoint, and the task. Where it comes to its own
end, it gives back a reward, fields for the reward functions, or nothing. Where it raises, it is the program that broke,
not the model that erred: `Outcome.ENV_FAILURE`, tried again and then dropped. The one exception is a program that does
not survive having reached a length limit: that was the model's doing, and the episode is truncated.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.rollout.calling import call
from agentrl.rollout.threads import Threads
from agentrl.types import Task

Program = Callable[[str, str, Task], Any]
"""`(base_url, api_key, task)`, sync or async, to a reward, a dict of fields for the reward functions, or None."""

SHOWN = 2000
"""Characters of a command's error output that its failure shows."""


@dataclass(frozen=True)
class Agent:
    """A program and how it reaches its endpoint.

    Attributes:
        program: The program.
        host: The interface that the endpoint listens on.
        port: Its port, 0 for any free one.
        url: How programs reach it, where that is not `http://host:port`.
        accept_sampling: Serve requests that ask for other sampling than the run's, with the run's; the answer's header
            `x-agentrl-ignored` names what was not followed. Else they are refused with status 400.

    Raises:
        ConfigurationError: The program cannot be called, or the extra `endpoint` is not installed.
    """

    program: Program
    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None
    accept_sampling: bool = False

    def __post_init__(self) -> None:
        if not callable(self.program):
            raise ConfigurationError(f"agent={self.program!r}: expected a function (base_url, api_key, task).")
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(f"an agent needs {error.name}: pip install 'agentrl[endpoint]'") from error

    @property
    def name(self) -> str:
        """What its rewards are called."""
        return str(getattr(self.program, "__name__", type(self.program).__name__))

    async def run(
        self, base_url: str, api_key: str, task: Task, threads: Threads
    ) -> tuple[float | None, dict[str, Any]]:
        """Run the program to its end.

        Returns:
            Its reward and its fields for the reward functions.

        Raises:
            EnvironmentFailure: It gave back something else.
        """
        verdict = await call(self.program, threads, base_url, api_key, task)
        if verdict is None:
            return None, {}
        if isinstance(verdict, int | float):
            return float(verdict), {}
        if isinstance(verdict, Mapping):
            return None, dict(verdict)
        raise EnvironmentFailure(f"the agent gave back a {type(verdict).__name__}; expected a number, a dict or None")


@dataclass(frozen=True)
class CommandResult:
    """What a command left.

    Attributes:
        output: Its standard output.
        task: What it had to do.
    """

    output: str
    task: Task


@dataclass(frozen=True)
class Command:
    """A program that runs as a process of its own for each rollout.

    It finds the endpoint in `OPENAI_BASE_URL` (and `OPENAI_API_BASE`) and `OPENAI_API_KEY`, and the task, as JSON with
    `prompt`, `columns` and `seed`, on its standard input. Status 0 is its word that it came to its end. Any other one
    is a failure of the program. It is killed, with all processes of its group, when the rollout ends before it does.

    Attributes:
        argv: The command, or a function of the task that gives it.
        reward: Makes the rewards of what it left; without it, reward functions get its output as `output`.
        env: Further environment variables.
        cwd: Where it runs.
    """

    argv: Sequence[str] | Callable[[Task], Sequence[str]]
    reward: Callable[[CommandResult], float | None] | None = None
    env: Mapping[str, str] | None = None
    cwd: str | Path | None = None

    async def __call__(self, base_url: str, api_key: str, task: Task) -> Any:
        """Run the command for one rollout.

        Raises:
            EnvironmentFailure: It cannot be started, or ends with another status than 0.
        """
        argv = self.argv(task) if callable(self.argv) else self.argv
        reach = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": api_key}
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env={**os.environ, **(self.env or {}), **reach},
                cwd=self.cwd,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFailure(f"{argv[0]!r} cannot be started: {error}") from error
        given = json.dumps({"prompt": task.prompt, "columns": task.columns, "seed": task.seed}, default=str)
        try:
            output, errors = await process.communicate(given.encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            shown = errors.decode(errors="replace")[-SHOWN:]
            raise EnvironmentFailure(f"{argv[0]!r} ended with status {process.returncode}: {shown}")
        text = output.decode(errors="replace")
        return {"output": text} if self.reward is None else self.reward(CommandResult(text, task))
