"""Which addresses a browser may reach: an allow-list of origins, as pure functions.

It is enforced twice. Every request that a page makes is looked at before it is sent (`permitted`). And Chromium's
network stack knows one way out (`network_flags`): the allowed hosts and ports directly, everything else by a proxy
whose name does not resolve. That holds for what the first look does not see: redirects, preloads, workers, DNS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from agentrl.errors import ConfigurationError

PAGES = "http://pages.test"
"""Origin of the pages that are served from memory; `.test` is never resolved (RFC 6761)."""

_SCHEMES = {"http": ("http", 80), "https": ("https", 443), "ws": ("http", 80), "wss": ("https", 443)}
_AMBIGUOUS = re.compile(r"[\\\s\x00-\x20\x7f]")  # what browsers read otherwise than `urlsplit` does
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")


def origin(url: str) -> str | None:
    """The origin of an http or WebSocket address, `scheme://host:port`; None for any other address.

    Example:
        >>> origin("ws://Localhost/chat"), origin("file:///etc/passwd"), origin("http://a@b/")
        ('http://localhost:80', None, None)
    """
    if _AMBIGUOUS.search(url):
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if parts.scheme not in _SCHEMES or "@" in parts.netloc or not _HOST.fullmatch(host):
        return None
    scheme, usual = _SCHEMES[parts.scheme]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{usual if port is None else port}"


def read_origins(origins: Iterable[str]) -> frozenset[str]:
    """Read an allow-list.

    Raises:
        ConfigurationError: An entry is more or less than an origin.
    """
    if isinstance(origins, str):
        raise ConfigurationError(f"origins must be a list of origins, not the text {origins!r}")
    read = set()
    for entry in origins:
        found = origin(entry)
        if found is None or urlsplit(entry)._replace(scheme="", netloc="").geturl().strip("/"):
            raise ConfigurationError(
                f"{entry!r} in `origins` is not an origin; one looks like http://127.0.0.1:8000 or https://example.org"
            )
        read.add(found)
    return frozenset(read)


def permitted(url: str, origins: frozenset[str]) -> bool:
    """Whether a page may be at an address, or ask for it."""
    return origin(url) in origins | {f"{PAGES}:80"}


def network_flags(origins: frozenset[str]) -> list[str]:
    """Chromium's switches that leave its network no other way than to `origins`."""
    places = sorted(each.partition("://")[2] for each in origins)
    hosts = sorted({place.rpartition(":")[0] for place in places})
    return [
        "--proxy-server=http://nowhere.invalid:9",
        # Without `<-loopback>` the host's own services would be asked directly.
        "--proxy-bypass-list=" + ";".join(["<-loopback>", *places]),
        "--host-resolver-rules=" + " , ".join(["MAP * ~NOTFOUND", *(f"EXCLUDE {host}" for host in hosts)]),
        "--disable-quic",
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    ]
