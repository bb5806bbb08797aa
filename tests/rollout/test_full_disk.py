"""A file system that is full, a real one, stops a run for as long as there is no room, and damages nothing."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.journal import writer
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.reading import Records
from agentrl.rollout.limits import Limits
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Outcome, Trajectory
from tests.rollout.helpers import call, renderer, run_and_close, tasks, turn
from tests.rollout.test_journal import LongPrompt, same
from tests.waiting import LONG, wait_until

ROOT = Path(__file__).parents[2]
OWN_MOUNTS = "unshare", "--map-root-user", "--mount"
"""Runs a command that mounts what no other process sees, and that is gone with it."""


def fill(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            continue


def play(folder: Path) -> None:
    """Play eight rollouts whose journal is on a file system that is full, and make room once they wait for it."""
    writer.LONGEST_DELAY = 0.05
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("agentrl").addHandler(handler)
    journal = Journal(folder)
    journal.begin_run({})
    journal.weights()  # the file is there
    fill(folder / "ballast")
    script = [[turn(call("inc")), turn("end")]] * 8
    engine = RolloutEngine(
        ScriptedGenerator(script), renderer(), environments=LongPrompt, limits=Limits(), journal=journal
    )
    played: list[Trajectory] = []
    running = threading.Thread(target=lambda: played.extend(run_and_close(engine, tasks(8))))
    running.start()
    wait_until(lambda: any("waits for its journal" in line for line in said))
    assert running.is_alive()
    (folder / "ballast").unlink()
    running.join(LONG)
    journal.close()
    assert str(journal.path) in said[0]
    assert "make room" in said[0]
    assert "can be written again" in said[-1]
    assert [t.outcome for t in played] == [Outcome.FINISHED] * 8
    with sqlite3.connect(journal.path) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with Records(folder) as records:
        assert all(same(records.rollout(t.record).trajectory(), t) for t in played if t.record)


@pytest.mark.slow
def test_a_full_file_system_pauses_the_run_and_damages_nothing(tmp_path):
    """It waits, says where and what to do, and goes on when there is room; every turn is then in the file."""
    if shutil.which("unshare") is None or subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    script = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    code = "import pathlib, sys; from tests.rollout.test_full_disk import play; play(pathlib.Path(sys.argv[1]))"
    command = [*OWN_MOUNTS, "sh", "-c", script, "sh", tmp_path, sys.executable, code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-3000:]
