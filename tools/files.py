"""Looking at and editing text files of a sandbox. Paths are those inside; nothing else can be reached."""

from __future__ import annotations

from agentrl.tools.session import Place

MAX_FILE = 2**20
"""Bytes of the largest file that can be edited."""

MAX_LINES = 200
MAX_LINE = 500

WRITE = 'mkdir -p -- "$(dirname -- "$0")" && cat > "$0"'


class FileTool:
    """Views and edits files. What is wrong with a call is raised as a `ValueError` or `OSError` for the model to read.

    Args:
        sandbox: Whose files.
    """

    def __init__(self, sandbox: Place) -> None:
        self._sandbox = sandbox

    async def view(self, path: str, start: int = 1, lines: int = MAX_LINES) -> str:
        """Show lines of a text file with their numbers.

        Args:
            path: The file.
            start: The first line to show, from 1.
            lines: How many lines to show.

        Returns:
            The lines.
        """
        text = (await self._read(path)).splitlines()
        if start < 1 or lines < 1:
            raise ValueError("start and lines must be at least 1")
        if start > max(1, len(text)):
            raise ValueError(f"{path} has only {len(text)} lines")
        end = min(len(text), start - 1 + min(lines, MAX_LINES))
        shown = [f"{number:6}  {_cut(line)}" for number, line in enumerate(text[start - 1 : end], start)]
        rest = len(text) - end
        return "\n".join([*shown, *([f"[{rest} more lines]"] if rest else [])]) or "[empty file]"

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a piece of text in a file, or write a new file.

        Args:
            path: The file.
            old: The text to replace, exactly as it is in the file, where it must occur once. Empty to write a new file.
            new: The text to put in its place.

        Returns:
            What was done.
        """
        if not old:
            try:
                await self._read(path)
            except FileNotFoundError:
                await self._write(path, new)
                return f"wrote {path}"
            raise ValueError(f"{path} exists; give the text to replace in `old`")
        text = await self._read(path)
        if (count := text.count(old)) != 1:
            raise ValueError(f"`old` occurs {count} times in {path}, it must occur once; give more of its surroundings")
        await self._write(path, text.replace(old, new))
        line = text[: text.index(old)].count("\n") + 1
        return f"changed {path} at line {line}"

    async def _read(self, path: str) -> str:
        content = await self._sandbox.get(path, max_bytes=MAX_FILE)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text file") from None

    async def _write(self, path: str, text: str) -> None:
        # Not `put`: the file keeps its mode and owner, and the rights of the sandbox's user count.
        result = await self._sandbox.exec(["sh", "-c", WRITE, path], timeout=30, stdin=text.encode())
        if result.exit_code != 0:
            raise OSError(f"cannot write {path}: {result.stderr.strip() or 'it took too long'}")


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} [{len(line) - MAX_LINE} more characters]"
