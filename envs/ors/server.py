"""Which server, and who may see the API key: what a user says about an ORS server, checked."""

from __future__ import annotations

import functools
import ipaddress
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx

from agentrl.errors import ConfigurationError
from agentrl.rollout.limits import require_seconds

CATALOGUE_URL = "https://sessions.openreward.ai"
"""Where the hosted environments of the OpenReward catalogue are served."""

KEY_VARIABLE = "OPENREWARD_API_KEY"
"""Environment variable with the API key of the catalogue; read for catalogue names only."""


@dataclass(frozen=True, slots=True)
class Server:
    """An ORS server and how long to wait for it.

    Attributes:
        url: Its address.
        deployment: Name in the catalogue, None for a server of one's own.
        api_key: Sent to it as `X-API-Key`.
        silence: Seconds without a byte after which a connection is dead.
        call_timeout: Seconds that one tool call may take.
        setup_timeout: Seconds that the server may take to set a task up.
        ping_interval: Seconds between two signs of life of a session.

    Raises:
        ConfigurationError: An address, a number or the use of the key does not fit.
    """

    url: httpx.URL
    deployment: str | None = None
    api_key: str | None = field(default=None, repr=False)
    silence: float = 30.0
    call_timeout: float = 300.0
    setup_timeout: float = 600.0
    ping_interval: float = 30.0

    def __post_init__(self) -> None:
        for name in ("silence", "call_timeout", "setup_timeout", "ping_interval"):
            require_seconds(name, getattr(self, name))

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        named = {"X-Deployment": self.deployment, "X-API-Key": self.api_key}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def loopback(self) -> bool:
        """Whether the server is on this machine: no proxy is asked then."""
        return _is_loopback(self.url.host)


def find_server(
    name: str | None, url: str | None, api_key: str | None, api_key_hosts: Iterable[str], **seconds: float
) -> Server:
    """The server that a catalogue name or an address means.

    Args:
        name: `owner/environment` of the catalogue.
        url: Address of another server.
        api_key: The key; for a catalogue name by default what the environment variable `OPENREWARD_API_KEY` holds.
        api_key_hosts: Hosts that may see the key; with an address only.
        seconds: The waits of `Server`.

    Raises:
        ConfigurationError: Says what does not fit.
    """
    if (name is None) == (url is None):
        raise ConfigurationError(
            'ORS needs either a catalogue name, ORS("owner/environment"), or ORS(url="http://...")'
        )
    if isinstance(api_key_hosts, str):
        raise ConfigurationError(f"api_key_hosts={api_key_hosts!r} must be a list of hosts")
    if name is not None:
        if api_key_hosts:
            raise ConfigurationError("api_key_hosts goes with `url`; a catalogue name's key goes to the catalogue only")
        if "://" in name or not all(name.split("/")) or name.count("/") > 1:
            raise ConfigurationError(f"{name!r} is not a name of the catalogue such as 'owner/environment'; see `url=`")
        key = api_key or os.environ.get(KEY_VARIABLE) or None
        if key is None:
            raise ConfigurationError(
                f"the catalogue environment {name!r} needs an API key: set {KEY_VARIABLE} or pass api_key=..."
            )
        return Server(httpx.URL(CATALOGUE_URL), name, key, **seconds)
    assert url is not None
    address = _address(url)
    if api_key is not None:
        _check_key_use(address, set(api_key_hosts))
    return Server(address, None, api_key, **seconds)


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """One for all clients: reading the certificates takes longer than a request."""
    return httpx.create_ssl_context()


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"url={url!r} is no address: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigurationError(f"url={url!r} must look like http://host:port")
    if address.query or address.fragment or address.userinfo:
        raise ConfigurationError(f"url={url!r} may have no user, query or fragment")
    return address


def _check_key_use(address: httpx.URL, hosts: set[str]) -> None:
    if address.host not in hosts:
        raise ConfigurationError(
            f"the API key would be sent to {address.host!r}, which is not among api_key_hosts={sorted(hosts)}; add "
            "the host if it may see the key, or leave `api_key` out: servers of one's own ask for none"
        )
    if address.scheme != "https" and not _is_loopback(address.host):
        raise ConfigurationError(f"the API key would cross the network in clear text to {address}; use https")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
