"""A program that stays in a sandbox and keeps its state between calls: the part that shell and interpreter share.

The program reads code from a pipe in the sandbox, runs it with its output going to a file, and writes how it ended to a
second pipe. Each call is one command that feeds the one, waits for the other and shows the file, so a deadline, a limit
on output and the end of the sandbox are those of `Sandbox.exec`. A call that is late costs the program, with everything
that it started, and so does code that ends it; the next call starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

FOREVER = 7 * 24 * 3600.0

MAKE = 'umask 077; folder=$(mktemp -d /tmp/session-XXXXXX) && mkfifo "$folder/in" "$folder/done" && echo "$folder"'
CALL = 'cat > "$0/in" && read -r status < "$0/done" && cat "$0/output" && exit "$status"'
SHOW = 'cat "$0/output"'


class Place(Protocol):
    """What tools need of a sandbox (`agentrl.envs.sandbox.Sandbox` has it)."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,  # noqa: ASYNC109
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = ...,
    ) -> Any:
        """Run a command; gives an `ExecResult`."""

    async def get(self, path: str, *, max_bytes: int = ...) -> bytes:
        """Read a file."""


class Answer(NamedTuple):
    """What came of a piece of code.

    Attributes:
        output: What it wrote.
        status: Its exit status; None if the program did not live to tell it.
        note: What happened to the program, "" if it goes on.
    """

    output: str
    status: int | None
    note: str


class Session:
    """A program in a sandbox.

    Args:
        sandbox: Where it runs.
        program: How it is started; the folder of its pipes is added as the last argument.
        name: What it is called in notes.
        timeout: Seconds that a piece of code may take.
        max_output: Bytes of output that are kept.
    """

    def __init__(self, sandbox: Place, program: Sequence[str], name: str, timeout: float, max_output: int) -> None:
        self._sandbox = sandbox
        self._program = program
        self._name = name
        self._timeout = timeout
        self._max_output = max_output
        self._folder = ""
        self._running: asyncio.Task[Any] | None = None
        self._turn: asyncio.Lock = asyncio.Lock()

    async def run(self, code: str) -> Answer:
        """Run a piece of code; calls wait for each other.

        Raises:
            SandboxFailure: The sandbox is gone.
        """
        async with self._turn:
            if self._running is None:
                await self._start()
            assert self._running is not None
            call = asyncio.create_task(self._call(CALL, self._timeout, code.encode(errors="surrogateescape")))
            try:
                await asyncio.wait([call, self._running], return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    return await self._answer(call.result())
                return await self._ended()
            except BaseException:
                await self.close()  # the code may still be running: nobody will ask how it ended
                raise
            finally:
                await _cancel(call)

    async def close(self) -> None:
        """End the program."""
        running, self._running = self._running, None
        if running is not None:
            await _cancel(running)

    async def _start(self) -> None:
        made = await self._sandbox.exec(MAKE, timeout=30)
        if made.exit_code != 0:
            raise RuntimeError(
                f"{self._name} cannot be started in this sandbox: {made.stderr.strip() or 'mkfifo failed'}"
            )
        self._folder = made.stdout.strip()
        self._running = asyncio.create_task(self._sandbox.exec([*self._program, self._folder], timeout=FOREVER))

    async def _call(self, script: str, seconds: float, stdin: bytes | None = None) -> Any:
        command = ["sh", "-c", script, self._folder]
        return await self._sandbox.exec(command, timeout=seconds, stdin=stdin, max_output=self._max_output)

    async def _answer(self, result: Any) -> Answer:
        if not result.timed_out:
            return Answer(result.stdout, result.exit_code, "")
        shown = await self._call(SHOW, 10)
        await self.close()
        lost = f"{self._name} was restarted, its state is lost"
        return Answer(shown.stdout, None, f"did not end within {self._timeout:g} s and was stopped; {lost}")

    async def _ended(self) -> Answer:
        """The program ended while code ran in it."""
        assert self._running is not None
        result = self._running.result()  # raises if the sandbox is gone
        self._running = None
        shown = await self._call(SHOW, 10)
        words = shown.stdout + (result.stderr if result.exit_code in (126, 127) else "")
        why = "ran out of memory" if result.out_of_memory else f"ended with exit code {result.exit_code}"
        return Answer(words, None, f"{self._name} {why}; it is restarted, its state is lost")


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel and wait for the end, which leaves nothing of its command in the sandbox."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
