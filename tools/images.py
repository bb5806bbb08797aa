"""Looking closer at an image: what an agent that sees can do without a browser.

`ImageTool` belongs to one image, so it is a part of an environment and not one of the `tools`, which rollouts share.
"""

from __future__ import annotations

from PIL import Image, ImageDraw

SHAPES = ("line", "rectangle", "ellipse")
MAX_ZOOM = 8


class ImageTool:
    """Works on one image. Coordinates are pixels from the left upper corner of that image.

    Args:
        image: The image; it is copied.
        max_side: Pixels of the longest side of what is shown.
    """

    def __init__(self, image: Image.Image, *, max_side: int = 640) -> None:
        self.image = image.convert("RGB").copy()
        self._max_side = max_side

    def crop(self, left: int, top: int, right: int, bottom: int) -> Image.Image:
        """Cut a part out."""
        width, height = self.image.size
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise ValueError(
                f"({left}, {top}, {right}, {bottom}) is no part of the image, which is {width} pixels wide and "
                f"{height} high; left must be less than right and top less than bottom"
            )
        return self.image.crop((left, top, right, bottom))

    def zoom(self, x: int, y: int, factor: int) -> Image.Image:
        """Enlarge the surroundings of a point; as much is shown as fits into the size of the image."""
        width, height = self.image.size
        if not (0 <= x < width and 0 <= y < height):
            raise ValueError(f"({x}, {y}) is outside of the image, which is {width} pixels wide and {height} high")
        if not 1 <= factor <= MAX_ZOOM:
            raise ValueError(f"the factor must be from 1 to {MAX_ZOOM}, not {factor}")
        w, h = max(1, width // factor), max(1, height // factor)
        left, top = min(max(0, x - w // 2), width - w), min(max(0, y - h // 2), height - h)
        shown = self.image.crop((left, top, left + w, top + h)).resize(
            (w * factor, h * factor), Image.Resampling.LANCZOS
        )
        shown.thumbnail((self._max_side, self._max_side))
        return shown

    def draw(self, shape: str, x1: int, y1: int, x2: int, y2: int, colour: str = "red") -> Image.Image:
        """Draw a line, the outline of a rectangle or of an ellipse between two corners; it stays."""
        if shape not in SHAPES:
            raise ValueError(f"there is no shape {shape!r}; there are {', '.join(SHAPES)}")
        pen = ImageDraw.Draw(self.image)
        if shape == "line":
            pen.line((x1, y1, x2, y2), fill=colour, width=2)
        else:
            box = min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
            (pen.rectangle if shape == "rectangle" else pen.ellipse)(box, outline=colour, width=2)
        return self.image.copy()
