"""The browser's parts that need no Chromium: what may be reached, the pointer, the pages' files; and reading plots."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from PIL import Image

from agentrl.envs import PlotReading
from agentrl.envs.browser import Browser, Chromium
from agentrl.envs.browser.cursor import with_cursor
from agentrl.envs.browser.origins import network_flags, origin, permitted, read_origins
from agentrl.envs.plots import draw_bars
from agentrl.errors import ConfigurationError
from agentrl.rollout.environments import EnvironmentSpec
from agentrl.testing.browsing import SCRIPTS
from agentrl.tools import ImageTool

PAGES = Path(str(files("agentrl.envs.browser") / "pages"))
ALLOWED = read_origins(["http://127.0.0.1:8000", "https://Example.org/"])


@pytest.fixture
def installed(monkeypatch):
    """As if Chromium were there; nothing starts it."""
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")


@pytest.mark.parametrize(
    "url",
    [
        "http://pages.test/form.html",
        "http://pages.test:80/form.html",
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8000/a?b=http://elsewhere.org#c",
        "ws://127.0.0.1:8000/socket",
        "https://example.org:443/",
        "HTTPS://EXAMPLE.ORG/",
    ],
)
def test_what_is_allowed_is_permitted(url):
    assert permitted(url, ALLOWED)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "form.html",
        "//127.0.0.1:8000/",
        "file:///etc/passwd",
        "file://127.0.0.1:8000/etc/passwd",
        "data:text/html,<h1>x</h1>",
        "blob:http://127.0.0.1:8000/x",
        "javascript:alert(1)",
        "about:blank",
        "chrome://settings",
        "view-source:http://127.0.0.1:8000/",
        "filesystem:http://127.0.0.1:8000/x",
        "http://127.0.0.1/",
        "http://127.0.0.1:8001/",
        "https://127.0.0.1:8000/",
        "http://localhost:8000/",
        "http://2130706433:8000/",
        "http://[::ffff:127.0.0.1]:8000/",
        "http://example.org/",
        "https://example.org.evil.net/",
        "https://evil.net\\@example.org/",
        "https://example.org@evil.net/",
        "https://user@example.org/",
        "https://example.org:443x/",
        "https://exam\nple.org/",
        " https://example.org/",
        "https://example.org\x00.evil.net/",
        "https://example。org/",
        "http://pages.test:81/",
    ],
)
def test_everything_else_is_refused(url):
    assert not permitted(url, ALLOWED)


@pytest.mark.parametrize(
    "entry", ["127.0.0.1:8000", "*", "http://*", "file:///", "http://a.org/shop", "http://a.org?x", "http://u@a.org"]
)
def test_an_origin_is_scheme_host_and_port(entry):
    with pytest.raises(ConfigurationError, match="origin"):
        read_origins([entry])
    with pytest.raises(ConfigurationError, match="list"):
        read_origins("http://a.org")


def test_the_network_has_no_other_way_out():
    flags = network_flags(read_origins(["http://127.0.0.1:8000", "http://[::1]:9"]))
    assert "--proxy-bypass-list=<-loopback>;127.0.0.1:8000;[::1]:9" in flags
    assert "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE [::1]" in flags
    assert "--proxy-bypass-list=<-loopback>" in network_flags(frozenset())
    assert "--host-resolver-rules=MAP * ~NOTFOUND" in network_flags(frozenset())


def test_the_pointer_is_drawn_on_a_copy():
    page = Image.new("RGB", (60, 40), "white")
    shown = with_cursor(page, 20, 10)
    assert page.getcolors() == [(2400, (255, 255, 255))]
    assert shown.getpixel((22, 16)) == (0, 0, 0)
    dark = [(x, y) for x in range(60) for y in range(40) if shown.getpixel((x, y)) == (0, 0, 0)]
    assert min(x for x, _ in dark) >= 20
    assert min(y for _, y in dark) >= 10
    assert with_cursor(page, 59, 39).size == page.size  # half outside


@pytest.mark.parametrize("path", sorted(PAGES.iterdir()), ids=lambda path: path.name)
def test_a_page_refers_to_nothing_outside(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(
        r"https?:|//[a-z]|@import|url\(|\bfetch\b|XMLHttp|import\s|Date\b|innerHTML|<select|setTimeout", text
    )
    for name in re.findall(r"(?:src|href)=[\"']?([^\"' >]+)", text):
        assert (PAGES / name).is_file()
    if path.suffix == ".html":
        assert "agentrl.instruction =" in text
        assert "agentrl.success =" in text


@pytest.mark.usefixtures("installed")
def test_every_shipped_task_has_a_script_and_a_row():
    browser = Browser()
    assert set(browser.names) == set(SCRIPTS)
    assert browser.tasks()["task"] == list(browser.names)
    assert browser.tasks(["menu", "form"], repeat=2)["task"] == ["menu", "form"] * 2
    with pytest.raises(ConfigurationError, match=r"\['forms'\].*checkboxes"):
        browser.tasks(["forms"])


@pytest.mark.usefixtures("installed")
def test_an_instance_is_an_environment_before_any_browser_runs():
    spec = EnvironmentSpec.of(Browser()())
    assert sorted(spec.tools) == ["click", "drag", "goto", "press", "screenshot", "scroll", "type"]
    assert spec.has_reward
    assert spec.class_name == "BrowserTask"


def test_a_missing_chromium_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(ConfigurationError, match="apt install chromium"):
        Browser()
    with pytest.raises(ConfigurationError, match="/opt/chrome"):
        Chromium(executable="/opt/chrome")


@pytest.mark.usefixtures("installed")
def test_bad_arguments_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigurationError, match="no folder"):
        Browser(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=r"NAME\.html"):
        Browser(tmp_path)
    with pytest.raises(ConfigurationError, match="10 x 480"):
        Browser(width=10)


@pytest.mark.usefixtures("installed")
def test_pages_are_keys_and_never_paths(tmp_path):
    """Nothing of the host is reachable by a page's address."""
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "a b.html").write_text("<p>é")
    chromium = Chromium(folder)
    assert chromium.answer("http://pages.test/a%20b.html?x#y") == (200, "text/html; charset=utf-8", "<p>é".encode())
    for path in ("../secret", "%2e%2e/secret", "/secret", str(tmp_path / "secret"), ""):
        assert chromium.answer(f"http://pages.test/{path}")[0] == 404


def test_a_plot_can_be_read_from_its_pixels():
    """The picture holds the value: the height of the bar, against the axis."""
    env = PlotReading()
    text, image = env.reset(seed=3)
    pixels = image["image"].load()
    blue = (0x3B, 0x6E, 0xA5)
    tops = [min((y for y in range(160) if pixels[x, y] == blue), default=None) for x in range(224)]
    starts = [x for x in range(1, 224) if tops[x] is not None and tops[x - 1] is None]
    asked = "ABCDEFGH".index(re.search(r"bar (\w)", text["text"])[1])
    value = round((140 - tops[starts[asked] + 1]) * 50 / 128)
    assert env.get_reward(f"It is {value}") == 1.0
    assert env.get_reward(f"It is {value + 1}.") == env.get_reward("none") == env.get_reward(None) == 0.0


def test_a_plot_is_drawn_from_its_seed():
    env = PlotReading()
    first, again, other = (env.reset(seed=seed)[1]["image"].tobytes() for seed in (1, 1, 2))
    assert first == again != other


def test_looking_closer():
    env = PlotReading()
    env.reset(seed=0)
    assert env.crop(10, 20, 60, 50).size == (50, 30)
    assert env.zoom(0, 0, 4).size == (224, 160)
    assert env.zoom(223, 159, 3).size == (222, 159)
    before = env.crop(0, 0, 224, 160).tobytes()
    assert env.draw("line", 0, 5, 223, 5).getpixel((100, 5)) == (255, 0, 0)
    assert env.crop(0, 0, 224, 160).tobytes() != before  # it stays
    spec = EnvironmentSpec.of(env)
    assert sorted(spec.tools) == ["crop", "draw", "zoom"]


@pytest.mark.parametrize(
    "call",
    [
        lambda tool: tool.crop(0, 0, 11, 5),
        lambda tool: tool.crop(5, 0, 5, 5),
        lambda tool: tool.crop(-1, 0, 5, 5),
        lambda tool: tool.zoom(10, 0, 2),
        lambda tool: tool.zoom(0, 0, 0),
        lambda tool: tool.zoom(0, 0, 10**9),
        lambda tool: tool.draw("heart", 0, 0, 1, 1),
    ],
)
def test_a_bad_request_is_told_to_the_model(call):
    with pytest.raises(ValueError, match=r"image|factor|shape"):
        call(ImageTool(Image.new("RGB", (10, 10))))


def test_zoom_shows_the_same_picture_larger():
    image = draw_bars([10, 50], 50)
    zoomed = ImageTool(image).zoom(100, 100, 2)
    assert zoomed.size == image.size
    assert zoomed.getpixel((112, 80)) == image.getpixel((100, 100))


def test_an_origin_is_normal():
    assert origin("https://A.org:443/x") == origin("wss://a.org/y") == "https://a.org:443"
    assert origin("http://[::1]:8080/") == "http://[::1]:8080"
