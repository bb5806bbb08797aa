"""Every family of models that see: episodes with 0, 1, 2 and 3 images in different turns, sampled and scored.

Run as a module it writes the table of docs/vision.md anew: `python -m tests.vision.family_table`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from agentrl.chat.pictures import take_pictures
from agentrl.testing.vision import TINY_VISION_FAMILIES
from agentrl.types import Trajectory
from tests.docs import tables
from tests.vision.helpers import family, full_render, play, question, worst_difference, written

TURNS = [
    [("", []), ("So.", []), ("It is nothing.", None)],
    [("", []), ("", []), ("One.", None)],
    [("", [1]), ("And", [2]), ("Two.", None)],
    [("", [2, 3]), ("", []), ("Three.", None)],
]
"""Content of each turn, and the pictures that it looks at."""
PROMPTS = [question(), question(7), question(), question(8)]

NAMES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5, Qwen3.6",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM, SmolVLM2",
    "llava_next": "LLaVA-NeXT",
    "internvl": "InternVL 3, 3.5",
}
DOCS = Path(__file__).parents[2] / "docs" / "vision.md"
BEGIN, END = "<!-- written by `python -m tests.vision.family_table` -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Played:
    """The episodes of a family, and what they showed.

    Attributes:
        trajectories: With 0, 1, 2 and 3 images.
        differences: The largest difference between the logprobs of sampler and trainer, of each.
        sampled: Hashes of the patches or tiles that reached the vision tower during sampling.
        scored: The same during scoring.
        processed: The same of what the processor makes of the pictures.
        encoded: Images that the generator says it encoded.
        encodings: How often the vision tower was run during sampling.
    """

    trajectories: list[Trajectory]
    differences: list[float]
    sampled: set[str]
    scored: set[str]
    processed: set[str]
    encoded: int
    encodings: int

    @property
    def different_images(self) -> int:
        """Number of pictures in all episodes that are not the same."""
        return len({span.image.digest for trajectory in self.trajectories for span in trajectory.images})


@cache
def played(name: str) -> Played:
    """Play and score the four episodes with a family's model."""
    scripts = [[written(name, *turn) for turn in turns] for turns in TURNS]
    with pixels_seen(name) as sampled:
        trajectories, generator = play(name, PROMPTS, scripts)
    with pixels_seen(name) as scored:
        differences = [worst_difference(name, [trajectory]) for trajectory in trajectories]
    processed = _processed(name, trajectories)
    encoded = generator.stats.images_encoded
    return Played(
        trajectories, differences, set().union(*sampled), set().union(*scored), processed, encoded, len(sampled)
    )


@contextmanager
def pixels_seen(name: str) -> Iterator[list[set[str]]]:
    """Hashes of the patches or tiles that reach the vision tower of a family's model, each time that it is run."""
    seen: list[set[str]] = []
    inner = family(name)[0].model
    encode = inner.get_image_features

    @wraps(encode)
    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(_hashes(args[0] if args else kwargs["pixel_values"]))
        return encode(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "get_image_features", watched)
        yield seen


def _processed(name: str, trajectories: list[Trajectory]) -> set[str]:
    _, processor = family(name)
    pictures = [p for t in trajectories for p in take_pictures([*t.prompt, *t.completion])[1]]
    outputs = [processor(images=[p], text=[processor.image_token], return_tensors="pt") for p in pictures]
    return {value for output in outputs for value in _hashes(output["pixel_values"])}


def _hashes(pixels: Tensor) -> set[str]:
    """A hash of each patch, or tile where these come as pictures; without those of padding, which are zero."""
    parts = pixels.flatten(0, -4) if pixels.dim() > 3 else pixels.flatten(0, -2)
    return {hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts if part.any()}


def rows_are_renders(name: str, trajectories: list[Trajectory]) -> bool:
    """Whether each row is what the processor renders of the whole conversation, but for a newline behind it."""
    rows = [trajectory.prompt_ids + trajectory.completion_ids for trajectory in trajectories]
    renders = [full_render(name, trajectory) for trajectory in trajectories]
    return all(full[: len(row)] == row and len(full) <= len(row) + 1 for row, full in zip(rows, renders, strict=True))


# The table ----------------------------------------------------------------------------------------------------

_COLUMNS = (
    "family",
    *(f"{number} image{'' if number == 1 else 's'}" for number in range(4)),
    "row equals the processor's render",
    "pixels sampled = scored = the processor's",
    "images encoded / different images",
)


def table() -> str:
    """The table of docs/vision.md."""
    header = f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}\n"
    return header + "".join(map(_row, TINY_VISION_FAMILIES))


def _row(name: str) -> str:
    found = played(name)
    cells = [NAMES[name], *(f"{difference:.1e}" for difference in found.differences)]
    cells += [
        _yes(rows_are_renders(name, found.trajectories)),
        _yes(found.sampled == found.scored == found.processed),
        f"{found.encoded / found.different_images:.2f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


if __name__ == "__main__":
    tables.write(DOCS, BEGIN, END, table())
