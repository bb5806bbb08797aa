"""Attempts to get out of a sandbox, or to take more than it may, on both backends. docs/sandboxes.md lists them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import socket
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentrl.envs.sandbox import ExecResult, Sandbox, SandboxFailure
from agentrl.envs.sandbox.archive import read_file, unpack
from tests.envs.sandbox.conftest import Place
from tests.waiting import LONG, eventually, wait_until

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.xdist_group("sandbox escapes")  # they count processes of the whole machine

Sh = Callable[..., ExecResult]

BOMB, DAEMON, LATE = (f"{name}-{os.getpid()}" for name in ("bomb", "daemon", "late"))
"""Marks in the command lines of processes, which are this run's own."""


def python(code: str) -> list[str]:
    return ["python3", "-c", code]


def processes(mark: str) -> list[int]:
    """Processes of the whole machine with a mark in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if any(mark in part for part in process.info["cmdline"] or ()) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found


def test_network_there_is_only_a_loopback_device_of_its_own(sh: Sh) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import os, socket
print(sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else ["lo"])
for address in [("127.0.0.1", {port}), ("1.1.1.1", 53), ("10.0.0.1", 80)]:
    try:
        socket.create_connection(address, timeout=2)
        print("connected")
    except OSError as error:
        print("refused")
print([name for _, name in socket.if_nameindex()])
"""
        words = sh(python(code)).stdout
    assert "connected" not in words
    assert "['lo']" in words.splitlines()[-1]


def test_network_abstract_sockets_of_the_host_are_out_of_reach(sh: Sh) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0agentrl-test-{os.getpid()}")
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0agentrl-test-{os.getpid()}')"
        assert "ConnectionRefusedError" in sh(python(code)).stderr


def test_host_files_are_not_there(sh: Sh, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    secret.chmod(0o644)
    for path in (
        secret,
        Path(__file__),
        Path("/proc/1/root") / str(secret)[1:],
        Path("/proc/2/root") / str(secret)[1:],
    ):
        result = sh(["cat", str(path)])
        assert result.exit_code != 0
        assert result.stdout == ""
    assert sh("ls /root /home /mnt /media 2>/dev/null").stdout.split() == ["/home:", "/root:"] or not set(
        os.listdir("/root")
    ) & set(sh("ls -A /root").stdout.split())


def test_host_files_that_only_root_may_read_stay_unread(sh: Sh) -> None:
    hidden = [path for path in ("/etc/shadow", "/etc/gshadow") if os.path.exists(path)]
    host = {path: Path(path).read_bytes() for path in hidden if os.access(path, os.R_OK)}
    for path, content in host.items():
        assert sh(["cat", path]).stdout.encode() != content or not content


def test_fork_bomb_stays_within_its_processes(place: Place) -> None:
    bomb = f"import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n# {BOMB}"

    async def run() -> int:
        async with await place.start(pids=30, cpus=0.5) as sandbox:
            running = asyncio.create_task(sandbox.exec(python(bomb), timeout=600))
            await eventually(lambda: len(processes(BOMB)) > 1)
            most = max(len(processes(BOMB)), len(processes(BOMB)))
            running.cancel()
            await asyncio.wait([running])
            return most

    assert 1 < asyncio.run(run()) <= 30
    wait_until(lambda: processes(BOMB) == [])


def test_memory_bomb_is_killed_and_named(place: Place) -> None:
    async def run() -> tuple[ExecResult, ExecResult]:
        async with await place.start(memory_mb=64) as sandbox:
            bomb = await sandbox.exec(python("x = bytearray(10**9)"), timeout=LONG)
            return bomb, await sandbox.exec("echo alive", timeout=LONG)

    bomb, after = asyncio.run(run())
    assert bomb.exit_code != 0
    assert bomb.out_of_memory
    assert not bomb.timed_out
    assert after.stdout == "alive\n"
    assert not after.out_of_memory


def test_a_plain_kill_is_not_called_out_of_memory(sh: Sh) -> None:
    result = sh("kill -9 $$")
    assert result.exit_code == 137
    assert not result.out_of_memory
    assert not result.timed_out


def test_disk_fill_ends_at_the_limit(place: Place) -> None:
    """`local` refuses the write; `docker` without quotas kills the container within seconds."""
    fill = "for i in $(seq 40); do dd if=/dev/zero of=/tmp/fill-$i bs=1M count=4 2>&1 || exit 9; sleep 0.2; done"
    fill += "; sleep 600"

    async def run() -> ExecResult:
        async with await place.start(disk_mb=24) as sandbox:
            await sandbox.exec("true", timeout=LONG)
            return await sandbox.exec(fill, timeout=600)

    if place.name == "local":
        result = asyncio.run(run())
        assert result.exit_code == 9
        assert "No space left" in result.stdout
    else:
        with pytest.raises(SandboxFailure, match="disk_mb=24"):
            asyncio.run(run())


def test_shared_memory_files_count_too(place: Place) -> None:
    async def run() -> ExecResult:
        async with await place.start(memory_mb=96) as sandbox:
            return await sandbox.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=500 2>&1", timeout=LONG)

    assert asyncio.run(run()).exit_code != 0


def test_symlinks_do_not_lead_put_out(shared: Sandbox, sh: Sh, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    sh(f"mkdir -p /workspace/p; ln -sfn {target} /workspace/p/folder; ln -sf {target}/file /workspace/p/file")
    for inside in ("p/folder/x", "p/file"):
        try:
            asyncio.run(shared.put(b"escaped", inside))
        except OSError:
            continue
    assert os.listdir(target) == []


def test_symlinks_do_not_lead_get_out(shared: Sandbox, sh: Sh, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    sh(f"mkdir -p g; ln -sf {secret} g/absolute; ln -sf ../../../../..{secret} g/relative; ln -sf {tmp_path} g/folder")
    for name in ("absolute", "relative"):
        with pytest.raises((ValueError, FileNotFoundError)):
            asyncio.run(shared.get(f"g/{name}"))
    out = tmp_path / "out"
    left_out = asyncio.run(shared.get_folder("g", out))
    assert sorted(left_out) == ["absolute", "folder", "relative"]
    assert list(out.iterdir()) == []


def test_symlinks_in_a_source_are_not_followed_here(shared: Sandbox, sh: Sh, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host secret")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "link").symlink_to(tmp_path / "secret")
    asyncio.run(shared.put(tmp_path / "source", "source"))
    assert "host secret" not in sh("cat source/link").stdout


def _tar(*members: tuple[str, bytes, str, int]) -> io.BytesIO:
    """A tar written by hand: name, type, target of a link, size of the content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind, link, size in (("top", tarfile.DIRTYPE, "", 0), *members):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size, member.mode = kind, link, size, 0o7777
            archive.addfile(member, io.BytesIO(bytes(size)))
    file.seek(0)
    return file


@pytest.mark.parametrize(
    "members",
    [
        [("top/../../evil", tarfile.REGTYPE, "", 1)],
        [("/evil", tarfile.REGTYPE, "", 1)],
        [("top/a", tarfile.SYMTYPE, "..", 0), ("top/a/evil", tarfile.REGTYPE, "", 1)],
        [("top/a", tarfile.SYMTYPE, "/", 0), ("top/a/evil", tarfile.REGTYPE, "", 1)],
        [("top/a", tarfile.LNKTYPE, "../outside", 0)],
        [("top/a", tarfile.LNKTYPE, "/etc/passwd", 0)],
        [("top/a", tarfile.CHRTYPE, "", 0), ("top/b", tarfile.FIFOTYPE, "", 0)],
    ],
)
def test_hostile_archives_write_nothing_outside(members: list, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("untouched")
    target = tmp_path / "target"
    with contextlib.suppress(ValueError):
        unpack(_tar(*members), target, "x", 1000)
    assert sorted(os.listdir(tmp_path)) == ["outside", "target"]
    assert (tmp_path / "outside").read_text() == "untouched"
    assert not Path("/evil").exists()
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target.resolve())
        assert path.is_dir() or path.is_file()


def test_hostile_archives_that_grow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes=100"):
        unpack(_tar(("top/a", tarfile.REGTYPE, "", 60), ("top/b", tarfile.REGTYPE, "", 60)), tmp_path / "t", "x", 100)
    with pytest.raises(ValueError, match="damaged"):
        read_file(io.BytesIO(b"not a tar" * 100), "x", 100)


def test_long_output_costs_no_memory_here(shared: Sandbox) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    result = asyncio.run(shared.exec("yes | head -c 200000000", timeout=LONG, max_output=1000))
    assert result.truncated
    assert len(result.stdout) < 1200
    assert "bytes left out" in result.stdout
    assert process.memory_info().rss - before < 64 * 2**20


def test_daemonised_child_ends_with_the_sandbox(place: Place) -> None:
    daemon = (
        "import os,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        f"time.sleep(3000) # {DAEMON}"
    )

    async def run() -> None:
        async with await place.start() as sandbox:
            result = await sandbox.exec([*python(daemon)], timeout=LONG)
            assert not result.timed_out
            await eventually(lambda: len(processes(DAEMON)) == 1)  # it is about to fork, and its parent to end

    asyncio.run(run())
    wait_until(lambda: processes(DAEMON) == [])


def test_daemonised_child_ends_with_its_late_command(sh: Sh) -> None:
    daemon = (
        "import os,time\nif os.fork(): time.sleep(99)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        f"time.sleep(3000) # {LATE}"
    )
    assert sh(python(daemon), timeout=0.7).timed_out
    wait_until(lambda: processes(LATE) == [])


def test_signals_do_not_reach_the_host(place: Place) -> None:
    bystander = subprocess.Popen(["sleep", "600"])

    async def run() -> int:
        async with await place.start() as sandbox:
            direct = await sandbox.exec(f"kill -9 {bystander.pid} {os.getpid()}", timeout=LONG)
            with contextlib.suppress(SandboxFailure):
                await sandbox.exec("kill -9 -1", timeout=LONG)
            return direct.exit_code

    try:
        assert asyncio.run(run()) != 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_proc_shows_no_host_process(sh: Sh) -> None:
    shown = {int(pid) for pid in sh("ls /proc | grep '^[0-9]*$'").stdout.split()}
    assert shown
    assert max(shown) < 2000
    assert len(shown) < 30
    assert "pytest" not in sh("cat /proc/[0-9]*/cmdline").stdout.replace("\0", " ").replace("grep", "")


@pytest.mark.parametrize(
    "path",
    ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sys/kernel/hostname"],
)
def test_proc_writes_are_refused(sh: Sh, path: str) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text(), socket.gethostname()
    assert sh(f"echo h > {path}").exit_code != 0
    assert (Path("/proc/sys/kernel/core_pattern").read_text(), socket.gethostname()) == before


def test_written_system_files_are_not_those_of_the_host(sh: Sh) -> None:
    name = f"agentrl-escape-{os.getpid()}"
    sh(f"for d in /usr/bin /etc /bin /lib /sys /dev /boot /; do echo x > $d/{name}; done")
    sh("echo broken > /etc/passwd; rm -rf /usr/lib/os-release")
    for folder in ("/usr/bin", "/etc", "/bin", "/lib", "/sys", "/dev", "/boot", "/"):
        assert not Path(folder, name).exists()
    assert "broken" not in Path("/etc/passwd").read_text()


@pytest.mark.parametrize("command", ["mount -t tmpfs x /mnt", "umount /proc", "umount /usr", "mknod /tmp/d b 253 0"])
def test_mounts_and_devices_cannot_be_changed(sh: Sh, command: str) -> None:
    assert sh(f"PATH=$PATH:/sbin:/usr/sbin; mkdir -p /mnt; {command}").exit_code != 0


@pytest.mark.parametrize("flags", ["0x10000000", "0x10020000", "0x00020000", "0x20000000"])
def test_new_namespaces_cannot_be_made(sh: Sh, flags: str) -> None:
    code = f"import ctypes; print(ctypes.CDLL(None, use_errno=True).unshare({flags}), ctypes.get_errno())"
    assert sh(python(code)).stdout.startswith("-1 ")


def test_there_are_no_capabilities_and_none_can_be_gained(sh: Sh) -> None:
    status = sh("grep -E '^(CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs)' /proc/self/status").stdout.split()
    assert status[1::2] == ["0" * 16] * 4 + ["1"]


def test_ptrace_of_others_is_refused(place: Place) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, 2):
    try:
        open(f"/proc/{pid}/mem", "r+b")
        print("opened")
    except OSError as error:
        pass
print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())
"""

    async def run() -> str:
        async with await place.start(user="1234") as sandbox:
            return (await sandbox.exec(python(code), timeout=LONG)).stdout

    assert asyncio.run(run()) == "-1 1\n"


def test_the_program_that_lets_commands_in_cannot_be_overwritten(shared: Sandbox, sh: Sh) -> None:
    """CVE-2019-5736: /proc/PID/exe of a process that is just entering leads to a file of the host."""
    watch = r"""
import glob, os, time
end, seen, opened = time.time() + 1.5, set(), []
own = os.path.realpath("/proc/self/exe")
while time.time() < end:
    for link in glob.glob("/proc/[0-9]*/exe"):
        try:
            target = os.readlink(link)
            seen.add(target)
            if target != own and not target.startswith("/usr"):
                os.close(os.open(link, os.O_WRONLY))
                opened.append(target)
        except OSError:
            pass
print(opened)
"""

    async def run() -> str:
        watching = asyncio.create_task(shared.exec(python(watch), timeout=LONG))
        await asyncio.sleep(0.2)
        while not watching.done():
            await shared.put(b"x" * 100_000, "big")
            await shared.get("big")
            await shared.exec("true", timeout=LONG)
        return (await watching).stdout

    assert asyncio.run(run()) == "[]\n"


def test_two_sandboxes_share_nothing(place: Place) -> None:
    async def run() -> tuple[str, str]:
        async with await place.start() as one, await place.start() as two:
            await one.exec("touch /tmp/of-one /workspace/of-one /dev/shm/of-one; sleep 3000 & echo", timeout=LONG)
            files = await two.exec("ls -A /tmp /workspace /dev/shm", timeout=LONG)
            seen = await two.exec("cat /proc/[0-9]*/cmdline", timeout=LONG)
            return files.stdout, seen.stdout

    files, seen = asyncio.run(run())
    assert "of-one" not in files
    assert "3000" not in seen


def test_nothing_of_this_module_is_left(place: Place) -> None:
    for mark in (BOMB, DAEMON, LATE):
        wait_until(lambda mark=mark: processes(mark) == [])


def test_the_documentation_lists_these_attempts() -> None:
    documented = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "sandboxes.md").read_text(encoding="utf-8")))
    here = {name for name in globals() if name.startswith("test_")}
    meta = {"test_the_documentation_lists_these_attempts", "test_nothing_of_this_module_is_left"}
    assert documented == here - meta - {"test_a_plain_kill_is_not_called_out_of_memory"}
