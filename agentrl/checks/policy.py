"""A random policy: it calls tools with valid arguments drawn from their schemas, written as the model would write them.

It is a generator like any other, so episodes are played by the engine that training uses. What it does in a turn
depends on the turn's seed alone: two rollouts of the same task do the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl.chat.prefix import tool_call
from agentrl.chat.renderer import Renderer
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.types import FinishReason, ImageSpan, Message, Sample

STOP = 0.2
"""The chance that a turn answers instead of calling a tool."""
OPTIONAL = 0.5
"""The chance that an argument with a default is given."""
_WORDS = ("a", "the", "red", "house", "42", "find", "Paris", "x")


class RandomPolicy:
    """Implements `Generator`.

    Args:
        renderer: Of the model that is stood in for; it must read calls.
        tokenizer: Its tokenizer.

    Attributes:
        schemas: The tools that it calls, in OpenAI form; without any, it answers at once.
    """

    def __init__(self, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self.schemas: list[dict[str, Any]] = []
        self.stats = GenerationStats()

    @property
    def owns_weights(self) -> bool:
        """It has none that training could change."""
        return True

    @property
    def max_context(self) -> int | None:
        """It has none."""
        return None

    async def sample(
        self, session: str, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Sample:
        """Draw a turn."""
        draw = random.Random(params.seed)
        message: Message = {"role": "assistant", "content": draw.choice(_WORDS)}
        if self.schemas and draw.random() >= STOP:
            function = draw.choice(self.schemas)["function"]
            call = tool_call(0, function["name"], random_arguments(function["parameters"], draw))
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        turn = written(message, self._renderer, self._tokenizer, self.schemas)[: params.max_tokens]
        finish = FinishReason.STOP if turn[-1] in params.stop_ids else FinishReason.LENGTH
        return Sample(turn, [math.nan] * len(turn), finish)

    def release(self, session: str) -> None:
        """Nothing is kept."""

    def sync(self, weights_version: int) -> None:
        """There are no weights."""

    def close(self) -> None:
        """Nothing to free."""


def written(
    message: Message, renderer: Renderer, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The ids that a model would have sampled for a turn, stop token included: what its template makes of it.

    A renderer without tools knows no form of turns but text.

    Raises:
        TemplateError: The template cannot render it.
    """
    if renderer.choice is None:
        text: list[int] = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        return [*text, min(renderer.stop_ids)]
    render, tools = renderer.choice.template.render, [dict(schema) for schema in schemas]
    question = {"role": "user", "content": "q"}
    prompt, whole = render([question], tools, True), render([question, message], tools, False)
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    turn = whole[shared:]
    if renderer.end_of_turn is not None:
        turn = turn.rpartition(renderer.end_of_turn)[0] + renderer.end_of_turn
    ids: list[int] = tokenizer(turn, add_special_tokens=False)["input_ids"]
    return ids if ids and ids[-1] in renderer.stop_ids else [*ids, min(renderer.stop_ids)]


def random_arguments(schema: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    """Valid keyword arguments for a tool.

    Args:
        schema: The JSON schema of its `parameters`.
        draw: Where chance comes from.
    """
    required = schema.get("required", ())
    properties: Mapping[str, Any] = schema.get("properties", {})
    return {
        name: random_value(value, draw)
        for name, value in properties.items()
        if name in required or draw.random() < OPTIONAL
    }


def random_value(schema: Mapping[str, Any], draw: random.Random) -> Any:
    """A value that a JSON schema allows, as far as types, enums, bounds and lengths say; else text."""
    if "enum" in schema:
        return draw.choice(list(schema["enum"]))
    if "const" in schema:
        return schema["const"]
    for options in ("anyOf", "oneOf"):
        if schema.get(options):
            return random_value(draw.choice(schema[options]), draw)
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = draw.choice(kind)
    if kind in ("integer", "number"):
        return _random_number(schema, draw, whole=kind == "integer")
    if kind == "boolean":
        return draw.random() < 0.5
    if kind == "null":
        return None
    if kind == "array":
        low = schema.get("minItems", 0)
        count = draw.randint(low, schema.get("maxItems", low + 2))
        return [random_value(schema.get("items", {}), draw) for _ in range(count)]
    if kind == "object":
        return random_arguments(schema, draw)
    return draw.choice(_WORDS)


def _random_number(schema: Mapping[str, Any], draw: random.Random, *, whole: bool) -> int | float:
    """A number within the bounds that there are, near 0 or near the only bound."""
    step = 1 if whole else 1e-6
    low = schema.get("minimum", schema["exclusiveMinimum"] + step if "exclusiveMinimum" in schema else None)
    high = schema.get("maximum", schema["exclusiveMaximum"] - step if "exclusiveMaximum" in schema else None)
    if low is None:
        low = 0 if high is None or high >= 0 else high - 10
    if high is None:
        high = low + 10
    return draw.randint(math.ceil(low), math.floor(high)) if whole else draw.uniform(low, high)
