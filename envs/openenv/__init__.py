"""OpenEnv servers as environments.

    GRPOTrainer(..., environment_factory=OpenEnv("http://127.0.0.1:8000"))

Each rollout plays on a session of its own, over its own WebSocket. What a step shows goes to the model, what it rewards
makes the reward of the episode, and `done` ends it. A server that dies, hangs, restarts or says anything that the
protocol does not provide for is a failure of the environment, which is retried elsewhere and never becomes a reward.
"""

from __future__ import annotations

import ssl
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentrl.envs.openenv.connection import Endpoint
from agentrl.envs.openenv.container import Container
from agentrl.envs.openenv.environment import OpenEnvEnvironment, Reward
from agentrl.envs.openenv.server import Server
from agentrl.envs.openenv.tools import Style
from agentrl.errors import ConfigurationError
from agentrl.rollout.limits import require_seconds

__all__ = ["Container", "OpenEnv", "OpenEnvEnvironment"]


class OpenEnv:
    """An `environment_factory` that plays on an OpenEnv server.

    The server is asked what it understands when the first instance is made, that is when the trainer is. Times are in
    seconds.

    Args:
        url: The server, `http://`, `https://`, `ws://` or `wss://`.
        image: Or a Docker image, started on this machine: its name, or a `Container` with settings.
        name: What metrics call the reward.
        style: Whether actions have a model of their own ("typed") or are calls of MCP tools ("mcp"); "auto" to look.
        reward: The reward of an episode is the "sum" of its steps' rewards or the "last" of them. "steps" gives each to
            the turn that made the step instead. None: the server's rewards are not used.
        columns: Dataset columns that the environment's `reset` is given besides `seed`. A server drops those that its
            `reset` does not take, without a word.
        render: Shows an observation's fields to the model: text, or content blocks. None for what
            `agentrl.envs.openenv.content` says.
        headers: Sent to the server with every request, and to nobody else: redirects are not followed.
        max_sessions: Most sessions at once, None for as many as the server lets in.
        capacity_timeout: How long a rollout waits for a session.
        connect_timeout: For a connection to be opened.
        reset_timeout: For the server to make an environment, and to reset it.
        step_timeout: For a step.
        ping_interval: Between two pings of a connection.
        ping_timeout: Until a ping must be answered. An environment that blocks its server's event loop answers none.
        keepalive: Between two signs of life for a session. It must be shorter than the server's `session_timeout`.
        max_message_size: Most bytes of an answer.

    Raises:
        ConfigurationError: A setting cannot work.

    Example:
        >>> environment_factory = OpenEnv("http://127.0.0.1:8000", reward="last", step_timeout=30)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        image: str | Container | None = None,
        name: str = "OpenEnv",
        style: Literal["auto", "typed", "mcp"] = "auto",
        reward: Literal["sum", "last", "steps"] | None = "sum",
        columns: Sequence[str] = (),
        render: Callable[[dict[str, Any]], Any] | None = None,
        headers: Mapping[str, str] | None = None,
        max_sessions: int | None = None,
        capacity_timeout: float = 300.0,
        connect_timeout: float = 30.0,
        reset_timeout: float = 120.0,
        step_timeout: float = 120.0,
        ping_interval: float = 10.0,
        ping_timeout: float = 20.0,
        keepalive: float = 10.0,
        max_message_size: int = 16 * 2**20,
    ) -> None:
        if (url is None) == (image is None):
            raise ConfigurationError("OpenEnv needs either a `url` or an `image`")
        if isinstance(columns, str):
            raise ConfigurationError(f"OpenEnv(columns={columns!r}): expected a list of names of dataset columns")
        if max_sessions is not None and max_sessions < 1:
            raise ConfigurationError(f"OpenEnv(max_sessions={max_sessions!r}): expected None or at least 1")
        if max_message_size < 1:
            raise ConfigurationError(f"OpenEnv(max_message_size={max_message_size!r}): expected at least 1 byte")
        times = {
            "capacity_timeout": capacity_timeout,
            "connect_timeout": connect_timeout,
            "reset_timeout": reset_timeout,
            "step_timeout": step_timeout,
            "ping_interval": ping_interval,
            "ping_timeout": ping_timeout,
            "keepalive": keepalive,
        }
        for setting, seconds in times.items():
            if seconds is None:
                raise ConfigurationError(f"OpenEnv({setting}=None): every wait has its limit; give a number of seconds")
            require_seconds(setting, seconds)
        address = "" if url is None else _http(url)
        endpoint = Endpoint(
            url=address,
            tls=ssl.create_default_context() if address.startswith("https") else None,
            headers=dict(headers or {}),
            max_message_size=max_message_size,
            **{setting: seconds for setting, seconds in times.items() if setting != "capacity_timeout"},
        )
        self._server = Server(
            endpoint,
            Container(image) if isinstance(image, str) else image,
            style=None if style == "auto" else _choice(Style, "style", style),
            reward=None if reward is None else _choice(Reward, "reward", reward),
            columns=columns,
            render=render,
            max_sessions=max_sessions,
            capacity_timeout=capacity_timeout,
        )
        # Metrics name the reward of an environment after its class.
        self._class = type(name, (OpenEnvEnvironment,), {"__module__": __name__})

    def __call__(self) -> OpenEnvEnvironment:
        """Make an instance; it connects when it is reset."""
        return self._class(self._server)


def _http(url: str) -> str:
    """The URL of a server in the form that HTTP requests want."""
    parts = urllib.parse.urlsplit(url)
    schemes = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
    if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment:
        raise ConfigurationError(f"OpenEnv(url={url!r}): expected the URL of a server, such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/ws")
    return urllib.parse.urlunsplit((schemes[parts.scheme], parts.netloc, path, "", ""))


def _choice(kind: Any, setting: str, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(str(member)) for member in kind)
        raise ConfigurationError(f"OpenEnv({setting}={value!r}): expected one of {known}") from None
