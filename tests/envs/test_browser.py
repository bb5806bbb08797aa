"""Real Chromium: tasks that can be done, the same pixels from the same seed, nothing of the host reached, crashes."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from agentrl.envs.browser import Browser, BrowserEnvironment, Chromium
from agentrl.envs.browser.chromium import PROGRAMS
from agentrl.errors import EnvironmentFailure
from agentrl.rollout.loop import LoopThread
from agentrl.testing.browsing import SCRIPTS, act_at_random, solve
from tests.waiting import LONG, alive, eventually, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module", autouse=True)
def chromium_is_there() -> None:
    pytest.importorskip("playwright")
    if not any(map(shutil.which, PROGRAMS)):
        if os.environ.get("AGENTRL_REQUIRE_SERVICES") == "1":
            pytest.fail("Chromium is not installed")
        pytest.skip("Chromium is not installed")


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def browser() -> Browser:
    return Browser()


@pytest.fixture(scope="module")
def keeper(loop: LoopThread, browser: Browser) -> Iterator[Any]:
    """An instance that stays open, so that the browser lives as long as the module."""
    env = browser()
    loop.run(env.reset(task="menu"))
    yield env
    loop.run(env.close())


@pytest.fixture
def env(loop: LoopThread, browser: Browser, keeper: Any) -> Iterator[Any]:
    env = browser()
    yield env
    loop.run(env.close())


def descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(("chrom", "node", "chrome_crashpad")) and process.status() != "zombie":
                found.append(process)
    return found


def left(before: set[int]) -> set[int]:
    end = time.monotonic() + LONG
    while (now := {process.pid for process in descendants()} - before) and time.monotonic() < end:
        time.sleep(0.05)
    return now


def test_no_process_is_left(loop):
    """First of all, while no other browser is at work."""
    before = {process.pid for process in descendants()}
    browser = Browser()

    async def play():
        first, second = browser(), browser()
        await asyncio.gather(first.reset(task="menu"), second.reset(task="form"))
        await first.close()
        await second.click(10, 10)
        started = {process.pid for process in descendants()} - before
        await second.close()
        return started

    assert len(loop.run(play())) >= 2
    assert left(before) == set()


@pytest.mark.parametrize("task", sorted(SCRIPTS))
def test_a_task_can_be_done_and_is_not_done_at_first(task, loop, env):
    async def play():
        text, image = await env.reset(task=task, seed=11)
        before = await env.get_reward()
        await solve(env, task, text["text"])
        return image["image"].size, before, await env.get_reward()

    assert loop.run(play()) == ((640, 480), 0.0, 1.0)


def test_random_play_earns_nothing_and_breaks_nothing(loop, env):
    async def play():
        rewards = []
        for seed, task in enumerate(["drag", "menu", "popup"]):
            await env.reset(task=task, seed=seed)
            await act_at_random(env, random.Random(seed), 3)
            rewards.append(await env.get_reward())
        return rewards

    assert loop.run(play()) == [0.0, 0.0, 0.0]


def test_the_same_seed_gives_the_same_pixels(loop, env, browser):
    """Also on another instance, and after actions."""

    async def look(env, seed):
        text, image = await env.reset(task="form", seed=seed)
        await env.click(300, 95)
        typed = await env.type("Ada")
        return text["text"], image["image"].tobytes(), typed.tobytes()

    async def play():
        other = browser()
        looks = [await look(env, 3), await look(other, 3), await look(env, 4)]
        await other.close()
        return looks

    first, again, different = loop.run(play())
    assert first == again
    assert first[0] != different[0]


def test_a_page_knows_neither_the_time_nor_the_episode_before(loop, env):
    async def play():
        await env.reset(task="form", seed=1)
        now = await env.page.evaluate("localStorage.left = document.cookie = 'a=b'; new Date().toISOString()")
        drawn = await env.page.evaluate("Math.random()")
        await env.reset(task="form", seed=1)
        left = await env.page.evaluate("[localStorage.left, document.cookie, Math.random()]")
        return now, drawn, left

    now, drawn, left = loop.run(play())
    assert now == "2026-01-01T12:00:00.000Z"
    assert left == [None, "", drawn]


def test_reward_is_of_the_tasks_own_page(loop, env):
    """An agent that goes to an easier page is not paid for it."""

    async def play():
        await env.reset(task="table", seed=2)
        await env.goto("http://pages.test/menu.html")
        await env.page.evaluate("agentrl.success = () => true")
        elsewhere = await env.get_reward()
        await env.goto("http://pages.test/table.html")
        return elsewhere, await env.get_reward()

    assert loop.run(play()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda env: env.click(640, 10), "outside of the page"),
        (lambda env: env.click(10, -1), "outside of the page"),
        (lambda env: env.drag(1, 1, 1, 480), "outside of the page"),
        (lambda env: env.press("Control+Nonsense"), "no key"),
        (lambda env: env.press(""), "no key"),
        (lambda env: env.type("x" * 2001), "2001 characters"),
        (lambda env: env.type("\ud800"), "surrogates"),
        (lambda env: env.scroll(0, 10**9), "10000 pixels"),
        (lambda env: env.goto("file:///etc/passwd"), "cannot be reached"),
        (lambda env: env.goto("data:text/html,x"), "cannot be reached"),
        (lambda env: env.goto("javascript:agentrl.success=()=>true"), "cannot be reached"),
        (lambda env: env.goto("chrome://version"), "cannot be reached"),
        (lambda env: env.goto("http://127.0.0.1:22/"), "cannot be reached"),
    ],
)
def test_what_the_model_gets_wrong_is_told_to_it(call, said, loop, keeper):
    """The episode goes on, and no key stays down."""

    async def play():
        with pytest.raises(ValueError, match=said):
            await call(keeper)
        await keeper.page.evaluate("window.held = null; onkeydown = event => { held = event.ctrlKey }; 1")
        await keeper.press("a")
        return await keeper.page.evaluate("held")

    assert loop.run(play()) is False


class Listener:
    """A service of the host: counts whoever connects, by TCP or UDP."""

    def __init__(self) -> None:
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        self.tcp.settimeout(0.05)
        self.udp.settimeout(0.05)

    def visits(self) -> int:
        count = 0
        for take in (self.tcp.accept, lambda: self.udp.recvfrom(1)):
            with contextlib.suppress(TimeoutError):
                while True:
                    take()
                    count += 1
        return count


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.tcp.close()
    listener.udp.close()


@pytest.fixture
def server(listener: Listener) -> Iterator[str]:
    """An allowed site, which tries to lead elsewhere."""

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            away = f"http://127.0.0.1:{listener.port}/"
            if self.path == "/redirect":
                self.send_response(302)
                self.send_header("Location", away)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            if self.path == "/download":
                self.send_header("Content-Disposition", "attachment; filename=program.exe")
            self.send_header("Content-Type", "text/html")
            if self.path == "/preload":
                self.send_header("Link", f"<{away}>; rel=preload; as=fetch, <{away}>; rel=preconnect")
            self.end_headers()
            self.wfile.write(b"<p>hello <input type=file>")

        def log_message(self, *_: Any) -> None:
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{site.server_port}"
    site.shutdown()
    site.server_close()


ATTEMPTS = """async ([http, ws, host, port]) => {
  const tried = {};
  const attempt = async (name, work) => {
    try { tried[name] = await Promise.race([work(), new Promise(done => setTimeout(done, 700, "no answer"))]); }
    catch (error) { tried[name] = "refused"; }
  };
  const event = (target, good) =>
    new Promise((done, failed) => { target["on" + good] = () => done("REACHED"); target.onerror = failed; });
  const element = (tag, values) => document.body.appendChild(Object.assign(document.createElement(tag), values));
  const worker = code => new Worker(URL.createObjectURL(new Blob([code])));
  await Promise.all([
    attempt("fetch", () => fetch(http, {mode: "no-cors"}).then(() => "REACHED")),
    attempt("file", () => fetch("file:///etc/passwd").then(() => "REACHED")),
    attempt("image", () => event(element("img", {src: http}), "load")),
    attempt("script", () => event(element("script", {src: http}), "load")),
    attempt("socket", () => event(new WebSocket(ws), "open")),
    attempt("events", () => event(new EventSource(http), "open")),
    attempt("service worker", () => navigator.serviceWorker.register("/menu.html").then(() => "REACHED")),
    attempt("worker", () => new Promise(done => {
      worker(`fetch("${http}", {mode: "no-cors"}).then(() => postMessage("REACHED"), () => postMessage("refused"))`)
        .onmessage = event => done(event.data);
    })),
    attempt("worker socket", () => new Promise(done => {
      worker(`const socket = new WebSocket("${ws}"); socket.onopen = () => postMessage("REACHED");
              socket.onerror = () => postMessage("refused")`)
        .onmessage = event => done(event.data);
    })),
    attempt("transport", () => new WebTransport(http.replace("http", "https")).ready.then(() => "REACHED")),
    attempt("peer", async () => {
      const peer = new RTCPeerConnection({iceServers: [
        {urls: `stun:${host}:${port}`}, {urls: `turn:${host}:${port}?transport=tcp`, username: "a", credential: "b"}]});
      peer.createDataChannel("x");
      await peer.setLocalDescription(await peer.createOffer());
      return "asked";
    }),
  ]);
  navigator.sendBeacon(http, "x");
  for (const rel of ["preload", "prefetch", "preconnect", "dns-prefetch", "stylesheet", "icon", "modulepreload"])
    element("link", {rel, href: http, as: "fetch"});
  element("iframe", {src: http});
  element("iframe", {src: "file:///etc/passwd"});
  element("iframe", {srcdoc: `<img src="${http}"><meta http-equiv="refresh" content="0;url=${http}">`});
  element("object", {data: http});
  element("video", {src: http});
  element("a", {href: http, ping: http, id: "leave", textContent: "away"});
  window.open(http);
  element("form", {action: http, method: "post", target: "_blank"}).submit();
  await new Promise(done => setTimeout(done, 700));
  return tried;
}"""


def test_a_page_reaches_nothing_of_the_host(loop, env, listener):
    """Requests, sockets, workers, frames, preloads, beacons, WebRTC, windows: no packet arrives."""

    async def play():
        await env.reset(task="menu")
        places = [f"http://127.0.0.1:{listener.port}/", f"ws://127.0.0.1:{listener.port}/", "127.0.0.1", listener.port]
        tried = await env.page.evaluate(ATTEMPTS, places)
        await env.screenshot()
        windows = len(env.page.context.pages)
        await env.page.evaluate("setTimeout(() => document.querySelector('#leave').click())")
        await eventually(lambda: env.page.url.startswith("chrome-error:"))
        return tried, windows, [frame.url for frame in env.page.frames]

    tried, windows, frames = loop.run(play())
    assert len(tried) == 11
    assert "REACHED" not in tried.values(), tried
    assert windows == 1
    assert not [frame for frame in frames if frame.startswith("file")]
    assert listener.visits() == 0


def test_an_allowed_site_cannot_lead_elsewhere(loop, listener, server, tmp_path):
    """A redirect, a preload header, a download and a file chooser of a site that is allowed."""
    chromium = Chromium(origins=[server])
    env = BrowserEnvironment(chromium)
    downloads: list[Any] = []

    async def play():
        await env.reset(f"{server}/")
        assert "hello" in await env.page.inner_text("body")
        assert await env.page.evaluate("fetch('/').then(answer => answer.status)") == 200
        with pytest.raises(ValueError, match="cannot be reached"):
            await env.goto(f"{server}/redirect")
        await env.goto(f"{server}/preload")
        await env.page.evaluate("location = '/redirect'")
        await eventually(lambda: env.page.url.startswith("chrome-error:"))
        await env.goto(f"{server}/")
        told = await env.page.evaluate("fetch('/redirect', {mode: 'no-cors'}).then(() => 'REACHED', () => 'refused')")
        env.page.on("download", lambda download: downloads.append(download))
        with pytest.raises(ValueError, match="cannot be reached"):
            await env.goto(f"{server}/download")
        await env.click(100, 25)  # the file chooser
        failure = await downloads[0].failure()
        await env.close()
        return told, failure

    told, failure = loop.run(play())
    assert told == "refused"
    assert failure is not None
    assert listener.visits() == 0


def test_without_the_allow_list_the_same_site_is_out_of_reach(loop, server):
    env = BrowserEnvironment(Chromium())

    async def play():
        with pytest.raises(EnvironmentFailure, match="origins"):
            await env.reset(f"{server}/")
        await env.close()

    loop.run(play())


def test_a_crash_is_a_failure_and_the_next_episode_is_not_harmed(loop, browser, env):
    """A page that dies, a page that hangs, a browser that is killed, and Playwright's own process."""

    async def after(harm):
        await env.reset(task="menu", seed=1)
        await harm()
        with pytest.raises(EnvironmentFailure):
            await env.click(10, 10)
        with pytest.raises(EnvironmentFailure):
            await env.get_reward()
        await env.reset(task="menu", seed=1)
        return (await env.click(20, 10)).size

    async def crash_page():
        with contextlib.suppress(Exception):
            await env.page.goto("chrome://crash", timeout=2000)

    async def hang():
        env._timeout = 1.0
        await env.page.evaluate("setTimeout(() => { while (true); }, 0)")

    async def kill(name):
        for process in descendants():
            if process.name().startswith(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        await asyncio.sleep(0.2)

    assert loop.run(after(crash_page)) == (640, 480)
    assert loop.run(after(lambda: kill("chrom"))) == (640, 480)
    assert loop.run(after(lambda: kill("node"))) == (640, 480)

    async def hung():
        await env.reset(task="menu", seed=1)
        await hang()
        with pytest.raises(EnvironmentFailure, match="1 s"):
            await env.click(10, 10)
        env._timeout = 30.0
        await env.reset(task="menu", seed=1)

    loop.run(hung())


def test_no_process_is_left_when_ours_is_killed():
    code = "import asyncio\nfrom agentrl.envs import Browser\nasync def play():\n  await Browser()().reset()\n"
    code += "  print('up', flush=True)\n  await asyncio.sleep(600)\nasyncio.run(play())"
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "up\n"
    started = psutil.Process(trainer.pid).children(recursive=True)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert len(started) >= 2
    wait_until(lambda: not any(map(alive, started)))
