"""A shell in a sandbox that keeps its folder and variables between calls."""

from __future__ import annotations

from agentrl.tools.session import Place, Session

DRIVER = r"""
while :; do
  __code=$(cat "$0/in"; echo x)
  __code=${__code%x}
  eval "$__code" > "$0/output" 2>&1 < /dev/null
  echo "$?" > "$0/done"
done
"""


class ShellTool:
    """Runs commands in one `bash` of a sandbox.

    Args:
        sandbox: Where; it needs `bash`.
        timeout: Seconds that one call may take.
        max_output: Bytes of output that are shown: the first and the last half.
    """

    __name__ = "bash"

    def __init__(self, sandbox: Place, *, timeout: float = 60.0, max_output: int = 8192) -> None:
        self._session = Session(sandbox, ["bash", "-c", DRIVER], "the shell", timeout, max_output)

    async def __call__(self, command: str) -> str:
        """Run a command in bash. Its folder and variables stay for the next call.

        Args:
            command: The command; several lines are allowed.

        Returns:
            What it wrote, with its exit code if that is not 0.
        """
        output, status, note = await self._session.run(command)
        if status:
            note = f"exit code {status}"
        return "\n".join(part for part in (output.rstrip("\n"), f"[{note}]" if note else "") if part) or "[no output]"

    async def close(self) -> None:
        """End the shell."""
        await self._session.close()
