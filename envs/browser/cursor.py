"""The mouse pointer, which screenshots do not show."""

from __future__ import annotations

from PIL import Image, ImageDraw

_ARROW = [(0, 0), (0, 16), (4, 12), (7, 18), (9, 17), (6, 11), (11, 11)]


def with_cursor(image: Image.Image, x: int, y: int) -> Image.Image:
    """A copy of an image with the pointer drawn; its tip is at `(x, y)`, in pixels from the left upper corner."""
    drawn = image.convert("RGB")
    if drawn is image:
        drawn = image.copy()
    ImageDraw.Draw(drawn).polygon([(x + dx, y + dy) for dx, dy in _ARROW], fill="black", outline="white")
    return drawn
