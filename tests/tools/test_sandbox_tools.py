"""The interpreter, the shell and the file tool, in real sandboxes."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.envs.sandbox import Sandbox, SandboxFailure
from agentrl.rollout.tools import Tool
from agentrl.tools import FileTool, PythonTool, ShellTool
from tests.tools.conftest import Play, player
from tests.waiting import LONG


def test_the_interpreter_keeps_its_state_and_shows_the_last_expression(play: Play) -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        python = PythonTool(sandbox)
        cells = [
            "x = 6",
            "x * 7",
            "def f():\n    return x\nprint('said')\nf()",
            "None",
            "'é'",
            "import os; os.system('echo sub')",
        ]
        answers = [await python(cell) for cell in cells]
        await python.close()
        return answers

    assert play(use) == ["[no output]", "42", "said\n6", "[no output]", "'é'", "sub\n0"]


def test_an_error_is_its_traceback_and_the_state_stays(play: Play) -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        python = PythonTool(sandbox)
        answers = [await python(cell) for cell in ("x = 1", "def f():\n    return 1 / 0\n\nf()", "x =", "x")]
        await python.close()
        return answers

    _, divided, syntax, after = play(use)
    assert divided.startswith('Traceback (most recent call last):\n  File "<input 2>", line 4')
    assert "return 1 / 0" in divided
    assert divided.endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in syntax
    assert "ast.py" not in syntax
    assert after == "1"


def test_a_late_cell_costs_the_interpreter_and_says_so(play: Play) -> None:
    async def use(sandbox: Sandbox) -> tuple[str, str, str]:
        python = PythonTool(sandbox, timeout=5.0)
        await python("x = 1")
        late = await python("import subprocess; print('begun', flush=True); subprocess.run(['sleep', '2345'])")
        after = await python("'x' in globals()")
        seen = await sandbox.exec("grep -ls '[2]345' /proc/[0-9]*/cmdline", timeout=LONG)
        await python.close()
        return late, after, seen.stdout

    late, after, seen = play(use)
    assert late == "begun\n[did not end within 5 s and was stopped; the interpreter was restarted, its state is lost]"
    assert (after, seen) == ("False", "")


@pytest.mark.parametrize(
    ("cell", "words"),
    [("exit(3)", "exit code 3"), ("import os; os.abort()", "exit code"), ("x = bytearray(10**9)", "memory")],
)
def test_a_cell_that_ends_the_interpreter_is_told(play: Play, cell: str, words: str) -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        python = PythonTool(sandbox)
        answers = [await python(cell), await python("1 + 1")]
        await python.close()
        return answers

    told, after = play(use)
    assert words in told
    assert "its state is lost" in told
    assert after == "2"


def test_long_output_is_cut_in_the_middle(play: Play) -> None:
    async def use(sandbox: Sandbox) -> str:
        python = PythonTool(sandbox, max_output=100)
        answer = await python("print('a' * 10_000 + 'z')")
        await python.close()
        return answer

    answer = play(use)
    assert "bytes left out" in answer
    assert answer.endswith("z")
    assert len(answer) < 200


def test_the_shell_keeps_folder_variables_and_functions(play: Play) -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        bash = ShellTool(sandbox)
        lines = [
            "cd /usr; X='a b'; f() { echo \"f $1\"; }",
            'pwd; echo "$X"',
            "f 1; false",
            "cat",
            "echo é; echo err >&2",
        ]
        answers = [await bash(line) for line in lines]
        await bash.close()
        return answers

    assert play(use) == ["[no output]", "/usr\na b", "f 1\n[exit code 1]", "[no output]", "é\nerr"]


def test_the_shell_survives_errors_and_tells_its_end(play: Play) -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        bash = ShellTool(sandbox, timeout=5.0)
        answers = [await bash(line) for line in ("X=1; if", "echo $X", "exit 4", "echo back", "sleep 99", "echo again")]
        await bash.close()
        return answers

    syntax, alive, ended, back, late, again = play(use)
    assert "syntax error" in syntax
    assert alive in ("1", "[no output]")
    assert ended == "[the shell ended with exit code 4; it is restarted, its state is lost]"
    assert "did not end within 5 s" in late
    assert (back, again) == ("back", "again")


def test_background_processes_neither_hold_the_shell_nor_end(play: Play) -> None:
    async def use(sandbox: Sandbox) -> tuple[str, str]:
        bash = ShellTool(sandbox)
        first = await bash("sleep 1000 & echo started")
        jobs = await bash("jobs -r | wc -l")
        await bash.close()
        return first, jobs

    first, jobs = play(use)
    assert first == "started"
    assert jobs == "1"


def test_a_cancelled_call_leaves_no_answer_for_the_next(play: Play) -> None:
    async def use(sandbox: Sandbox) -> str:
        bash = ShellTool(sandbox)
        await bash("true")
        call = asyncio.create_task(bash("sleep 600; echo stale"))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        answer = await bash("echo fresh")
        await bash.close()
        return answer

    assert play(use) == "fresh"


@pytest.mark.slow
def test_they_do_the_same_in_docker() -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        python, bash, files = PythonTool(sandbox), ShellTool(sandbox, timeout=5.0), FileTool(sandbox)
        answers = [
            await python("x = 6"),
            await python("x * 7"),
            await bash("cd /tmp; X=1"),
            await bash("pwd; echo $X; sleep 20 & true"),
            await files.edit("/tmp/new", "", "text"),
            await files.view("/tmp/new"),
            await bash("sleep 99"),
            await python("x"),
        ]
        await python.close()
        await bash.close()
        return answers

    answers = player("docker")(use)
    assert answers[1:6] == ["42", "[no output]", "/tmp\n1", "wrote /tmp/new", "     1  text"]
    assert "the shell was restarted" in answers[6]
    assert answers[7] == "6"


def test_the_end_of_the_sandbox_is_a_failure_and_not_an_answer(play: Play) -> None:
    async def use(sandbox: Sandbox) -> None:
        bash = ShellTool(sandbox)
        await bash("true")
        await sandbox.stop()
        with pytest.raises(SandboxFailure):
            await bash("true")
        await bash.close()

    play(use)


def test_files_are_viewed_and_edited(play: Play) -> None:
    async def use(sandbox: Sandbox) -> list[str]:
        files = FileTool(sandbox)
        await sandbox.put(b"#!/bin/sh\necho one\necho two\n", "run.sh")
        await sandbox.exec("chmod 700 run.sh", timeout=LONG)
        answers = [
            await files.view("run.sh"),
            await files.edit("run.sh", "echo one", "echo 1"),
            await files.view("run.sh", 2, 1),
            await files.edit("new/deep.txt", "", "text"),
            (await sandbox.exec("./run.sh; cat new/deep.txt; stat -c %a run.sh", timeout=LONG)).stdout,
        ]
        for path, old, words in [
            ("run.sh", "echo", "occurs 2 times"),
            ("run.sh", "none", "occurs 0 times"),
            ("run.sh", "", "exists"),
        ]:
            with pytest.raises(ValueError, match=words):
                await files.edit(path, old, "x")
        with pytest.raises(FileNotFoundError):
            await files.view("none.txt")
        with pytest.raises(OSError, match="proc"):
            await files.edit("/proc/none/x", "", "x")
        await sandbox.put(b"\xff\xfe\0", "binary")
        with pytest.raises(ValueError, match="no text file"):
            await files.view("binary")
        return answers

    shown, edited, one, wrote, ran = play(use)
    assert shown.splitlines()[1] == "     2  echo one"
    assert edited == "changed run.sh at line 2"
    assert one == "     2  echo 1\n[1 more lines]"
    assert wrote == "wrote new/deep.txt"
    assert ran == "1\ntwo\ntext700\n"


def test_they_are_tools_with_schemas() -> None:
    class Nowhere:
        pass

    nowhere: Sandbox = Nowhere()  # type: ignore[assignment]
    files = FileTool(nowhere)
    tools = [Tool.from_function(f) for f in (PythonTool(nowhere), ShellTool(nowhere), files.view, files.edit)]
    assert [tool.name for tool in tools] == ["python", "bash", "view", "edit"]
    assert [tool.schema["function"]["parameters"]["required"] for tool in tools] == [
        ["code"],
        ["command"],
        ["path"],
        ["path", "old", "new"],
    ]
