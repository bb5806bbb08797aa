"""Environments that show pictures: of sizes that models refuse, broken, leaking, and to models that see none."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from agentrl.checks.environment import check_environment
from agentrl.checks.findings import Finding, Status
from agentrl.checks.images import check_pictures
from agentrl.checks.model import check_model
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Outcome, Trajectory
from tests.checks.test_environment import TASKS, Good
from tests.vision.helpers import family


class Shows(Good):
    """Shows a picture of the count, and after each call another one."""

    size = (56, 56)

    def reset(self, seed: int) -> Any:
        return [{"type": "text", "text": super().reset(seed)}, {"type": "image", "image": self._picture(0)}]

    def add(self, n: int) -> Any:
        """Add.

        Args:
            n: How much.
        """
        return self._picture(super().add(n))

    def _picture(self, number: int) -> Any:
        return Image.new("RGB", self.size, (number % 256, 9, 9))


def findings(factory: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in check_environment(factory, TASKS)}


def test_an_environment_that_shows_pictures_passes_every_check():
    found = findings(Shows)
    assert {f.status for f in found.values()} == {Status.PASS}, found
    assert "of up to 56 x 56 pixels" in found["images"].seen
    assert "images" not in findings(Good)


@pytest.mark.parametrize(
    ("size", "seen", "advice"),
    [((1, 40), "1 x 40 pixels", "at least 28 x 28"), ((4000, 3000), "4000 x 3000 pixels", "max_image_pixels")],
    ids=["tiny", "huge"],
)
def test_pictures_of_sizes_that_models_refuse_are_warned_of(size, seen, advice):
    shown = [{"role": "user", "content": [{"type": "image", "image": Image.new("L", size)}]}]
    [found] = check_pictures([Trajectory(TASKS[0], shown, [], [], [], [], [], Outcome.FINISHED)])
    assert (found.status, seen in found.seen, advice in found.advice) == (Status.WARN, True, True)


@pytest.mark.parametrize("first", [True, False], ids=["of reset", "of a tool"])
def test_a_broken_picture_fails_with_what_may_be_shown(first):
    class Broken(Shows):
        def _picture(self, number: int) -> Any:
            broken = {"type": "image", "image": b"\x89PNG broken"}
            if number == 0:
                return broken if first else super()._picture(number)
            return super()._picture(number) if first else [broken]

    found = findings(Broken)["images"]
    assert (found.status, "cannot be read" in found.seen) == (Status.FAIL, True)
    assert "a PIL image" in found.advice


def test_a_picture_that_leaks_from_one_episode_to_the_next_is_found():
    class Leaks(Shows):
        calls = 0

        def _picture(self, number: int) -> Any:
            self.calls += 1
            return super()._picture(self.calls)

    assert findings(Leaks)["leaks"].status is Status.FAIL


def of_model(processing_class: Any, factory: Any = Shows) -> dict[str, Finding]:
    room = {"max_completion_length": 4096, "max_context": 32768}
    found = check_model(processing_class, factory, TASKS[::4], model="tiny", shows_pictures=True, **room)
    return {finding.check: finding for finding in found}


def test_a_model_without_vision_fails_with_what_to_do():
    found = of_model(qwen_like_tokenizer("qwen3"))["images"]
    assert found.status is Status.FAIL
    assert "tiny sees none" in found.seen
    assert "vision-language model" in found.advice


def test_a_model_with_vision_passes_and_its_processor_refuses_what_it_cannot_take():
    _, processor = family("qwen2_5_vl")
    assert {f.status for f in of_model(processor).values()} == {Status.PASS}

    class Line(Shows):
        size = (1, 900)

    refused = of_model(processor, Line)["episodes"]
    assert (refused.status, "ImageError" in refused.seen) == (Status.FAIL, True)
