"""The pictures of the pages are there, and the drawn ones are readable on light and dark and fetch nothing."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from tests.docs.test_snippets import FILES, ROOT

SVG = "{http://www.w3.org/2000/svg}"


def pictures() -> set[Path]:
    return {
        (path.parent / name).resolve()
        for path in FILES
        for name in re.findall(r"!\[[^\]]*\]\(([^):]+)\)", path.read_text(encoding="utf-8"))
    }


def test_every_picture_is_there_and_every_picture_is_shown() -> None:
    assert pictures() == set((ROOT / "docs" / "images").iterdir())


def test_drawings_are_whole_and_of_light_and_dark() -> None:
    drawn = [path for path in pictures() if path.suffix == ".svg"]
    assert [path.name for path in drawn] == ["how-it-works.svg"]
    for path in drawn:
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{SVG}svg"
        assert root.find(f"{SVG}title") is not None
        assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8")
        assert not [element for element in root.iter() if "href" in " ".join(element.keys())]
