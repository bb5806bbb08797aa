"""A quick environment for agents that see: read a value off a bar chart. It needs no browser.

The chart is drawn with Pillow from the seed. The answer is the last number in what the model writes in the end.
"""

from __future__ import annotations

import random
import re
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from agentrl.tools.images import ImageTool

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 224, 160, 24, 140, 12
STEP = 10
LABELS = "ABCDEFGH"


class PlotReading:
    """The model is shown a bar chart and asked for one of its values; it may crop, zoom and draw.

    Args:
        bars: How many bars, at most 8.
        highest: The largest value, a multiple of 10 for a tidy axis.
    """

    replayable = True

    def __init__(self, bars: int = 5, highest: int = 50) -> None:
        self._bars = bars
        self._highest = highest

    def reset(self, seed: int = 0) -> Any:
        """Draw a chart and ask for the value of a bar."""
        rng = random.Random(seed)
        self.values = [rng.randint(1, self._highest) for _ in range(self._bars)]
        self.asked = rng.randrange(self._bars)
        self._tool = ImageTool(draw_bars(self.values, self._highest))
        question = f"What is the value of bar {LABELS[self.asked]}? End your answer with the number."
        return [{"type": "text", "text": question}, {"type": "image", "image": self._tool.image.copy()}]

    def crop(self, left: int, top: int, right: int, bottom: int) -> Image.Image:
        """Cut a part of the image out.

        Args:
            left: Pixels from the left.
            top: Pixels from the top.
            right: Pixels from the left, more than `left`.
            bottom: Pixels from the top, more than `top`.

        Returns:
            The part.
        """
        return self._tool.crop(left, top, right, bottom)

    def zoom(self, x: int, y: int, factor: int) -> Image.Image:
        """Enlarge the image around a point.

        Args:
            x: Pixels from the left.
            y: Pixels from the top.
            factor: How many times larger.

        Returns:
            What is around the point.
        """
        return self._tool.zoom(x, y, factor)

    def draw(self, shape: str, x1: int, y1: int, x2: int, y2: int) -> Image.Image:
        """Draw something red onto the image, such as a line from a bar to the axis.

        Args:
            shape: line, rectangle or ellipse.
            x1: Pixels from the left, of one corner.
            y1: Pixels from the top, of one corner.
            x2: Pixels from the left, of the other corner.
            y2: Pixels from the top, of the other corner.

        Returns:
            The image.
        """
        return self._tool.draw(shape, x1, y1, x2, y2)

    def get_reward(self, answer: str | None = None) -> float:
        """1.0 if the last number of the answer is the value, else 0.0."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer or "")
        return float(bool(numbers) and float(numbers[-1]) == self.values[self.asked])


def draw_bars(values: list[int], highest: int) -> Image.Image:
    """A bar chart with an axis from 0 to `highest`."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(9)
    for tick in range(0, highest + 1, STEP):
        y = _height(tick, highest)
        pen.line((LEFT, y, WIDTH - 6, y), fill="#dddddd")
        pen.text((LEFT - 4, y), str(tick), fill="black", font=font, anchor="rm")
    slot = (WIDTH - 6 - LEFT) / len(values)
    for index, value in enumerate(values):
        left = LEFT + round(slot * (index + 0.2))
        right = LEFT + round(slot * (index + 0.8))
        pen.rectangle((left, _height(value, highest), right, BOTTOM), fill="#3b6ea5")
        pen.text(((left + right) / 2, BOTTOM + 9), LABELS[index], fill="black", font=font, anchor="mm")
    pen.line((LEFT, TOP, LEFT, BOTTOM, WIDTH - 6, BOTTOM), fill="black")
    return image


def _height(value: int, highest: int) -> int:
    return BOTTOM - round((BOTTOM - TOP) * value / highest)
