"""What only one backend has: images and snapshots; root filesystems, sandboxes without root, control groups."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import agentrl
from agentrl.envs.sandbox import DockerBackend, LocalBackend, SandboxFailure, SandboxPool, SandboxSpec
from agentrl.envs.sandbox.docker_images import base_images, built_name
from agentrl.errors import ConfigurationError
from tests.envs.sandbox.conftest import IMAGE, docker_backend, local_backend, missing
from tests.waiting import LONG


@pytest.fixture(scope="module")
def docker() -> DockerBackend:
    return docker_backend()


@pytest.fixture
def local() -> LocalBackend:
    return local_backend()


# docker -------------------------------------------------------------------------------------------------------------


def test_no_engine_says_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match=r"apt install docker\.io"):
        DockerBackend("unix:///nowhere/docker.sock")


@pytest.mark.slow
def test_a_missing_image_is_not_pulled(docker: DockerBackend) -> None:
    spec = SandboxSpec(image="no-such-image:1")
    with pytest.raises(ConfigurationError, match="docker pull no-such-image:1"):
        asyncio.run(docker.start(spec))
    with pytest.raises(ConfigurationError, match="docker pull no-such-image:1"):
        SandboxPool(docker, spec)


@pytest.mark.slow
def test_a_dockerfile_is_built_once_and_its_bases_are_not_pulled(docker: DockerBackend, tmp_path: Path) -> None:
    """G10: an entrypoint of the image's own does not end the container."""
    own = 'ENTRYPOINT ["/bin/false"]\nCMD ["ends"]\n'
    (tmp_path / "Dockerfile").write_text(
        f"ARG BASE={IMAGE}\nFROM $BASE\nCOPY given /given\nRUN echo built > /built\n{own}"
    )
    (tmp_path / "given").write_text(str(os.getpid()))
    spec = SandboxSpec(dockerfile=tmp_path)

    async def look() -> str:
        async with await docker.start(spec) as one, await docker.start(spec) as two:
            assert (await two.exec("cat /built", timeout=LONG)).stdout == "built\n"
            return (await one.exec("cat /given /built", timeout=LONG)).stdout

    name = built_name(tmp_path)
    try:
        assert asyncio.run(look()) == f"{os.getpid()}built\n"
        assert [name in image.tags for image in docker.client.images.list("agentrl-build")].count(True) == 1
    finally:
        docker.client.images.remove(name, force=True)
    (tmp_path / "Dockerfile").write_text("FROM no-such-image:1\n")
    with pytest.raises(ConfigurationError, match="no-such-image:1"):
        asyncio.run(docker.start(spec))
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo why && false\n")
    with pytest.raises(ConfigurationError, match="why"):
        asyncio.run(docker.start(spec))
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN for i in $(seq 60); do echo $i; sleep 1; done\n")
    with pytest.raises(SandboxFailure, match="build_timeout=1"):
        asyncio.run(docker.start(SandboxSpec(dockerfile=tmp_path, build_timeout=1)))


def test_the_bases_of_a_dockerfile_are_found(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(
        "# FROM comment\nARG V=3\nFROM --platform=linux/amd64 a:${V} AS one\nfrom scratch\nFROM One as two\nFROM b\n"
    )
    assert base_images(file) == ["a:3", "b"]
    file.write_text("ARG V\nFROM a:$V\n")
    with pytest.raises(ConfigurationError, match="default for ARG"):
        base_images(file)
    with pytest.raises(ConfigurationError, match="there is no"):
        base_images(tmp_path / "none" / "Dockerfile")


@pytest.mark.slow
def test_a_snapshot_starts_with_the_files_as_they_were(docker: DockerBackend) -> None:
    async def run() -> tuple[str, SandboxSpec]:
        async with await docker.start(SandboxSpec(image=IMAGE)) as first:
            await first.exec("echo 1 > /workspace/state", timeout=LONG)
            spec = await first.snapshot()
            await first.exec("echo 2 > /workspace/state", timeout=LONG)
            async with await docker.start(spec) as second:
                return (await second.exec("cat /workspace/state", timeout=LONG)).stdout, spec

    state, spec = asyncio.run(run())
    assert state == "1\n"
    docker.client.images.remove(spec.image, force=True)


@pytest.mark.slow
def test_root_keeps_the_capabilities_that_the_spec_names(docker: DockerBackend) -> None:
    async def run(*kept: str) -> int:
        async with await docker.start(SandboxSpec(image=IMAGE, capabilities=kept)) as sandbox:
            await sandbox.exec("mkdir -m 777 /t; touch /t/f", timeout=LONG)
            return (await sandbox.exec("chown 5 /t/f", timeout=LONG)).exit_code

    assert asyncio.run(run()) != 0
    assert asyncio.run(run("CHOWN")) == 0


# local --------------------------------------------------------------------------------------------------------------


def test_no_bubblewrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="apt install bubblewrap"):
        LocalBackend()


def test_visible_folders_can_be_read_only(local: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("shown")
    tmp_path.chmod(0o777)

    async def run() -> tuple[str, int]:
        async with await LocalBackend(visible=[tmp_path]).start(SandboxSpec()) as sandbox:
            shown = await sandbox.exec(f"cat {tmp_path}/data", timeout=LONG)
            return shown.stdout, (await sandbox.exec(f"touch {tmp_path}/new", timeout=LONG)).exit_code

    shown, code = asyncio.run(run())
    assert shown == "shown"
    assert code != 0
    assert os.listdir(tmp_path) == ["data"]


def test_root_keeps_named_capabilities_over_what_is_its_own(local: LocalBackend) -> None:
    async def run(*kept: str) -> tuple[int, int]:
        async with await local.start(SandboxSpec(capabilities=kept)) as sandbox:
            own = await sandbox.exec("touch f; chown 5 f", timeout=LONG)
            hosts = await sandbox.exec("chown 5 /etc/passwd", timeout=LONG)
            return own.exit_code, hosts.exit_code

    if not local.has_cgroups:
        pytest.skip("needs root")
    own, hosts = asyncio.run(run())
    assert own != 0
    assert hosts != 0
    own, hosts = asyncio.run(run("CHOWN"))
    assert own == 0
    assert hosts != 0


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root filesystem as a tar: what CI made, or busybox."""
    if path := os.environ.get("AGENTRL_ROOTFS"):
        return Path(path)
    busybox = shutil.which("busybox")
    if busybox is None or b"dynamically" in subprocess.run(["file", busybox], capture_output=True, check=False).stdout:
        missing("there is no root filesystem: neither AGENTRL_ROOTFS nor a static busybox")
    tar = tmp_path_factory.mktemp("rootfs") / "root.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add(str(busybox), "bin/busybox")
    return tar


def test_a_root_filesystem_belongs_to_root_inside_and_stays_as_it_is(
    local: LocalBackend, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = SandboxSpec(rootfs=rootfs)
    change = "stat -c %U /usr/bin/env; echo x >> /etc/passwd && rm -r /usr/share/* && echo changed; ls /usr/share"

    async def run() -> list[str]:
        outputs = []
        for command in (change, "grep -c '^x$' /etc/passwd; ls /usr/share | head -1"):
            async with await local.start(spec) as sandbox:
                outputs.append((await sandbox.exec(command, timeout=LONG)).stdout)
        return outputs

    first, second = asyncio.run(run())
    assert first == "root\nchanged\n"
    assert second.splitlines()[0] == "0"
    assert len(second.splitlines()) == 2


def test_a_damaged_root_filesystem_is_refused(local: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(ConfigurationError, match=r"bad\.tar"):
        asyncio.run(local.start(SandboxSpec(rootfs=tmp_path / "bad.tar")))
    with pytest.raises(ConfigurationError, match="no rootfs"):
        asyncio.run(local.start(SandboxSpec(rootfs=tmp_path / "none.tar")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SandboxFailure, match="execvp sh"):
        asyncio.run(local.start(SandboxSpec(rootfs=tmp_path / "empty")))


ROOTLESS = """
import sys, types
sys.path[:0] = {paths!r}
for name, folder in {packages!r}.items():
    module = types.ModuleType(name)
    module.__path__ = [folder]
    sys.modules[name] = module
import asyncio, glob, os, time
from agentrl.envs.sandbox.base import SandboxSpec
from agentrl.envs.sandbox.local import LocalBackend

async def main():
    backend = LocalBackend()
    assert not backend.has_cgroups
    async with await backend.start(SandboxSpec(memory_mb=256, pids=30, disk_mb=20)) as sandbox:
        async def sh(command, **options):
            return await sandbox.exec(command, **{{"timeout": 60, **options}})
        assert (await sh("id -u; echo é")).stdout == "0\\né\\n"
        await sandbox.put(b"x", "a/b")
        assert await sandbox.get("a/b") == b"x"
        late = await sh("setsid sleep 4444 & sleep 4444", timeout=0.5)
        assert late.timed_out
        assert (await sh("grep -ls '[4]444' /proc/[0-9]*/cmdline")).stdout == ""
        bomb = await sh("python3 -c 'x = bytearray(10**9)'")
        assert "MemoryError" in bomb.stderr, bomb
        full = await sh("dd if=/dev/zero of=/tmp/x bs=1M count=50 2>&1")
        assert "No space left" in full.stdout, full
        assert (await sh("unshare -U true")).exit_code != 0
        assert (await sh("ls /etc/ssl/private /root/.ssh 2>&1; cat /etc/shadow")).exit_code != 0
        # What `put` and `get` run inside is this interpreter: nobody may write to its file through /proc.
        others = [int(p) for p in os.listdir("/proc") if p.isdecimal() and int(p) != os.getpid()]
        inner = [pid for pid in others if '"entered": true' in cmdline(pid)]
        assert len(inner) == 1, inner
        for line in open(f"/proc/{{inner[0]}}/mountinfo"):
            fields = line.split()
            if fields[4] in ("/", "/usr", "/proc", "/tmp"):
                assert "ro" in fields[5].split(","), line
        forks = await sh("for i in $(seq 60); do sleep 5 & done 2>&1; wait")
        assert "fork" in forks.stdout + forks.stderr, forks
    print("all well")

def cmdline(pid):
    try:
        return open(f"/proc/{{pid}}/cmdline").read()
    except OSError:
        return ""

asyncio.run(main())
"""


@pytest.fixture
def copied() -> Iterator[Path]:
    """The package where anybody may read it, without what only its other parts need."""
    with tempfile.TemporaryDirectory(prefix="agentrl-rootless-") as name:
        folder = Path(name)
        root = Path(agentrl.__file__).parents[1]
        shutil.copytree(root / "agentrl", folder / "agentrl")
        shutil.copytree(root / "envs", folder / "envs")
        shutil.copytree(Path(psutil.__file__).parent, folder / "psutil")
        folder.chmod(0o755)
        yield folder


def test_without_root_it_works_and_contains_as_well(local: LocalBackend, copied: Path) -> None:
    """As an ordinary user: as root, another one is played by the system's own Python, which anybody may run."""
    packages = {"agentrl.envs": str(copied / "envs"), "agentrl.envs.sandbox": str(copied / "envs" / "sandbox")}
    code = ROOTLESS.format(paths=[str(copied)], packages=packages)
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:
        system = "/usr/bin/python3"
        if not os.path.exists(system) or not shutil.which("setpriv"):
            missing("playing an ordinary user needs setpriv and the system's python3")
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", system, "-c", code]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=600, check=False)
    assert result.stdout == "all well\n", result.stderr[-3000:]


def test_parent_limits_hold_for_groups(local: LocalBackend) -> None:
    """A sandbox's group lies below this process's own: what holds for the trainer holds for it."""
    if not local.has_cgroups:
        pytest.skip("there are no control groups here")
    from agentrl.envs.sandbox.bwrap import cgroups

    group = cgroups.Cgroup(f"{cgroups.PREFIX}{os.getpid()}-test", 1.0, 2**26, 20)
    try:
        own = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for folder in group.folders:
            assert any(path in folder for _, _, path in own)
    finally:
        group.remove()
    assert not any(os.path.exists(folder) for folder in group.folders)


def test_groups_of_processes_that_are_gone_are_removed(local: LocalBackend) -> None:
    if not local.has_cgroups:
        pytest.skip("there are no control groups here")
    from agentrl.envs.sandbox.bwrap import cgroups

    gone = subprocess.Popen(["true"])
    gone.wait()
    group = cgroups.Cgroup(f"{cgroups.PREFIX}{gone.pid}-test", 1.0, 2**26, 20)
    LocalBackend()
    assert not any(os.path.exists(folder) for folder in group.folders)
