"""One Chromium for all instances of an environment, and in it a fresh context for each episode.

A context has nothing of another one: cookies, storage, caches, zoom. It is made while the last episode is still being
played, so `reset` does not wait for it. The browser starts with the first page that is wanted, ends with the last
environment that is closed, and is started anew when it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import os
import shutil
from collections.abc import Awaitable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from agentrl.envs.browser.origins import PAGES, network_flags, origin, permitted, read_origins
from agentrl.errors import ConfigurationError, EnvironmentFailure

if TYPE_CHECKING:
    from playwright.async_api import Page, Route, WebSocketRoute

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 60.0
NOW = "2026-01-01T12:00:00Z"
"""What a page's clock says."""

STEADY = [
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--disable-lcd-text",
    "--disable-smooth-scrolling",
]
"""The same pixels on every machine that has the same fonts."""


class Chromium:
    """Chromium as environments use it: where it is, how large its pages are and what they may reach.

    Args:
        pages: A folder whose files are served at `http://pages.test/`, from memory. Read once.
        origins: What pages may reach besides: `http://127.0.0.1:8000`, say. Redirects to other places lead nowhere.
        executable: The program; found on the PATH by default.
        width: Of the page, in pixels.
        height: Of the page.
        sandbox: Whether Chromium's own sandbox for renderers is on; by default unless this process is root, for whom
            Chromium refuses. It needs user namespaces.

    Raises:
        ConfigurationError: Playwright or Chromium is not installed, or an argument makes no sense.
    """

    def __init__(
        self,
        pages: Path | str | None = None,
        *,
        origins: Iterable[str] = (),
        executable: Path | str | None = None,
        width: int = 640,
        height: int = 480,
        sandbox: bool | None = None,
    ) -> None:
        self.origins = read_origins(origins)
        self.files = _read_folder(Path(pages)) if pages is not None else {}
        self.executable = _find(executable)
        self.size = width, height
        self.sandbox = os.geteuid() != 0 if sandbox is None else sandbox
        self._live: _Live | None = None
        if not (100 <= width <= 4096 and 100 <= height <= 4096):
            raise ConfigurationError(f"a page of {width} x {height} pixels: both must be from 100 to 4096")

    async def fresh_page(self, user: object, seed: int) -> Page:
        """An empty page in a context of its own; the one that `user` had before is gone.

        Args:
            user: Whose it is; must call `leave` in the end.
            seed: What `Math.random` of its pages starts from.

        Raises:
            EnvironmentFailure: Chromium does not start or does not answer.
        """
        from playwright.async_api import Error

        loop = asyncio.get_running_loop()
        if self._live is None or self._live.loop is not loop:
            self._live = _Live(self, loop)  # what belonged to a loop that has ended, ended with it
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._live.fresh_page(user, seed)
        except (Error, TimeoutError) as error:
            raise EnvironmentFailure(f"{self.executable} gave no page: {_first_line(error)}") from error

    async def leave(self, user: object) -> None:
        """Close the page of `user`, and the browser if nobody else has one."""
        live = self._live
        if live is not None and live.loop is asyncio.get_running_loop():
            await live.leave(user)

    def answer(self, url: str) -> tuple[int, str, bytes]:
        """Status, content type and body of an address at `http://pages.test`."""
        path = unquote(urlsplit(url).path).lstrip("/")
        body = self.files.get(path)  # a key, never a path
        if body is None:
            return 404, "text/plain", b"There is no such page."
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        return 200, f"{kind}; charset=utf-8" if kind.startswith("text/") else kind, body


class _Live:
    """A running browser, on one event loop."""

    def __init__(self, options: Chromium, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._options = options
        self._lock = asyncio.Lock()
        self._playwright: Any = None
        self._browser: Any = None
        self._spare: asyncio.Task[Page] | None = None
        self._pages: dict[int, Page] = {}
        self._users: set[int] = set()

    async def fresh_page(self, user: object, seed: int) -> Page:
        from playwright.async_api import Error

        await self._drop(user)
        browser, coming = await self._take(user)
        try:
            page = await _seeded(coming, seed)
        except Error as error:
            if "closed" not in error.message:
                raise
            async with self._lock:  # it has died and did not tell
                if self._browser is browser:
                    await self._stop()
            _, coming = await self._take(user)
            page = await _seeded(coming, seed)
        self._pages[id(user)] = page
        return page

    async def _take(self, user: object) -> tuple[Any, asyncio.Future[Page]]:
        """The running browser and a page of it to come; the next one is begun."""
        async with self._lock:
            self._users.add(id(user))
            if self._browser is None or not self._browser.is_connected():
                await self._stop()
                await self._start()
            coming = self._spare or asyncio.ensure_future(self._new_page())
            self._spare = asyncio.ensure_future(self._new_page())
            self._spare.add_done_callback(lambda spare: spare.cancelled() or spare.exception())  # its taker is told
            return self._browser, coming

    async def leave(self, user: object) -> None:
        async with self._lock:
            self._users.discard(id(user))
            if self._users:
                await self._drop(user)
            else:
                await self._stop()

    async def _drop(self, user: object) -> None:
        page = self._pages.pop(id(user), None)
        if page is not None:
            with contextlib.suppress(Exception):  # it died before
                await page.context.close()

    async def _start(self) -> None:
        from playwright.async_api import async_playwright

        self._playwright = await async_playwright().start()
        self._browser = await self._playwright.chromium.launch(
            executable_path=self._options.executable,
            chromium_sandbox=self._options.sandbox,
            args=[*network_flags(self._options.origins), *STEADY],
            ignore_default_args=["--hide-scrollbars"],  # they tell the agent that there is more
            env={name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ} | {"TZ": "UTC"},
        )

    async def _stop(self) -> None:
        spare, self._spare = self._spare, None
        browser, self._browser = self._browser, None
        playwright, self._playwright = self._playwright, None
        self._pages.clear()
        if spare is not None:
            spare.cancel()
            await asyncio.wait([spare])
        for ended in (browser and browser.close, playwright and playwright.stop):
            if ended:
                with contextlib.suppress(Exception):  # it has died
                    await ended()

    async def _new_page(self) -> Page:
        width, height = self._options.size
        context = await self._browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=1,
            locale="en-US",
            timezone_id="UTC",
            color_scheme="light",
            reduced_motion="reduce",
            accept_downloads=False,
            service_workers="block",
        )
        try:
            await context.clock.set_fixed_time(NOW)
            await context.route("**/*", self._guard)
            await context.route_web_socket("**/*", self._guard_socket)
            page = await context.new_page()
        except BaseException:  # also when its taker was cancelled
            await context.close()
            raise
        context.on("page", _close_quietly)  # a page that opens windows opens none
        page.on("filechooser", lambda chooser: None)  # handled, that is, not shown
        return page

    async def _guard(self, route: Route) -> None:
        url = route.request.url
        if origin(url) == origin(PAGES):
            status, kind, body = self._options.answer(url)
            await route.fulfill(status=status, content_type=kind, body=body)
        elif permitted(url, self._options.origins):
            await route.continue_()
        else:
            await route.abort("blockedbyclient")

    async def _guard_socket(self, socket: WebSocketRoute) -> None:
        if permitted(socket.url, self._options.origins):
            socket.connect_to_server()
        else:
            await socket.close(code=1008, reason="not allowed")


async def _seeded(coming: Awaitable[Page], seed: int) -> Page:
    page = await coming
    script = (files("agentrl.envs.browser") / "init.js").read_text(encoding="utf-8")
    await page.add_init_script(script.replace("SEED", str(seed % 2**32)))
    return page


async def _close_quietly(page: Page) -> None:
    with contextlib.suppress(Exception):
        await page.close()


def _find(executable: Path | str | None) -> str:
    try:
        import playwright.async_api  # noqa: F401
    except ImportError as error:
        raise ConfigurationError('the browser needs Playwright: pip install "agentrl[browser]"') from error
    wanted = [str(executable)] if executable is not None else PROGRAMS
    found = next(filter(None, map(shutil.which, wanted)), None)
    if found is None:
        raise ConfigurationError(
            f"there is no program {' or '.join(wanted)}; install Chromium (Debian: apt install chromium "
            "fonts-dejavu-core) or give its path as `executable`"
        )
    return found


def _read_folder(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder} of pages")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
