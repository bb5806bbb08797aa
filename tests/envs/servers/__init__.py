"""Real servers for tests: other people's software, in a venv of its own, in processes that can be stopped and killed.

`make servers` makes the venv. Importing such a server takes seconds, so a nursery process imports it once and forks a
server whenever a test asks for one; a fork is ready at once and is a process like any other. All of them end with the
test process, whatever happens to it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

OPENENV = pytest.mark.xdist_group("openenv")
"""Tests that start such servers run in one worker: importing them takes longer than most tests."""


def servers_python() -> str:
    """The interpreter that has the servers.

    Where there is none, the test is skipped; not so in CI, whose `make servers` should have made it.
    """
    python = os.environ.get("AGENTRL_SERVERS_PYTHON", str(ROOT / ".venv-servers" / "bin" / "python"))
    if not Path(python).exists():
        missing = f"no real servers to test with: {python} is not there; run `make servers` (AGENTRL_SERVERS_PYTHON)"
        (pytest.fail if os.environ.get("AGENTRL_REQUIRE_SERVICES") == "1" else pytest.skip)(missing)
    return python


@dataclass
class ServerProcess:
    """One server: a process and the port it listens at."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lives(self) -> bool:
        return psutil.pid_exists(self.pid)  # a zombie has threads that are still to die, and its sockets with them

    def pause(self) -> None:
        """Hang: the process does nothing any more, but its sockets stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Die without a word to anybody; returns when the process is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.lives:
            time.sleep(0.01)


class Nursery:
    """A process that has imported a server script and forks servers on demand.

    Args:
        script: A file of this folder that calls `serving.nursery`.
    """

    def __init__(self, script: str) -> None:
        # Popen's stdin is the leash: when this process is gone, the nursery reads its end and goes, its children too.
        quiet = os.environ | {"OPENREWARD_LOG_LEVEL": "CRITICAL"}  # a line for each request otherwise
        self._process = subprocess.Popen(
            [servers_python(), str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=quiet,
        )

    def start(self, world: str, *, port: int = 0, **options: Any) -> ServerProcess:
        """Fork a server.

        Args:
            world: What it serves, a key of the script's worlds.
            port: Where it listens, 0 for any free port.
            **options: For the world.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"world": world, "port": port, "options": options}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the nursery of servers ended with {self._process.wait()}; its stderr is above"
        return ServerProcess(**json.loads(answer))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
