"""Control groups of version 2, in a folder that stands for the kernel's: none of these machines has them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.envs.sandbox.bwrap import cgroups


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the kernel makes (Documentation/admin-guide/cgroup-v2.rst), and its rmdir."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids\n")

    def mkdir(folder: str) -> None:
        os.mkdir(folder)
        for name, text in {"cgroup.procs": "", "memory.swap.max": "max\n", "memory.events": "oom_kill 0\n"}.items():
            (Path(folder) / name).write_text(text)

    monkeypatch.setattr(cgroups, "ROOT", str(tmp_path))
    monkeypatch.setattr(cgroups, "os", SimpleNamespace(**{**vars(os), "mkdir": mkdir, "rmdir": shutil.rmtree}))
    return tmp_path


def test_the_limits_of_a_group_are_written_as_documented(root: Path) -> None:
    """`cpu.max` is "quota period" in microseconds; memory is in bytes; swap is none."""
    group = cgroups.Cgroup("agentrl-1-x", cpus=0.5, memory=64 * 2**20, pids=40)
    folder = root / "agentrl-1-x"
    assert (root / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert {name: (folder / name).read_text() for name in ("cpu.max", "memory.max", "memory.swap.max", "pids.max")} == {
        "cpu.max": "50000 100000",
        "memory.max": "67108864",
        "memory.swap.max": "0",
        "pids.max": "40",
    }
    group.join()
    assert (folder / "cgroup.procs").read_text() == "0"  # the kernel takes 0 for the process that writes
    (folder / "cgroup.procs").write_text("")
    assert group.kills() == 0
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert group.kills() == 2
    group.remove()
    assert not folder.exists()


def test_groups_whose_owner_is_gone_are_removed(root: Path) -> None:
    for name in ("agentrl-1-x", "agentrl-999999999-x", "other"):
        cgroups.os.mkdir(str(root / name))
    cgroups.remove_orphans()
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"agentrl-1-x", "other"}
    cgroups.remove("agentrl-1-x")
    assert not (root / "agentrl-1-x").exists()


def test_a_group_that_stays_is_named_with_the_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that cannot be killed (waiting for a disk, say) keeps its group: the kernel refuses to remove it."""

    def busy(folder: str) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", folder)

    cgroups.os.mkdir(str(root / "agentrl-1-x"))
    monkeypatch.setattr(cgroups.os, "rmdir", busy)
    monkeypatch.setattr(cgroups, "ATTEMPTS", 2)
    cgroups.remove("agentrl-1-x")
    [record] = caplog.records
    assert str(root / "agentrl-1-x") in record.message
    assert "Device or resource busy" in record.message
