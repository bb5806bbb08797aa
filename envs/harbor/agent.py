"""The agent's side of a task: the tools that a model acts with, in the sandbox, as the task's user."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrl.envs.harbor.sandboxes import Home
from agentrl.rollout.tools import Tool
from agentrl.tools import PythonTool, ShellTool

TOOLS = ("bash", "python", "notes", "submit")
"""What the model can be given."""

MAX_NOTES = 8000


class Agent:
    """Tools with state: one shell, one interpreter, one page of notes.

    Args:
        timeout: Seconds of one call of `bash` or `python`.
        max_output: Bytes of output that one call shows.
    """

    def __init__(self, timeout: float, max_output: int) -> None:
        self._timeout = timeout
        self._max_output = max_output
        self._home: Home | None = None
        self._sessions: dict[str, ShellTool | PythonTool] = {}
        self._notes = ""

    def schemas(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Descriptions of tools, each once."""
        return [Tool.from_function(getattr(self, name)).schema for name in dict.fromkeys(names)]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool."""
        return str(await getattr(self, name)(**arguments))

    async def enter(self, home: Home) -> None:
        """Work in a sandbox as a user from now on. What runs there goes on, unless the user is another one."""
        if self._home is None or (self._home.sandbox, self._home.user) != (home.sandbox, home.user):
            await self.leave()
            self._home = home
            self._sessions = {
                "bash": ShellTool(home, timeout=self._timeout, max_output=self._max_output),
                "python": PythonTool(home, timeout=self._timeout, max_output=self._max_output),
            }

    async def leave(self) -> None:
        """End shell and interpreter."""
        sessions, self._sessions, self._home = self._sessions, {}, None
        for session in sessions.values():
            await session.close()

    def forget(self) -> None:
        """Begin with an empty page."""
        self._notes = ""

    async def bash(self, command: str) -> str:
        """Run a command in bash. Its folder and variables stay for the next call.

        Args:
            command: The command; several lines are allowed.

        Returns:
            What it wrote, with its exit code if that is not 0.
        """
        return await self._sessions["bash"](command)

    async def python(self, code: str) -> str:
        """Run Python code. Variables and imports stay for the next call; the value of the last expression is shown.

        Args:
            code: The code.

        Returns:
            What the code wrote, and the value of its last expression or the traceback.
        """
        return await self._sessions["python"](code)

    async def notes(self, text: str = "") -> str:
        """Add to your notes of this task, and read all of them.

        Args:
            text: What to add; empty to read only.

        Returns:
            All notes.
        """
        notes = f"{self._notes}\n{text}".strip()
        if len(notes) > MAX_NOTES:
            raise ValueError(f"the notes would have {len(notes)} characters, at most {MAX_NOTES} are kept")
        self._notes = notes
        return notes or "[no notes]"

    async def submit(self) -> str:
        """Say that this part of the task is done. It is checked then, and cannot be changed any more.

        Returns:
            The next part of the task, if there is one.
        """
        raise NotImplementedError("the environment does this")
