"""The Docker engine: reaching it, and whose containers are whose."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil

from agentrl.envs.sandbox.base import SandboxFailure
from agentrl.errors import ConfigurationError

logger = logging.getLogger(__name__)

LABEL = "agentrl.owner"
"""Label of every container; its value says which process it belongs to."""


def connect(base_url: str | None, timeout: float) -> Any:
    """A client of the engine.

    Raises:
        ConfigurationError: The SDK or the engine is missing.
    """
    try:
        import docker
        import docker.errors
    except ImportError as error:
        raise ConfigurationError("the docker backend needs the Docker SDK: pip install docker") from error
    try:
        if base_url is None:
            client = docker.from_env(timeout=timeout, max_pool_size=64)
        else:
            client = docker.DockerClient(base_url, timeout=timeout, max_pool_size=64)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise ConfigurationError(
            f"no Docker engine answers at {base_url or os.environ.get('DOCKER_HOST', 'the default socket')} ({error}); "
            "install and start one (Debian: apt install docker.io) or name it in DOCKER_HOST; "
            "LocalBackend() needs none"
        ) from None
    return client


@contextlib.contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Turn what the SDK raises into `SandboxFailure`."""
    import docker.errors
    import requests.exceptions

    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise SandboxFailure(f"the Docker engine failed {doing}: {error}") from error


def owner() -> str:
    """This process, as the label of its containers says it: host, id and start time."""
    return f"{socket.gethostname()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def remove_orphans(client: Any) -> None:
    """Remove containers and snapshots of processes on this host that are gone."""
    import docker.errors

    with engine_errors("looking for containers left behind"):
        for container in client.api.containers(all=True, filters={"label": LABEL}):
            if not _owner_lives(container["Labels"][LABEL]):
                logger.warning("removing the container %s of a process that is gone", container["Id"][:12])
                with contextlib.suppress(docker.errors.APIError):
                    client.api.remove_container(container["Id"], force=True, v=True)
        for image in client.api.images(filters={"label": LABEL}):
            if not _owner_lives(image["Labels"][LABEL]):
                with contextlib.suppress(docker.errors.APIError):
                    client.api.remove_image(image["Id"], force=True)


def _owner_lives(label: str) -> bool:
    host, pid, started = label.rsplit("/", 2)
    if host != socket.gethostname():
        return True  # it cannot be seen from here
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == started
    except psutil.NoSuchProcess:
        return False
