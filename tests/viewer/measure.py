"""How long the page takes with many rollouts: `python -m tests.viewer.measure [ROLLOUTS]`, with Chromium."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl.viewer.index import Index
from tests.viewer.browser import chromium, open_page, settled
from tests.viewer.journals import fill
from tests.viewer.test_browser import served


def main(rollouts: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = fill(Path(name), steps=rollouts // 64, groups=8)
        print(f"{rollouts // 64 * 64} rollouts, journal {(folder / '_rollouts.db').stat().st_size / 2**20:.0f} MiB")
        started = time.perf_counter()
        index = Index(folder)
        index.changes()
        print(f"reading it: {time.perf_counter() - started:.2f} s")
        started = time.perf_counter()
        index.search("TypeError")
        print(f"searching a text in it: {time.perf_counter() - started:.2f} s")
        index.close()
        with chromium() as browser, served(folder) as address:
            for what in ("the server's first", "a later"):
                started = time.perf_counter()
                page, _ = open_page(browser, f"{address}#/rollouts")
                paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
                ready = time.perf_counter() - started
                print(f"{what} page: first paint {paint / 1000:.2f} s, list drawn {ready:.2f} s after it was asked for")
            _time(page, "filter by reward and outcome", "#/rollouts?min=0.5&outcome=finished")
            _time(page, "sort by tokens", "#/rollouts?sort=-sampled")
            _time(page, "search a text", "#/rollouts?text=TypeError")
            _time(page, "overview", "#/")
            _time(page, "group", "#/group/0/0/5000")
            _time(page, "rollout", "#/rollout/0/0/5000")


def _time(page: Any, what: str, address: str) -> None:
    started = time.perf_counter()
    settled(page, address)
    print(f"{what}: {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
