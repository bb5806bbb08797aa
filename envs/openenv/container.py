"""A server in a container of its own, through a Docker engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from agentrl.errors import ConfigurationError, EnvironmentFailure
from agentrl.rollout.limits import require_seconds

OF_THE_TEMPLATE = ("sh", "-c", "cd /app/env && exec uvicorn server.app:app --host 127.0.0.1 --port {port}")
"""How images made by `openenv build` start their server, but for host and port."""

LAST_LINES = 20
"""How many lines of its log a failure shows."""

_LEASH = "import sys, docker; sys.stdin.read(); docker.from_env().api.remove_container(sys.argv[1], force=True, v=True)"


class Container:
    """Starts a server from an image when it is needed, again when it has died, and removes it in the end.

    It has the network of the host and listens on the loopback interface only, at a free port. The image must be there:
    none is ever pulled. A process on a leash removes the container also when this process is killed.

    Args:
        image: The image.
        command: What to run in it; `{port}` stands for the port to listen at on 127.0.0.1.
        environment: Environment variables.
        memory: Most memory, as Docker writes it.
        pids: Most processes.
        start_timeout: Seconds until the server must answer at `/health`.

    Raises:
        ConfigurationError: A number is out of range.

    Example:
        >>> container = Container("echo-env:1", memory="2g", environment={"LEVEL": "3"})
    """

    def __init__(
        self,
        image: str,
        *,
        command: Sequence[str] = OF_THE_TEMPLATE,
        environment: Mapping[str, str] | None = None,
        memory: str = "4g",
        pids: int = 512,
        start_timeout: float = 120.0,
    ) -> None:
        if isinstance(command, str) or not any("{port}" in word for word in command):
            raise ConfigurationError(
                f"Container(command={command!r}): expected a list of words, one of which has {{port}} where the server "
                "is told at which port of 127.0.0.1 to listen"
            )
        require_seconds("start_timeout", start_timeout)
        self.image = image
        self._command, self._environment, self._memory, self._pids = command, environment, memory, pids
        self._start_timeout = start_timeout
        self._lock = threading.Lock()
        self._container: Any = None
        self._leash: subprocess.Popen[bytes] | None = None
        self._url = ""

    def start(self) -> str:
        """The URL of the server, which runs and answers.

        Raises:
            ConfigurationError: There is no engine, or no such image.
            EnvironmentFailure: The server does not start.
        """
        with self._lock:
            if self._container is not None and not self._is_running():
                self._remove()
            if self._container is None:
                try:
                    self._run()
                    self._wait_until_healthy()
                except BaseException:
                    self._remove()
                    raise
            return self._url

    def stop(self) -> None:
        """Remove the container."""
        with self._lock:
            self._remove()

    def cause_of_death(self) -> str | None:
        """What the container died of, with the end of its log; None while it lives."""
        container = self._container
        if container is None:
            return None
        deadline = time.monotonic() + 1.0
        while self._is_running():  # its sockets are gone before the engine has noticed
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return self._obituary(container)

    def _obituary(self, container: Any) -> str:
        state = container.attrs["State"]
        memory = f", out of memory (memory={self._memory})" if state.get("OOMKilled") else ""
        log = container.logs(tail=LAST_LINES).decode("utf-8", "replace").strip()
        code = state.get("ExitCode")
        return f"the container of {self.image} ended with exit code {code}{memory}; its last words:\n{log}"

    def _run(self) -> None:
        import docker
        from docker.errors import DockerException, ImageNotFound

        try:
            client = docker.from_env()
            image = client.images.get(self.image)
        except ImageNotFound as error:
            raise ConfigurationError(
                f"the Docker engine has no image {self.image!r}; build or pull it, agentrl does not"
            ) from error
        except DockerException as error:
            raise ConfigurationError(f"no Docker engine to start {self.image!r} with (DOCKER_HOST): {error}") from error
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._container = client.containers.create(
            image,
            [word.replace("{port}", str(port)) for word in self._command],
            environment=dict(self._environment or {}),
            init=True,
            labels={"agentrl": "openenv"},
            mem_limit=self._memory,
            memswap_limit=self._memory,
            network_mode="host",
            pids_limit=self._pids,
        )
        self._leash = subprocess.Popen(
            [sys.executable, "-c", _LEASH, self._container.id],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._container.start()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            if not self._is_running():
                raise EnvironmentFailure(f"the OpenEnv server did not start: {self._obituary(self._container)}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/health", timeout=5, verify=False).is_success:
                    return
            time.sleep(0.1)
        raise EnvironmentFailure(
            f"the OpenEnv server in the container of {self.image} did not answer at {self._url}/health within "
            f"{self._start_timeout:g} s (start_timeout)"
        )

    def _is_running(self) -> bool:
        from docker.errors import NotFound

        try:
            self._container.reload()
        except NotFound:
            return False
        return bool(self._container.attrs["State"]["Running"])

    def _remove(self) -> None:
        from docker.errors import NotFound

        if self._container is not None:
            with suppress(NotFound):
                self._container.remove(force=True, v=True)
        if self._leash is not None:
            self._leash.kill()
            self._leash.communicate()
        self._container = self._leash = None
