"""Who sees the API key: the hosts that the user named for it, and nobody else."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from agentrl.envs import ORS
from agentrl.envs.ors.server import find_server
from agentrl.errors import ConfigurationError
from agentrl.types import Outcome
from tests.envs.ors_play import play, state, use
from tests.envs.proxy import Proxy, replaced
from tests.envs.servers import ServerProcess

KEY = "sk-very-secret"
WON = use("guess", number=4)
TASK = {"number": 4}


@pytest.fixture(scope="module")
def server(ors_nursery) -> Iterator[ServerProcess]:
    server = ors_nursery.start("guess")
    yield server
    server.kill()


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENREWARD_API_KEY", KEY)


def shown(request: bytes) -> bool:
    """Whether the key is anywhere in a request, as it is or in base64."""
    return any(key in request for key in (KEY.encode(), base64.b64encode(KEY.encode())[:16]))


def test_a_server_of_ones_own_is_sent_no_key(proxy: Proxy) -> None:
    trajectory = play(ORS(url=proxy.url), WON, task=TASK)
    assert trajectory.reward == 1.0
    assert len(proxy.requests) > 8
    assert not any(shown(request) for request in proxy.requests)


def test_a_named_host_is_sent_the_key_in_its_header_and_nowhere_else(proxy: Proxy) -> None:
    ors = ORS(url=proxy.url, api_key=KEY, api_key_hosts=["127.0.0.1"])
    assert play(ors, WON, task=TASK).reward == 1.0
    for request in proxy.requests:
        assert request.count(f"X-API-Key: {KEY}\r\n".encode()) == 1, request
        assert not shown(request.replace(f"X-API-Key: {KEY}".encode(), b""))
        assert b"X-Secrets" not in request


@pytest.mark.parametrize(
    ("url", "hosts", "message"),
    [
        ("http://127.0.0.1:8080", [], "api_key_hosts"),
        ("https://envs.example.org", ["example.org"], "would be sent to 'envs.example.org'"),
        ("https://example.org.evil.net", ["example.org"], "would be sent to 'example.org.evil.net'"),
        ("http://envs.example.org", ["envs.example.org"], "in clear text"),
        ("https://envs.example.org", "envs.example.org", "must be a list of hosts"),
    ],
)
def test_a_key_for_nobody_or_in_the_open_is_refused(url: str, hosts: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ORS(url=url, api_key=KEY, api_key_hosts=hosts)


def test_a_redirect_to_another_server_is_not_followed(proxy: Proxy, server: ServerProcess) -> None:
    with Proxy(server.port) as other:
        ors = ORS(url=proxy.url, api_key=KEY, api_key_hosts=["127.0.0.1"])
        proxy.spoil("/call", replaced("307 Elsewhere", "", f"Location: {other.url}/guess/call"))
        trajectory = play(ors, WON, task=TASK)
        assert trajectory.outcome is Outcome.ENV_FAILURE
        assert f"redirected to {other.url}, which is another server" in trajectory.failure.error
        assert other.requests == []
    assert state(server)["open"] == 0


def test_a_redirect_in_circles_ends(proxy: Proxy) -> None:
    for _ in range(4):
        proxy.spoil("/call", replaced("308 Again", "", "Location: /guess/call"))
    trajectory = play(ORS(url=proxy.url), WON, task=TASK)
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "redirected in circles" in trajectory.failure.error


def test_a_catalogue_name_means_the_official_host() -> None:
    server = find_server("GeneralReasoning/CTF", None, None, ())
    assert str(server.url) == "https://sessions.openreward.ai"
    assert server.headers == {"X-Deployment": "GeneralReasoning/CTF", "X-API-Key": KEY}
    assert not server.loopback


def test_a_catalogue_name_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENREWARD_API_KEY")
    with pytest.raises(ConfigurationError, match="set OPENREWARD_API_KEY"):
        ORS("GeneralReasoning/CTF")
    assert ORS("GeneralReasoning/CTF", api_key=KEY) is not None


def test_the_scheme_of_the_catalogue(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths without an environment, which the server redirects; the name in a header. Here with a server of our own."""
    monkeypatch.setattr("agentrl.envs.ors.server.CATALOGUE_URL", proxy.url)
    ors = ORS("somebody/guess")
    assert ors.tasks("hard")["index"] == [0, 1, 2]
    assert play(ors, WON, task=TASK).reward == 1.0
    assert {"/prompt", "/guess/prompt", "/call", "/guess/call"} < set(proxy.paths())
    assert all(b"X-Deployment: somebody/guess\r\n" in request for request in proxy.requests)


def test_proxies_of_the_environment_are_not_for_loopback(
    proxy: Proxy, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr("agentrl.envs.ors.client.ATTEMPTS", 1)
    assert play(ORS(url=server.url), WON, task=TASK).reward == 1.0
    assert proxy.requests == []
    with pytest.raises(ConfigurationError):
        ORS(url="http://ors.invalid")()
    assert proxy.requests[0].startswith(b"POST http://ors.invalid/create_session HTTP/1.1\r\n")
