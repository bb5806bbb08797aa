"""The pictures that an environment shows: whether they can be read, and whether models can take them.

Environments are played here without a model, so pictures are rendered in words: their size, and a name for their
pixels, by which two of them are told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image as Picture

from agentrl.chat.forks import Continuation
from agentrl.chat.renderer import Renderer
from agentrl.checks.findings import Finding, failed, passed, warned
from agentrl.rollout.journal.values import digest
from agentrl.types import Encoded, Trajectory

SMALLEST = 28
"""Pixels of a side: two patches of the usual vision towers, below which several processors refuse a picture."""
LARGEST = 2048 * 2048
"""Pixels of a picture, some thousands of tokens for models that keep the resolution."""
UNREADABLE = "show a PIL image, the bytes of a PNG, JPEG, WEBP, GIF or BMP file, or a pathlib.Path"


class DescribingRenderer(Renderer):
    """Renders pictures in words."""

    def encode_prompt(self, prompt: Any, tools: Any) -> Encoded:
        """Encode a prompt; see `Renderer.encode_prompt`."""
        return super().encode_prompt(in_words(prompt), tools)

    def continuation(self, prompt: Any, completion: Any, results: Any, sampled: Any, tools: Any) -> Continuation:
        """Encode what follows a turn; see `Renderer.continuation`."""
        return super().continuation(in_words(prompt), in_words(completion), in_words(results), sampled, tools)


def in_words(value: Any) -> Any:
    """Messages, or parts of them, with a text block in the place of each picture."""
    if isinstance(value, list):
        return [in_words(item) for item in value]
    if not isinstance(value, dict):
        return value
    picture = value.get("image")
    if isinstance(picture, Picture.Image):
        return {"type": "text", "text": f"[picture of {_size(picture)}, {digest(picture)[:12]}]"}
    return {name: in_words(item) for name, item in value.items()}


def pictures_of(trajectories: Sequence[Trajectory]) -> list[Picture.Image]:
    """All pictures that were shown."""
    return [picture for t in trajectories for picture in _pictures([t.prompt, t.completion])]


def _pictures(value: Any) -> Iterator[Picture.Image]:
    if isinstance(value, Picture.Image):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _pictures(item)


def check_pictures(trajectories: Sequence[Trajectory]) -> Iterator[Finding]:
    """Look at the sizes of the pictures that were shown; says nothing where there are none."""
    pictures = pictures_of(trajectories)
    if not pictures:
        return
    tiny = min(pictures, key=lambda picture: min(picture.size))
    huge = max(pictures, key=lambda picture: picture.width * picture.height)
    if min(tiny.size) < SMALLEST:
        yield warned(
            "images",
            f"a picture of {_size(tiny)} pixels was shown; several processors refuse sides below {SMALLEST}",
            f"draw it larger, at least {SMALLEST} x {SMALLEST}; with --model the model's own processor is asked",
        )
    if huge.width * huge.height > LARGEST:
        yield warned(
            "images",
            f"a picture of {_size(huge)} pixels was shown, which may take thousands of tokens",
            "make it smaller in the environment, or set max_image_pixels: pictures count as completion",
        )
    if min(tiny.size) >= SMALLEST and huge.width * huge.height <= LARGEST:
        yield passed("images", f"{len(pictures)} pictures were shown, of up to {_size(huge)} pixels")


def check_sight(renderer: Renderer, model: str) -> Finding | None:
    """Whether a model sees the pictures that an environment shows; None if it does."""
    if renderer.sees_images:
        return None
    return failed(
        "images",
        f"the environment shows pictures, and {model} sees none",
        "take a vision-language model, or describe in text what the pictures show",
    )


def unreadable(where: str, error: str) -> Finding:
    """What is said of a picture that cannot be read or processed."""
    return failed("images", f"{where}: {error}", UNREADABLE)


def _size(picture: Picture.Image) -> str:
    return f"{picture.width} x {picture.height}"
