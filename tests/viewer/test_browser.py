"""The viewer's page in a real Chromium: what is seen, the keys, addresses, hostile content, both ways to get it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from agentrl.viewer.page import write_page
from agentrl.viewer.server import listen, make_app
from agentrl.viewer.shown import Shown
from tests.rollout.test_program_journal import play
from tests.viewer.browser import chromium, open_page, settled
from tests.viewer.journals import fill
from tests.viewer.test_viewer import hostile

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("chromium")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    shown = Shown(folders)
    server = uvicorn.Server(uvicorn.Config(make_app(shown), log_level="warning"))
    with listen(0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
            shown.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [fill(tmp_path_factory.mktemp(name), steps=4, groups=2, members=4, seed=n) for n, name in enumerate("ab")]


@pytest.fixture(scope="module")
def address(folders: list[Path]) -> Iterator[str]:
    with served(*folders) as address:
        yield address


def in_one_file(folder: Path, *folders: Path) -> str:
    write_page(Shown(folders), folder / "out.html", most=500)
    return (folder / "out.html").as_uri()


@pytest.mark.parametrize("one_file", [False, True])
def test_every_page_is_drawn(browser: Any, address: str, folders: list[Path], one_file: bool, tmp_path: Path) -> None:
    """Overview, list, group and rollout, served and out of one file, without a complaint or a horizontal scroll bar."""
    page, complaints = open_page(browser, in_one_file(tmp_path, *folders) if one_file else address)
    assert page.locator(".runs tbody tr").count() == 2
    assert page.locator(".chart svg").count() >= 10
    of_step, of_rollout = page.locator(".times .time").all_inner_texts()[:2]
    assert all(part in of_step for part in ("rollouts", "rewards", "handing weights over", "training"))
    assert all(part in of_rollout for part in ("reset", "prefill", "decode", "tools", "reward", "waiting"))
    settled(page, "#/rollouts")
    assert page.locator(".summary").inner_text().startswith("64 of 64 rollouts")
    settled(page, "#/group/0/0/1")
    page.wait_for_selector(".card .step, .card .text")
    assert page.locator(".card").count() == 4
    settled(page, "#/rollout/0/0/1")
    assert page.locator(".message.model").count() >= 1
    for tab, selector in [("tokens", ".token.l0"), ("ids", ".ids"), ("exact", ".exact"), ("task", ".columns")]:
        settled(page, f"#/rollout/0/0/1?tab={tab}")
        assert page.locator(selector).count(), tab
        for width in (1280, 800):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (tab, width)
    page.hover(".tabs")
    assert complaints == []


def test_filters_and_keys_and_addresses(browser: Any, address: str) -> None:
    page, complaints = open_page(browser, f"{address}#/rollouts?run=0.1&max=0.5")
    assert page.locator("a.line").count() > 0
    rewards = page.locator("a.line .strong").all_inner_texts()
    assert all(float(reward) <= 0.5 for reward in rewards)
    page.keyboard.press("j")
    second = page.locator("a.line").nth(1).get_attribute("href").split("?")[0]
    assert page.locator("a.line[aria-selected=true]").get_attribute("href").startswith(second)
    page.keyboard.press("Enter")
    page.wait_for_selector(".page.rollout")
    assert page.url.split("#")[1].split("?")[0] == second[1:]
    assert "max=0.5" in page.url
    page.keyboard.press("j")
    page.wait_for_url(lambda url: second not in url)
    page.keyboard.press("g")
    page.wait_for_selector(".card")
    page.keyboard.press("u")
    page.wait_for_selector(".list")
    assert "max=0.5" in page.url, "a filter goes along from page to page"
    page.keyboard.press("/")
    page.keyboard.type("game server")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "text=game" in url)
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    page.wait_for_selector(".charts")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    assert complaints == []


@pytest.mark.parametrize(
    ("choice", "column", "value"), [("outcome=truncated", "outcome", "truncated"), ("tool=add", "tools", ["add"])]
)
def test_rollouts_are_chosen_by_outcome_and_by_tool(
    browser: Any, address: str, choice: str, column: str, value: Any
) -> None:
    listed = httpx.get(f"{address}api/rollouts/0").json()
    wanted = sum(row[listed["columns"].index(column)] == value for row in listed["rows"])
    page, complaints = open_page(browser, f"{address}#/rollouts?run=0.1&{choice}")
    assert page.locator(".summary").inner_text().startswith(f"{wanted} of {len(listed['rows']) * 2} rollouts")
    assert complaints == []


def test_tokens_are_coloured_by_mask_and_by_advantage_and_turns_have_their_weights(browser: Any, address: str) -> None:
    shown = "[...document.querySelectorAll('.token')].filter(token => !token.closest('.legend'))"
    page, complaints = open_page(browser, f"{address}#/rollout/0/0/1?tab=tokens&colour=mask")

    def count(shade: str) -> int:
        return page.evaluate(f"{shown}.filter(token => /{shade}/.test(token.className)).length")

    sampled, given = count("m1"), count("m0")
    assert min(sampled, given) > 0
    settled(page, "#/rollout/0/0/1?tab=tokens&colour=advantage")
    assert (count("[np][0-4]"), count("m0")) == (sampled, given)
    settled(page, "#/rollout/0/0/1")
    assert "weights " in page.locator("main").inner_text()
    assert complaints == []


def test_dark_and_light(browser: Any, address: str) -> None:
    """As the system has it, until it is chosen; the choice is kept."""
    ground = "getComputedStyle(document.body).backgroundColor"
    page, _ = open_page(browser, address, color_scheme="dark")
    dark = page.evaluate(ground)
    page.keyboard.press("t")
    assert page.evaluate(ground) != dark
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.evaluate(ground) != dark


@pytest.mark.parametrize("one_file", [False, True])
def test_hostile_content_is_harmless(browser: Any, one_file: bool, tmp_path: Path) -> None:
    """No script runs, no dialog opens, nothing is fetched; what is not seen is made visible; 5 MB are shown."""
    folder = hostile(tmp_path)
    with served(folder) as address:
        page, complaints = open_page(browser, in_one_file(tmp_path, folder) if one_file else address)
        for hash_ in (
            "rollouts",
            "rollouts?text=%3Cscript%3E",
            "group/0/0/1",
            "rollout/0/0/1",
            "rollout/0/0/1?tab=task",
        ):
            settled(page, f"#/{hash_}")
            assert page.locator("main script, main [onerror], main [onload]").count() == 0
        settled(page, "#/rollout/0/0/1")
        text = page.locator(".message.model .text").first.inner_text()
        assert "<script>alert(1)</script>" in text
        assert "␀␛[31m" in text
        assert "⟨U+202E⟩evil⟨U+202C⟩" in text
        assert page.locator(".message img").count() == 1
        settled(page, "#/rollout/0/0/2?full=1")
        shown = page.evaluate("document.querySelector('.message.model .text').textContent.length")
        assert shown > (20_000 if one_file else 5_000_000)
        assert complaints == []
        settled(page, "#/rollout/0/0/3")
        page.wait_for_selector("text=an image that cannot be shown")


def test_what_a_program_said_stands_between_its_turns(browser: Any, tmp_path: Path) -> None:
    """The rollout of an agent that owns its loop: prompt, turns and the program's messages in their order."""
    record = play(tmp_path)[1].record
    with served(tmp_path) as address:
        page, complaints = open_page(browser, address)
        settled(page, f"#/rollout/0/0/{record}")
        headings = page.locator(".conversation .message h3").all_inner_texts()
        assert [heading.split()[:2] for heading in headings] == [
            *(["user"], ["Turn", "1"], ["user"], ["Turn", "2"], ["Turn", "3"])
        ]
        assert page.locator(".conversation .message").nth(2).inner_text().endswith("more")
        settled(page, f"#/group/0/0/{record}")
        page.locator(".card").nth(1).get_by_text("→ more").wait_for()
        assert complaints == []
