"""What a template writes between a sampled turn and the next one, as ids.

The general way cuts it out of the rendering of a short stand-in conversation with the same shape of turn and the
real results, so that no sampled id is ever decoded and encoded again. That is exact for any template that passes the
proof of `repair.py`, and costs a rendering.

Most templates only put a result between two fixed texts. Where that is proved, a suffix needs no rendering: of each
shape of a round the fixed parts are kept as ids (a `Skeleton`), and only the text between the two added tokens that
stand around the results is encoded. The proof has two parts. Once for a template: every string that its source
compares with, and white space, quotes, markup and the like, come out as they went in. Once for a shape: text and ids
are those of the general way for several contents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from agentrl.chat.images import encode_with_images
from agentrl.chat.messages import REASONING_FIELDS
from agentrl.chat.prefix import call_id, tool_call, tool_schema
from agentrl.chat.template import Template
from agentrl.chat.turns import TurnEnd, added_tokens, cut_after_turn
from agentrl.errors import TemplateError
from agentrl.types import Encoded, Image, Message

_CACHED = 1024
"""Entries of each cache; the oldest goes first."""
_QUESTION: Message = {"role": "user", "content": "stand-in"}
_TOOLS = [tool_schema("stand_in")]
_RESULT_KEYS = {"role", "name", "tool_call_id", "content"}
_SENTINELS = ("qzxsentinelaxzq", "qzxsentinelbxzq")
_ODD_TEXTS = (
    "",
    " \t\n two\n\nlines \n ",
    '{"a": [1, null, true], "b": "x"}',
    "[1, 2]",
    "7",
    "None",
    "é 東京 🙂 İ",
    "<a href='x'>&amp; \\n \"q\" {{ b }} {% c %}</a>",
    "UPPER lower Title",
    "long " * 4000,
)
"""Contents with everything a template may treat in its own way: white space, JSON, quotes, markup, case."""

Value = TypeVar("Value")
Shape = tuple[Any, ...]


class SuffixRule:
    """The suffixes of a template.

    Args:
        template: Writes them.
        end: What ends a turn of the assistant in it.
    """

    def __init__(self, template: Template, end: TurnEnd) -> None:
        self._template = template
        self._end = end
        self._added_tokens = added_tokens(template.tokenizer)
        self._encode = _encoder(template.tokenizer)
        self._anchor = str(template.tokenizer.convert_ids_to_tokens(end.anchor))
        self._turns: dict[tuple[str, bool], str] = {}
        self._skeletons: dict[Shape, _Skeleton | None] = {}
        self._shows_ids = self._depends_on_ids()
        self._keeps_contents: bool | None = None

    def ids(self, last_id: int, assistant: Message, results: list[Message], tools: bool) -> list[int]:
        """Encode a suffix; see `Renderer.suffix_ids`."""
        shape = self._shape(last_id, assistant, results, tools)
        if shape is not None:
            skeleton = _cached(self._skeletons, shape, lambda: self._skeleton(last_id, assistant, results, tools))
            if skeleton is not None:
                known = skeleton.fill(self._encode, [self._template.plain(result["content"]) for result in results])
                if known is not None:
                    return known
        return self.encode(self.text(last_id, assistant, results, tools))

    def encoded(
        self, last_id: int, assistant: Message, results: list[Message], tools: bool, images: Sequence[Image]
    ) -> Encoded:
        """Encode a suffix with the images of its results.

        Raises:
            ImageError: The template does not show one of them.
        """
        if not images:
            return Encoded(self.ids(last_id, assistant, results, tools))
        text = self.text(last_id, assistant, results, tools)
        return encode_with_images(self._template.images, self.encode, text, images)

    def text(self, last_id: int, assistant: Message, results: list[Message], tools: bool) -> str:
        """Cut a suffix out of a stand-in conversation, the general way.

        Raises:
            TemplateError: The template cannot render the messages, or changes the turn when results follow and has
                no token that ends turns.
        """
        turn, schemas = _stand_in(assistant), _TOOLS if tools else None
        alone = _cached(
            self._turns, (repr(turn), tools), lambda: self._template.render([_QUESTION, turn], schemas, False)
        )
        grown = self._template.render_quickly([_QUESTION, turn, *results], schemas, True)
        return cut_after_turn(alone, grown, self._end, last_id, self._added_tokens)

    def encode(self, text: str) -> list[int]:
        """Encode text that follows the end of a turn, so that it is tokenised as within a whole conversation."""
        return encode_after(self._template.tokenizer, self._end.anchor, text)

    def encode_all(self, text: str) -> list[int]:
        """Encode the rendering of a whole conversation."""
        return self._encode(text)

    # Skeletons ----------------------------------------------------------------------------------------------

    def _shape(self, last_id: int, assistant: Message, results: list[Message], tools: bool) -> Shape | None:
        """All that a suffix depends on but the contents; None where it has to be rendered, as where it shows ids.

        Else the ids of calls count only by which result answers which call.
        """
        if self._shows_ids:
            return None
        calls = assistant.get("tool_calls") or ()
        made = [call.get("id") for call in calls]
        answered: list[Any] = []
        for result in results:
            if type(result.get("content")) is not str or result.keys() != _RESULT_KEYS:
                return None
            call = result["tool_call_id"]
            answered.append(made.index(call) if call in made else call)
        return (
            last_id if self._end.markers else None,
            bool(assistant.get("content")),
            tuple([assistant[name] != "" if assistant.get(name) is not None else None for name in REASONING_FIELDS]),
            tuple([call.get("function", call).get("name") for call in calls]),
            tuple([(result["role"], result["name"]) for result in results]),
            tuple(answered),
            tools,
        )

    def _skeleton(self, last_id: int, assistant: Message, results: list[Message], tools: bool) -> _Skeleton | None:
        """Derive the fixed parts of a suffix from sentinels and prove them; None where that fails."""

        def general(contents: list[str]) -> str:
            filled = [{**result, "content": text} for result, text in zip(results, contents, strict=True)]
            return self.text(last_id, assistant, filled, tools)

        count = len(results)
        if not count or not self._keeps_texts():
            return None
        derived: list[_Skeleton | None] = []
        for sentinel in _SENTINELS:
            contents = [f"{sentinel}{index}" for index in range(count)]
            derived.append(self._split(general(contents), contents))
        skeleton = derived[0]
        if skeleton is None or derived[1] != skeleton:
            return None
        for offset in range(3):
            texts = list(itertools.islice(itertools.cycle(_ODD_TEXTS[offset:]), count))
            if skeleton.fill(self._encode, texts) != self.encode(general(texts)):
                return None
        return skeleton

    def _split(self, text: str, contents: list[str]) -> _Skeleton | None:
        """Split a suffix with known contents at the added tokens that stand around them."""
        whole = self._anchor + text
        if any(whole.count(content) != 1 for content in contents):
            return None
        first, last = whole.index(contents[0]), whole.index(contents[-1]) + len(contents[-1])
        opening = [match for match in self._added_tokens.finditer(whole) if match.end() <= first][-1]
        closing = self._added_tokens.search(whole, last)
        end = len(whole) if closing is None else closing.end()
        texts, rest = [], whole[opening.start() : end]
        for content in contents:
            before, found, rest = rest.partition(content)
            if not found:
                return None  # the results come in another order
            texts.append(before)
        head = self.encode(whole[len(self._anchor) : opening.end()]) if opening.start() else []
        vocabulary = self._template.tokenizer.get_added_vocab()
        return _Skeleton(
            head=tuple(head),
            opening=vocabulary[opening.group()],
            texts=(*texts, rest),
            closing=None if closing is None else vocabulary[closing.group()],
            tail=() if closing is None else tuple(self._encode(whole[closing.start() :])[1:]),
        )

    def _keeps_texts(self) -> bool:
        """Whether the template writes every content as it is; proved once, when it is first asked.

        What a template does with a text can depend on the strings that its source compares it with, and on what the
        odd texts have; all are tried.
        """
        if self._keeps_contents is None:
            self._keeps_contents = False
            with suppress(TemplateError):
                literals = self._template.literals()
                tried = [*_ODD_TEXTS, *literals, *(f"x{literal}y" for literal in literals)]
                self._keeps_contents = all(map(self._keeps, tried))
        return self._keeps_contents

    def _keeps(self, content: str) -> bool:
        turn = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "probe", {"a": 1})]}

        def suffix(text: str) -> str:
            result = {"role": "tool", "name": "probe", "tool_call_id": call_id(0), "content": text}
            return self.text(self._end.anchor, turn, [result], True)

        return suffix(content) == suffix(_SENTINELS[0]).replace(_SENTINELS[0], content)

    def _depends_on_ids(self) -> bool:
        """Whether other ids of calls give another suffix."""
        texts = []
        for numbers in ((0, 1), (7, 123)):
            calls = [tool_call(number, "probe", {"a": 1}) for number in numbers]
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            results = [{"role": "tool", "name": "probe", "tool_call_id": call["id"], "content": "r"} for call in calls]
            try:
                texts.append(self.text(self._end.anchor, turn, results, True))
            except TemplateError:
                return True  # it takes one call a turn, or no tools
        return texts[0] != texts[1]


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """The fixed parts of a suffix.

    Attributes:
        head: Ids up to the opening token, it included where it is not the end of the turn.
        opening: The last added token in front of the results; it may be the end of the turn.
        texts: What stands around and between the results, from the opening token to the closing one.
        closing: The first added token after them, None where there is none.
        tail: Ids after it.
    """

    head: tuple[int, ...]
    opening: int
    texts: tuple[str, ...]
    closing: int | None
    tail: tuple[int, ...]

    def fill(self, encode: Callable[[str], list[int]], contents: list[str]) -> list[int] | None:
        """Encode the suffix with these contents; None where they melt into the tokens around them."""
        pieces = [self.texts[0]]
        for content, text in zip(contents, self.texts[1:], strict=True):
            pieces += (content, text)
        ids = encode("".join(pieces))
        if ids[0] != self.opening or (self.closing is not None and ids[-1] != self.closing):
            return None
        return [*self.head, *ids[1:], *self.tail]


def encode_after(tokenizer: PreTrainedTokenizerBase, stop_id: int, text: str) -> list[int]:
    """Encode text that follows a stop token.

    Args:
        tokenizer: The tokenizer.
        stop_id: An added token.
        text: What follows it.

    Returns:
        The ids of the text.
    """
    stop_text = tokenizer.convert_ids_to_tokens(stop_id)
    ids: list[int] = tokenizer(f"{stop_text}{text}", add_special_tokens=False, padding=False)["input_ids"]
    # Some tokenizers put a space in front of the text, hence no fixed place.
    return ids[ids.index(stop_id) + 1 :]


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Encode without padding, truncation and further tokens; straight from the backend, which is much quicker."""
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def plain(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, padding=False)["input_ids"]
        return ids

    def quick(text: str) -> list[int]:
        assert backend is not None
        if backend.padding is not None or backend.truncation is not None or backend.encode_special_tokens:
            return plain(text)  # another user of the tokenizer has set them
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    return plain if backend is None else quick


def _stand_in(assistant: Message) -> Message:
    """A short turn of the same shape: what the rendering of the results can depend on."""
    reasoning = {name: assistant[name] and "r" for name in REASONING_FIELDS if assistant.get(name) is not None}
    turn = {"role": "assistant", "content": "c" if assistant.get("content") else "", **reasoning}
    calls = assistant.get("tool_calls")
    if not calls:
        return turn
    return {**turn, "tool_calls": [_stand_in_call(call) for call in calls]}


def _stand_in_call(call: dict[str, Any]) -> dict[str, Any]:
    name = call.get("function", call).get("name")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": {"a": 1}}}


def _cached(cache: dict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """Look up or make a value; the oldest entry of a full cache goes first."""
    if key in cache:
        return cache[key]
    value = cache[key] = make()
    if len(cache) > _CACHED:
        del cache[next(iter(cache))]
    return value
