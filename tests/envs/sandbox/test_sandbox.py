"""What a sandbox does, on both backends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.envs.sandbox import ExecResult, Sandbox, SandboxFailure, SandboxSpec
from agentrl.errors import ConfigurationError, EnvironmentFailure
from tests.envs.sandbox.conftest import Place
from tests.waiting import LONG

Sh = Callable[..., ExecResult]


def test_a_command_gives_its_exit_code_and_both_streams(sh: Sh) -> None:
    result = sh("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.ok
    assert not result.timed_out


def test_a_program_gets_its_arguments_as_they_are(sh: Sh) -> None:
    assert sh(["printf", "%s|", "a b", "$HOME", "é\n"]).stdout == "a b|$HOME|é\n|"


def test_working_folder_environment_and_input_arrive(sh: Sh) -> None:
    assert sh("pwd; echo $X; cat", cwd="/usr", env={"X": "1"}, stdin=b"in").stdout == "/usr\n1\nin"
    assert sh("pwd; cat").stdout == "/workspace\n"


@pytest.mark.parametrize("command", [["no-such-program"], "no-such-program"])
def test_a_missing_program_is_the_commands_failure(sh: Sh, command: str) -> None:
    result = sh(command)
    assert result.exit_code in (126, 127)
    assert "no-such-program" in result.stdout + result.stderr


def test_a_missing_folder_is_the_commands_failure(sh: Sh) -> None:
    assert sh("true", cwd="/no/such").exit_code in (126, 127)


def test_large_input_and_output_pass_at_once(sh: Sh) -> None:
    data = bytes(range(32, 127)) * 10_000
    result = sh("cat", stdin=data, max_output=2 * len(data))
    assert result.stdout.encode() == data


def test_a_late_command_is_killed_with_what_it_started(sh: Sh) -> None:
    result = sh("echo begun; sleep 4321 & setsid sleep 4321 & sleep 4321", timeout=5)
    assert result.timed_out
    assert not result.out_of_memory
    assert result.stdout == "begun\n"
    assert sh("grep -ls '[4]321' /proc/[0-9]*/cmdline").stdout == ""


def test_a_cancelled_exec_kills_its_command(shared: Sandbox, sh: Sh) -> None:
    look = "grep -ls '[5]432' /proc/[0-9]*/cmdline"

    async def cancel() -> None:
        running = asyncio.create_task(shared.exec("sleep 5432", timeout=600))
        while not (await shared.exec(look, timeout=LONG)).stdout:
            assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert sh(look).stdout == ""


def test_commands_run_side_by_side(shared: Sandbox) -> None:
    async def both() -> list[ExecResult]:
        wait = "touch {0}; while [ ! -e {1} ]; do sleep 0.05; done"
        calls = [shared.exec(wait.format(*pair), timeout=LONG) for pair in (("one", "two"), ("two", "one"))]
        return await asyncio.gather(*calls)

    assert all(result.ok for result in asyncio.run(both()))


def test_what_goes_on_in_the_background_does_not_hold_the_answer(sh: Sh) -> None:
    result = sh("sleep 1000 & echo told")
    assert (result.stdout, result.timed_out) == ("told\n", False)


def test_files_go_in_and_come_out(shared: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "script.sh").write_text("#!/bin/sh\necho ran")
    (folder / "deep" / "script.sh").chmod(0o755)

    async def round_trip() -> None:
        await shared.put(b"\0binary", "a/new/folder/file.bin")
        assert await shared.get("/workspace/a/new/folder/file.bin") == b"\0binary"
        await shared.put(folder, "/srv/there")
        assert (await shared.exec(["/srv/there/deep/script.sh"], timeout=LONG)).stdout == "ran\n"
        assert await shared.get_folder("/srv/there", tmp_path / "out") == []

    asyncio.run(round_trip())
    assert (tmp_path / "out" / "deep" / "script.sh").read_text() == "#!/bin/sh\necho ran"
    assert (tmp_path / "out" / "deep" / "script.sh").stat().st_mode & 0o777 == 0o755


def test_what_cannot_be_read_says_so(shared: Sandbox, sh: Sh, tmp_path: Path) -> None:
    sh("mkdir -p folder; echo x > file; mkfifo pipe; truncate -s 1T sparse")
    for path, error in [("none", FileNotFoundError), ("folder", IsADirectoryError), ("pipe", ValueError)]:
        with pytest.raises(error):
            asyncio.run(shared.get(path))
    with pytest.raises(NotADirectoryError):
        asyncio.run(shared.get_folder("file", tmp_path / "out"))
    with pytest.raises(ValueError, match="max_bytes=1000"):
        asyncio.run(shared.get("sparse", max_bytes=1000))


def test_writing_where_it_is_not_possible_is_an_os_error(shared: Sandbox) -> None:
    with pytest.raises(OSError, match="/proc"):
        asyncio.run(shared.put(b"x", "/proc/no/such/file"))


def test_commands_run_as_another_user(sh: Sh) -> None:
    assert sh("id -u; id -g; touch /usr/mine", user="1234").stdout == "1234\n0\n"
    assert "root" in sh("id -un", user="root").stdout


def test_a_sandbox_of_another_user_owns_its_folder_and_files(place: Place) -> None:
    async def run() -> str:
        async with await place.start(user="1234", workdir="/home/me/work") as sandbox:
            await sandbox.put(b"x", "given")
            return (await sandbox.exec("id -u; echo y > made; rm given && echo gone", timeout=LONG)).stdout

    assert asyncio.run(run()) == "1234\ngone\n"


def test_after_its_end_a_sandbox_is_a_failure_of_the_environment(place: Place) -> None:
    async def run() -> None:
        sandbox = await place.start()
        await sandbox.exec("kill -9 -1", timeout=LONG)
        async with asyncio.timeout(LONG):
            while True:
                await sandbox.exec("true", timeout=LONG)
                await asyncio.sleep(0.05)

    with pytest.raises(SandboxFailure, match="is gone") as caught:
        asyncio.run(run())
    assert isinstance(caught.value, EnvironmentFailure)


def test_a_stopped_sandbox_says_so_and_stops_twice(place: Place) -> None:
    async def run() -> None:
        sandbox = await place.start()
        await sandbox.stop()
        await sandbox.stop()
        await sandbox.exec("true", timeout=LONG)

    with pytest.raises(SandboxFailure, match="was stopped"):
        asyncio.run(run())


def test_processor_time_is_limited(place: Place) -> None:
    async def cost() -> str:
        async with await place.start(cpus=0.2) as sandbox:
            burn = "import os,time\nend = time.time() + 1\nwhile time.time() < end: pass\nprint(sum(os.times()[:2]))"
            return (await sandbox.exec(["python3", "-c", burn], timeout=LONG)).stdout

    assert float(asyncio.run(cost())) < 0.6


def test_commands_that_cannot_be_passed_are_refused(shared: Sandbox) -> None:
    with pytest.raises(ValueError, match="NUL"):
        asyncio.run(shared.exec("a\0b", timeout=1))
    with pytest.raises(ValueError, match="write a file"):
        asyncio.run(shared.exec("x" * 200_000, timeout=1))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"image": "a", "rootfs": Path("b")}, "image and rootfs"),
        ({"memory_mb": 1}, "memory_mb=1"),
        ({"cpus": 0}, "cpus=0"),
        ({"cpus": float("nan")}, "cpus=nan"),
        ({"workdir": "here"}, "workdir='here'"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(wanted: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SandboxSpec(**wanted)


def test_a_backend_refuses_what_it_cannot_use(place: Place) -> None:
    spec = SandboxSpec(rootfs=Path("/")) if place.name == "docker" else SandboxSpec(image="x")
    with pytest.raises(ConfigurationError, match="image"):
        asyncio.run(place.backend.start(spec))


def test_a_failing_read_of_the_source_is_told(shared: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(shared.put(tmp_path / "none", "x"))
    assert asyncio.run(shared.exec("true", timeout=LONG)).ok
