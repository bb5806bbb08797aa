"""A Python interpreter in a sandbox that keeps its variables between calls."""

from __future__ import annotations

from agentrl.tools.session import Place, Session

DRIVER = r"""
import ast, linecache, os, sys, traceback, types
folder, count = sys.argv[1], 0
main = types.ModuleType("__main__")
sys.modules["__main__"], sys.argv = main, [""]
while True:
    with open(folder + "/in", encoding="utf-8", errors="surrogateescape") as file:
        code = file.read()
    output = os.open(folder + "/output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    status, count = 0, count + 1
    name = "<input %d>" % count
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        body = ast.parse(code, name).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), main.__dict__)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), main.__dict__)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        status, trace = 1, error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    sys.stdout.flush()
    with open(folder + "/done", "w") as file:
        file.write("%d\n" % status)
"""
"""Shows the traceback from where the code begins; its names are those of `__main__`, so that pickling finds them."""


class PythonTool:
    """Runs Python code in a sandbox, cell by cell, as a notebook does.

    Args:
        sandbox: Where; it needs `python3`.
        timeout: Seconds that one call may take.
        max_output: Bytes of output that are shown: the first and the last half.

    Example:
        >>> async with await LocalBackend().start(SandboxSpec()) as sandbox:  # doctest: +SKIP
        ...     python = PythonTool(sandbox)
        ...     await python("x = 6")
        ...     print(await python("x * 7"))
        42
    """

    __name__ = "python"

    def __init__(self, sandbox: Place, *, timeout: float = 30.0, max_output: int = 8192) -> None:
        self._session = Session(sandbox, ["python3", "-c", DRIVER], "the interpreter", timeout, max_output)

    async def __call__(self, code: str) -> str:
        """Run Python code. Variables and imports stay for the next call; the value of the last expression is shown.

        Args:
            code: The code.

        Returns:
            What the code wrote, and the value of its last expression or the traceback.
        """
        output, _, note = await self._session.run(code)
        return "\n".join(part for part in (output.rstrip("\n"), f"[{note}]" if note else "") if part) or "[no output]"

    async def close(self) -> None:
        """End the interpreter."""
        await self._session.close()
