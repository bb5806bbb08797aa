"""An environment whose rollouts have a page each: they see it as pictures, and act with mouse and keyboard."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from PIL import Image

from agentrl.envs.browser.chromium import Chromium
from agentrl.envs.browser.cursor import with_cursor
from agentrl.envs.browser.origins import permitted
from agentrl.errors import EnvironmentFailure

if TYPE_CHECKING:
    from playwright.async_api import Page

MAX_TEXT = 2000
MAX_SCROLL = 10_000
DRAG_STEPS = 5
ERROR_PAGE_MS = 2000.0
_NO_PAGE = ("net::", "Download is starting")
_MODIFIERS = ("Alt", "Control", "Meta", "Shift")
_TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"

Action = Callable[["Page"], Awaitable[object]]


class BrowserEnvironment:
    """Gives the model a page and the tools `screenshot`, `click`, `type`, `press`, `scroll`, `drag` and `goto`.

    Each of them shows the page as it is afterwards, with the mouse pointer. Derive from it: extend `reset`, and write
    `get_reward` to look at `self.page`. A tool that is not wanted is set to None in the class (`goto = None`).

    Args:
        chromium: Where pages come from; one for all instances.
        timeout: Seconds that one action may take until the browser counts as broken.
    """

    def __init__(self, chromium: Chromium, *, timeout: float = 30.0) -> None:
        self._chromium = chromium
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._page: Page | None = None
        self._pointer = 0, 0
        self._crashed = False

    @property
    def page(self) -> Page:
        """The rollout's page, as Playwright's async API has it."""
        if self._page is None:
            raise EnvironmentFailure(
                f"{type(self).__name__} has no page; a `reset` of yours must await super().reset()"
            )
        return self._page

    async def reset(self, url: str, seed: int = 0) -> Any:
        """Open an address in a fresh context, and show it.

        Args:
            url: The address; the browser must be allowed to reach it.
            seed: What `Math.random` of the page starts from.
        """
        if not permitted(url, self._chromium.origins):
            raise EnvironmentFailure(f"the task's address {url!r} is at none of the browser's `origins`")
        self._pointer, self._crashed = (0, 0), False
        self._page = page = await self._chromium.fresh_page(self, seed)
        page.on("crash", self._note_crash)
        return [{"type": "image", "image": await self._act(lambda page: page.goto(url))}]

    async def close(self) -> None:
        """Close the page; the browser ends with the last of them."""
        self._page = None
        await self._chromium.leave(self)

    async def screenshot(self) -> Image.Image:
        """Look at the page.

        Returns:
            The page.
        """
        return await self._act(None)

    async def click(self, x: int, y: int) -> Image.Image:
        """Click with the left mouse button.

        Args:
            x: Pixels from the left.
            y: Pixels from the top.

        Returns:
            The page.
        """
        self._check_point(x, y)

        async def act(page: Page) -> None:
            self._pointer = x, y
            await page.mouse.click(x, y)

        return await self._act(act)

    async def type(self, text: str) -> Image.Image:
        """Type text into the field that has the focus.

        Args:
            text: The text; a line break presses Enter.

        Returns:
            The page.
        """
        if len(text) > MAX_TEXT:
            raise ValueError(f"the text has {len(text)} characters; at most {MAX_TEXT} can be typed at once")
        text.encode()  # half a surrogate pair is on no keyboard
        return await self._act(lambda page: page.keyboard.type(text))

    async def press(self, key: str) -> Image.Image:
        """Press a key or a combination of keys.

        Args:
            key: Such as Enter, Tab, Backspace, ArrowDown or Control+a.

        Returns:
            The page.
        """

        async def act(page: Page) -> None:
            from playwright.async_api import Error

            try:
                await page.keyboard.press(key)
            except Error as error:
                if "Unknown key" not in error.message:
                    raise
                for modifier in _MODIFIERS:  # those in front of the unknown key are down
                    await page.keyboard.up(modifier)
                raise ValueError(f"there is no key {key!r}; some are Enter, Tab, Escape, ArrowUp, Control+a") from error

        return await self._act(act)

    async def scroll(self, dx: int, dy: int) -> Image.Image:
        """Turn the mouse wheel where the pointer is.

        Args:
            dx: Pixels to the right; negative to the left.
            dy: Pixels down; negative up.

        Returns:
            The page.
        """
        if max(abs(dx), abs(dy)) > MAX_SCROLL:
            raise ValueError(f"at most {MAX_SCROLL} pixels can be scrolled at once")
        return await self._act(lambda page: page.mouse.wheel(dx, dy))

    async def drag(self, x1: int, y1: int, x2: int, y2: int) -> Image.Image:
        """Press the left mouse button at one point, move the mouse and release it at another.

        Args:
            x1: Pixels from the left, where it is pressed.
            y1: Pixels from the top, where it is pressed.
            x2: Pixels from the left, where it is released.
            y2: Pixels from the top, where it is released.

        Returns:
            The page.
        """
        self._check_point(x1, y1)
        self._check_point(x2, y2)

        async def act(page: Page) -> None:
            self._pointer = x2, y2
            await page.mouse.move(x1, y1)
            await page.mouse.down()
            await page.mouse.move(x2, y2, steps=DRAG_STEPS)
            await page.mouse.up()

        return await self._act(act)

    async def goto(self, url: str) -> Image.Image:
        """Go to an address.

        Args:
            url: The whole address, with http:// in front.

        Returns:
            The page.
        """
        if not permitted(url, self._chromium.origins):
            raise ValueError(f"the address {url!r} cannot be reached")

        async def act(page: Page) -> None:
            from playwright.async_api import Error

            try:
                await page.goto(url)
            except Error as error:
                # A server that is down is the world's fault; what leads out of the world or to a download is not.
                if "net::ERR_CONNECTION" in error.message or not any(each in error.message for each in _NO_PAGE):
                    raise
                with contextlib.suppress(Error):  # Chromium's own page about it, which would cut the next one off
                    if "net::ERR_ABORTED" not in error.message and "net::" in error.message:
                        await page.wait_for_url("chrome-error:**", timeout=ERROR_PAGE_MS)
                raise ValueError(f"the address {url!r} cannot be reached") from error

        return await self._act(act)

    async def _act(self, action: Action | None) -> Image.Image:
        """Act, wait until the page is at rest, and look. The calls of one turn run one after the other.

        Raises:
            EnvironmentFailure: The page or the browser has died, or does not answer.
        """
        async with self._turn:
            return await self._run(lambda page: self._act_and_look(page, action))

    async def _run(self, work: Callable[[Page], Awaitable[Any]]) -> Any:
        """Do something with the page; whatever Playwright says of it is a failure of the environment."""
        from playwright.async_api import Error

        page = self.page
        try:
            if self._crashed:
                raise EnvironmentFailure("the page has crashed")
            async with asyncio.timeout(self._timeout):
                return await work(page)
        except TimeoutError as error:
            raise EnvironmentFailure(f"the browser did not answer within {self._timeout:g} s") from error
        except Error as error:
            raise EnvironmentFailure(f"the browser failed: {error.message.splitlines()[0]}") from error

    async def _act_and_look(self, page: Page, action: Action | None) -> Image.Image:
        if action is not None:
            await action(page)
            await _settle(page)
        data = await page.screenshot(animations="disabled", timeout=1000 * self._timeout)
        return with_cursor(Image.open(io.BytesIO(data)), *self._pointer)

    def _check_point(self, x: int, y: int) -> None:
        width, height = self._chromium.size
        if not (0 <= x < width and 0 <= y < height):
            raise ValueError(f"({x}, {y}) is outside of the page, which is {width} pixels wide and {height} high")

    def _note_crash(self, page: Page) -> None:
        if page is self._page:
            self._crashed = True


async def _settle(page: Page) -> None:
    """Wait until what an action set off is drawn, or the page that it led to is there."""
    from playwright.async_api import Error

    with contextlib.suppress(Error):  # the page went away: there is another one to wait for
        await page.evaluate(_TWO_FRAMES)
    await page.wait_for_load_state("load")
