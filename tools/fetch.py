"""Fetching pages of named origins over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urljoin, urlsplit

import httpx

from agentrl.errors import ConfigurationError

MAX_REDIRECTS = 5
TEXT = ("text/", "application/json", "application/xml", "application/xhtml+xml", "application/javascript")
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "agentrl"}
"""Not packed: how much comes out of packed bytes is only known afterwards."""

PORTS = {"http": 80, "https": 443}


class FetchTool:
    """Gets text from the origins that its user named, and from nowhere else. One instance serves all rollouts.

    A redirect is followed only to an origin of the list. A name is looked up once; the connection goes to the address
    that was checked. Proxies and credentials of this machine's environment are not used, cookies not kept.

    Args:
        origins: Allowed origins, "https://docs.python.org" or "http://127.0.0.1:8000": scheme, host, port.
        timeout: Seconds that one call may take, redirects included.
        max_bytes: Most bytes of a page.
        private: Whether addresses of this machine and of private networks are allowed, for origins of the list.

    Raises:
        ConfigurationError: An origin is not one.
    """

    __name__ = "fetch"

    def __init__(
        self, origins: Sequence[str], *, timeout: float = 20.0, max_bytes: int = 200_000, private: bool = False
    ) -> None:
        self._origins = {_origin(origin, given=True) for origin in origins}
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._private = private
        if not self._origins:
            raise ConfigurationError("FetchTool needs at least one allowed origin, https://example.org say")

    async def __call__(self, url: str) -> str:
        """Get a page as text.

        Args:
            url: Its address.

        Returns:
            Its text.
        """
        try:
            async with asyncio.timeout(self._timeout):
                return await self._fetch(url)
        except TimeoutError:
            raise ValueError(f"{url} did not answer within {self._timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{url} cannot be fetched: {error or type(error).__name__}") from None

    async def _fetch(self, url: str) -> str:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(url)
            if isinstance(answer, str):
                return answer
            url = urljoin(url, answer.url)
        raise ValueError(f"more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: str) -> str | _Redirect:
        scheme, host, port = origin = _origin(url)
        if origin not in self._origins:
            allowed = sorted(f"{scheme}://{host}:{port}" for scheme, host, port in self._origins)
            raise ValueError(f"{url} is not allowed; only pages of {', '.join(allowed)} are")
        address = await self._address(host, port)
        target = httpx.URL(scheme=scheme, host=address, port=port, raw_path=httpx.URL(url).raw_path)
        named = host if port == PORTS[scheme] else f"{host}:{port}"
        extensions = {"sni_hostname": host}  # what the certificate is checked against
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._timeout) as client,
            client.stream("GET", target, headers=HEADERS | {"Host": named}, extensions=extensions) as response,
        ):
            if response.is_redirect:
                return _Redirect(response.headers["location"])
            kind = response.headers.get("content-type", "text/plain")
            if not kind.startswith(TEXT):
                raise ValueError(f"{url} is {kind}, not text")
            if packed := response.headers.get("content-encoding"):
                raise ValueError(f"{url} is packed ({packed}) though that was not asked for")
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > self._max_bytes:
                    break
        text = bytes(content[: self._max_bytes]).decode(response.encoding or "utf-8", "replace")
        cut = f"\n[cut after {self._max_bytes} bytes]" if len(content) > self._max_bytes else ""
        status = "" if response.is_success else f"[status {response.status_code}]\n"
        return f"{status}{text}{cut}"

    async def _address(self, host: str, port: int) -> str:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(f"{host} is not known: {error}") from None
        address = str(found[0][4][0])
        if not self._private and not ipaddress.ip_address(address).is_global:
            raise ValueError(f"{host} is at {address}, which is not a public address")
        return address


class _Redirect:
    def __init__(self, url: str) -> None:
        self.url = url


def _origin(url: str, *, given: bool = False) -> tuple[str, str, int]:
    """Scheme, host and port.

    Raises:
        ConfigurationError: It is the user's and not an origin.
        ValueError: It is the model's and not an address.
    """
    try:
        parts = urlsplit(url.strip())
        scheme, host, port = parts.scheme.lower(), (parts.hostname or "").lower(), parts.port
    except ValueError:
        parts, scheme, host, port = urlsplit(""), "", "", None
    if scheme not in PORTS or not host or "@" in parts.netloc or "\\" in url:
        error = ConfigurationError if given else ValueError
        raise error(f"{url!r} is no address like https://example.org")
    if given and (parts.path.strip("/") or parts.query):
        raise ConfigurationError(f"{url!r} is more than an origin: give scheme, host and port, https://example.org say")
    return scheme, host.rstrip("."), port or PORTS[scheme]
