"""One rollout as plain data for the page: texts cut to a length, images as their digests, no value that JSON lacks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from agentrl.rollout.journal.records import RolloutRecord, TurnRecord
from agentrl.rollout.journal.values import from_png, png
from agentrl.types import Row
from agentrl.viewer.index import finite

LONGEST = 20_000
"""Characters of one text, unless all of it is asked for."""

MOST_PIXELS = 40_000_000
"""An image with more is not decoded."""

Cut = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Picture:
    """Stands for an image, which is fetched by its digest."""

    digest: str


def content(record: RolloutRecord, *, full: bool = False) -> dict[str, Any]:
    """The content of a rollout.

    Args:
        record: The rollout, read with `Picture` for its images.
        full: Do not cut long texts.

    Returns:
        `prompt` (messages), `turns`, `rows` (ids, masks, logprobs), `rewards`, `advantages`, `failure` and the task.
    """

    def cut(text: str) -> dict[str, Any]:
        short = text if full else text[:LONGEST]
        return {"text": short, "more": len(text) - len(short)}

    summary, prompt = record.summary, record.prompt
    failure = summary.failure
    return {
        "prompt": [{"role": "prompt", "blocks": [cut(prompt)], "calls": [], "reasoning": None}]
        if isinstance(prompt, str)
        else [_message(message, cut) for message in prompt],
        "turns": [_turn(turn, cut) for turn in record.turns],
        "rows": [_ids(row) for row in record.trajectory().rows],
        "rewards": {name: None if value is None else finite(value) for name, value in summary.rewards.items()},
        "environment_reward": finite(summary.reward),
        "advantages": [finite(value) for value in summary.advantages],
        "failure": None if failure is None else cut(f"{failure.where}: {failure.error}\n{failure.traceback}".strip()),
        "seed": str(record.task.seed),  # may have more digits than numbers of a page
        "columns": {str(name): cut(_text(value)) for name, value in record.task.columns.items()},
        "extra": {str(name): cut(_text(value)) for name, value in record.extra.items()},
    }


def served_png(blob: bytes) -> bytes | None:
    """An image as a PNG that was decoded and encoded again, None if it is not an image or too large."""
    try:
        with Image.open(io.BytesIO(blob), formats=["PNG"]) as unread:
            if unread.width * unread.height > MOST_PIXELS:
                return None
        image = from_png(blob)
        image.info.clear()
        return png(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _turn(record: TurnRecord, cut: Cut) -> dict[str, Any]:
    turn = record.turn
    return {
        "message": _message(record.message, cut),
        "results": [
            {
                "name": result.call.name,
                "arguments": cut(_text(result.call.arguments)),
                "error": None if result.call.error is None else cut(result.call.error),
                "blocks": _blocks(result.content, cut),
                **{name: getattr(result, name) for name in ("failed", "timed_out", "done")},
                "seconds": result.seconds,
                "reward": finite(result.reward),
            }
            for result in turn.results
        ],
        "shown": record.shown,
        "replies": [_message(message, cut) for message in record.replies],
        "row": turn.row,
        "start": turn.start,
        "stop": turn.stop,
        "finish": turn.finish,
        "seconds": turn.seconds,
        "at": record.at,
        "reward": finite(turn.reward),
        "weights_version": record.sample.weights_version,
    }


def _message(message: dict[str, Any], cut: Cut) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("thinking")
    return {
        "role": str(message.get("role", "")),
        "blocks": _blocks(message.get("content"), cut),
        "reasoning": None if reasoning is None else cut(_text(reasoning)),
        "calls": [cut(_text(call.get("function", call))) for call in message.get("tool_calls") or []],
    }


def _blocks(value: Any, cut: Cut) -> list[dict[str, Any]]:
    """Content as blocks of text and images."""
    if value is None:
        return []
    return [_block(item, cut) for item in value] if isinstance(value, list) else [cut(_text(value))]


def _block(item: Any, cut: Cut) -> dict[str, Any]:
    if isinstance(item, dict) and isinstance(item.get("image"), Picture):
        return {"image": item["image"].digest}
    if isinstance(item, dict) and item.get("type") == "text":
        return cut(_text(item.get("text")))
    return cut(_text(item))


def _ids(row: Row) -> dict[str, Any]:
    logprobs = [finite(round(value, 5)) for value in row.logprobs]
    return {"prompt": row.prompt_ids, "ids": row.completion_ids, "mask": row.loss_mask, "logprobs": logprobs}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_named)


def _named(value: Any) -> str:
    return f"image {value.digest[:12]}" if isinstance(value, Picture) else str(value)
