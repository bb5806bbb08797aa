"""Environments whose rollouts have a sandbox each.

Plain functions are shared by all rollouts, so a shell or an interpreter with state cannot be one: it is a method of an
environment, of which each rollout has an instance of its own.
"""

from __future__ import annotations

from typing import Any

from agentrl.envs.sandbox.base import Sandbox
from agentrl.envs.sandbox.pool import SandboxPool
from agentrl.errors import EnvironmentFailure
from agentrl.tools import FileTool, PythonTool, ShellTool


class SandboxEnvironment:
    """Gives the model a sandbox and the tools `bash`, `python`, `view` and `edit`.

    Derive from it: extend `reset` to put a task's files into `self.sandbox`, and write `get_reward` to look at what
    became of them. A tool that is not wanted is set to None in the class (`python = None`).

    Args:
        pool: Where the sandboxes come from; one pool for all instances.
        timeout: Seconds that one call of `bash` or `python` may take.
        max_output: Bytes of output that one call shows.
    """

    def __init__(self, pool: SandboxPool, *, timeout: float = 60.0, max_output: int = 8192) -> None:
        self._pool = pool
        self._timeout = timeout
        self._max_output = max_output
        self._sandbox: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The rollout's sandbox."""
        if self._sandbox is None:
            raise EnvironmentFailure(
                f"{type(self).__name__} has no sandbox; a `reset` of yours must await super().reset()"
            )
        return self._sandbox

    async def reset(self, **columns: Any) -> Any:
        """Take a fresh sandbox; the last one is stopped."""
        await self.close()
        self._sandbox = sandbox = await self._pool.take()
        self._shell = ShellTool(sandbox, timeout=self._timeout, max_output=self._max_output)
        self._python = PythonTool(sandbox, timeout=self._timeout, max_output=self._max_output)
        self._files = FileTool(sandbox)

    async def close(self) -> None:
        """Stop the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            try:
                await self._shell.close()
                await self._python.close()
            finally:
                await self._pool.give_back(sandbox)

    async def bash(self, command: str) -> str:
        """Run a command in bash. Its folder and variables stay for the next call.

        Args:
            command: The command; several lines are allowed.

        Returns:
            What it wrote, with its exit code if that is not 0.
        """
        return await self._shell(command)

    async def python(self, code: str) -> str:
        """Run Python code. Variables and imports stay for the next call; the value of the last expression is shown.

        Args:
            code: The code.

        Returns:
            What the code wrote, and the value of its last expression or the traceback.
        """
        return await self._python(code)

    async def view(self, path: str, start: int = 1, lines: int = 200) -> str:
        """Show lines of a text file with their numbers.

        Args:
            path: The file.
            start: The first line to show, from 1.
            lines: How many lines to show.

        Returns:
            The lines.
        """
        return await self._files.view(path, start, lines)

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a piece of text in a file, or write a new file.

        Args:
            path: The file.
            old: The text to replace, exactly as it is in the file, where it must occur once. Empty to write a new file.
            new: The text to put in its place.

        Returns:
            What was done.
        """
        return await self._files.edit(path, old, new)
