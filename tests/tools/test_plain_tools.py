"""Calculator, search and fetch: tools without state, which all rollouts share."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.errors import ConfigurationError
from agentrl.rollout.tools import Tool
from agentrl.tools import FetchTool, SearchTool, calculate
from tests.waiting import LONG


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("-(7 // 2) % 5", "2"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("1 / 4", "0.25"),
        ("sqrt(16) + round(2.5) + max(1, 2, 3)", "9.0"),
        ("cos(pi)", "-1.0"),
        ("1 ** 99999999999", "1"),
        (" 1_000 * 1e-3 ", "1.0"),
    ],
)
def test_the_calculator_calculates(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "2 ** 100000",
        "10 ** 1000 * 10 ** 1000",
        "__import__('os').system('id')",
        "(1).__class__",
        "[1] * 10",
        "'a' * 10",
        "True + 1",
        "x",
        "lambda: 1",
        "max(*[1, 2])",
        "round(1.5, ndigits=1)",
        "1 if 1 else 2",
        "1j",
        "(-8) ** 0.5",
        "1 +",
        "1\n2",
        "(" * 400 + "1" + ")" * 400,
        "+".join(["1"] * 600),
        "",
    ],
)
def test_the_calculator_refuses_all_else_at_once(expression: str) -> None:
    start = time.thread_time()
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
        calculate(expression)
    assert time.thread_time() - start < 10  # of the processor, where some of these would take hours


@pytest.mark.parametrize("expression", ["1 / 0", "exp(1e6)", "log(0)", "gcd(1.5, 2)"])
def test_errors_of_arithmetic_are_told(expression: str) -> None:
    with pytest.raises((ArithmeticError, ValueError, TypeError)):
        calculate(expression)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    (folder / "deep").mkdir(parents=True)
    (folder / "whales.md").write_text("# Whales\n\nThe blue whale is the largest animal.\n\nIt eats krill.")
    (folder / "deep" / "ants.txt").write_text("Ants carry many times their weight.\n\n" + "filler words " * 300)
    (folder / "code.py").write_text("krill = 1")
    (tmp_path / "secret.txt").write_text("krill secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    return folder


def test_search_finds_passages_and_their_files(library: Path) -> None:
    search = SearchTool(library)
    assert search("animals that eat krill") == (
        "whales.md:\n# Whales\n\nThe blue whale is the largest animal.\n\nIt eats krill."
    )
    assert search("carrying").startswith("deep/ants.txt:\nAnts carry")
    assert search("secret") == "nothing was found"
    assert len(search("filler", results=1000)) <= 8010


@pytest.mark.parametrize(
    "query", ['"', "krill AND NOT", "text:krill OR *", "NEAR(", "krill'); DROP TABLE passages; --"]
)
def test_nothing_in_a_query_is_an_operator(library: Path, query: str) -> None:
    search = SearchTool(library)
    with contextlib.suppress(ValueError):  # a query without words
        search(query)
    assert "whales.md" in search("krill")


def test_search_serves_many_threads(library: Path) -> None:
    search = SearchTool(library)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(search("whale"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert len(answers) == 8


def test_search_refuses_a_folder_without_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no text files"):
        SearchTool(tmp_path)
    with pytest.raises(ConfigurationError, match="no folder"):
        SearchTool(tmp_path / "none")


done = threading.Event()
"""Ends what is slow."""


class Site(BaseHTTPRequestHandler):
    """Pages that behave and pages that do not."""

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        pages = {
            "/page": (200, {"Content-Type": "text/html; charset=latin-1"}, "é".encode("latin-1")),
            "/query?a=b%20c": (200, {}, b"asked"),
            "/long": (200, {}, b"x" * 1000),
            "/image": (200, {"Content-Type": "image/png"}, b"png"),
            "/missing": (404, {}, b"none"),
            "/there": (302, {"Location": "/page"}, b""),
            "/away": (302, {"Location": "http://127.0.0.2:9/"}, b""),
            "/metadata": (302, {"Location": "http://169.254.169.254/latest"}, b""),
            "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            "/loop": (302, {"Location": "/loop"}, b""),
            "/packed": (200, {"Content-Encoding": "gzip"}, b"bomb"),
            "/host": (200, {}, self.headers["Host"].encode()),
        }
        if self.path == "/slow":
            done.wait(LONG)
        status, headers, body = pages.get(self.path, (200, {}, f"other {port}".encode()))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "text/plain", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    done.set()
    server.shutdown()
    server.server_close()


def get(site: str, path: str, **options: object) -> str:
    tool = FetchTool([site], **{"private": True, "max_bytes": 100, "timeout": LONG, **options})  # type: ignore[arg-type]
    return asyncio.run(tool(site + path if path.startswith("/") else path))


def test_fetch_gets_text(site: str) -> None:
    assert get(site, "/page") == "é"
    assert get(site, "/query?a=b%20c") == "asked"
    assert get(site, "/there") == "é"
    assert get(site, "/host") == site.removeprefix("http://")
    assert get(site, "/missing") == "[status 404]\nnone"
    assert get(site, "/long") == "x" * 100 + "\n[cut after 100 bytes]"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/away", "not allowed"),
        ("/metadata", "not allowed"),
        ("/file", "no address"),
        ("/loop", "redirects"),
        ("/image", "not text"),
        ("/packed", "packed"),
        ("http://example.org/", "not allowed"),
        ("https://127.0.0.1/", "not allowed"),
        ("file:///etc/passwd", "no address"),
        ("http://user@@/", "no address"),
        ("", "no address"),
    ],
)
def test_fetch_refuses_what_is_not_allowed(site: str, path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get(site, path)


def test_fetch_waits_no_longer_than_it_may(site: str) -> None:
    with pytest.raises(ValueError, match="within 1 s"):
        get(site, "/slow", timeout=1.0)


@pytest.mark.parametrize("trick", ["{0}@example.org/", "http://example.org#{0}/", "http://example.org\\@{1}/page"])
def test_fetch_is_not_fooled_by_addresses_that_look_allowed(site: str, trick: str) -> None:
    with pytest.raises(ValueError, match=r"no address|not allowed"):
        get(site, trick.format(site, site.removeprefix("http://")))


def test_fetch_refuses_private_addresses_of_allowed_names(site: str) -> None:
    port = site.rpartition(":")[2]
    for origin in (site, f"http://localhost:{port}"):
        with pytest.raises(ValueError, match="not a public address"):
            asyncio.run(FetchTool([origin])(f"{origin}/page"))


def test_fetch_uses_no_proxy_of_the_environment(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert get(site, "/page") == "é"


@pytest.mark.parametrize(
    "origins", [[], ["example.org"], ["https://example.org/path"], ["ftp://example.org"], ["http://"]]
)
def test_fetch_refuses_origins_that_are_none(origins: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        FetchTool(origins)


def test_they_are_tools_with_schemas(library: Path) -> None:
    tools = [Tool.from_function(f) for f in (calculate, SearchTool(library), FetchTool(["https://example.org"]))]
    assert [tool.name for tool in tools] == ["calculate", "search", "fetch"]
    assert [list(tool.schema["function"]["parameters"]["properties"]) for tool in tools] == [
        ["expression"],
        ["query", "results"],
        ["url"],
    ]
