"""How long the viewer's page takes with many rollouts: `python -m benchmarks.viewer [ROLLOUTS]`, with Chromium.

`agentrl view` serves it from a process of its own. Times of the page are those of the browser's clock: from the
beginning of the navigation to the first paint and to the list being drawn, and from a new address (a filter, a sorting,
another page) to that page being drawn. The server says its address once the journal is read.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.viewer.browser import chromium, open_page, settled
from tests.viewer.journals import fill

MEMBERS, GROUPS = 8, 8


def main(rollouts: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = fill(Path(name), steps=max(1, rollouts // (MEMBERS * GROUPS)), groups=GROUPS, members=MEMBERS)
        size = (folder / "_rollouts.db").stat().st_size / 2**20
        print(f"{max(1, rollouts // (MEMBERS * GROUPS)) * MEMBERS * GROUPS} rollouts, journal {size:.0f} MiB")
        started = time.perf_counter()
        command = [sys.executable, "-m", "agentrl", "view", str(folder), "--port", "0"]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            seconds, cpu = time.perf_counter() - started, psutil.Process(server.pid).cpu_times().user
            print(f"from the command to the address: {seconds:.2f} s ({cpu:.2f} s of CPU)")
            _browse(address)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def _browse(address: str) -> None:
    with chromium() as browser:
        for which in ("first", "second"):
            page, _ = open_page(browser, f"{address}#/rollouts")
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            drawn = page.evaluate("performance.getEntriesByName('drawn')[0].startTime")
            print(f"{which} page: first paint {paint / 1000:.2f} s, list drawn {drawn / 1000:.2f} s")
        for what, to in [
            ("filter by reward and outcome", "#/rollouts?min=0.5&outcome=finished"),
            ("sort by tokens", "#/rollouts?sort=-sampled"),
            ("search a text", "#/rollouts?text=TypeError"),
            ("overview", "#/"),
            ("group", "#/group/0/0/50"),
            ("rollout", "#/rollout/0/0/50"),
        ]:
            print(f"{what}: {_seconds(page, to):.2f} s")


def _seconds(page: Any, address: str) -> float:
    began = page.evaluate("performance.now()")
    settled(page, address)
    return (page.evaluate("performance.getEntriesByName('drawn').at(-1).startTime") - began) / 1000


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rollouts", type=int, nargs="?", default=10_000)
    main(parser.parse_args().rollouts)
