"""A real Chromium for the tests; without one they are skipped, where services are required they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None:
        reason = "no chromium: apt-get install --no-install-recommends chromium fonts-dejavu-core"
        if os.environ.get("AGENTRL_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser: Any, address: str, **options: Any) -> tuple[Any, list[str]]:
    """A page that has drawn itself, and what it complained about or asked others for since."""
    page = browser.new_context(**options).new_page()
    complaints: list[str] = []
    own = address.partition("#")[0].rstrip("/")
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append("dialog"), dialog.dismiss()))
    page.on(
        "request", lambda request: None if request.url.startswith((own, "data:")) else complaints.append(request.url)
    )
    page.goto(address)
    page.wait_for_selector("html[data-ready]", state="attached")
    return page, complaints


def settled(page: Any, hash_: str) -> None:
    """Go to an address within the page and wait until that is drawn."""
    before = page.get_attribute("html", "data-ready")
    page.evaluate("hash => { location.hash = hash; }", hash_)
    page.wait_for_selector(f"html[data-ready]:not([data-ready='{before}'])", state="attached")
