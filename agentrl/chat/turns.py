"""Where an assistant turn ends, in text.

Two kinds of templates exist. Most write an end-of-turn token after the assistant's text. Some (GLM) write
none: the marker of the next role ends the turn, and it is what the model learns to sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from agentrl.chat.prefix import Render, call_id, missing_tool_parts, tool_call
from agentrl.errors import TemplateError
from agentrl.types import Message

_ANSWER = "probe_answer"
_QUESTION: Message = {"role": "user", "content": "probe_question"}


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What ends an assistant turn.

    Attributes:
        text: The end-of-turn token that the template writes, None where the next role's marker ends the turn.
        id: Its id.
        markers: Ids of the role markers that end a turn; empty where `text` is set.
    """

    text: str | None
    id: int | None
    markers: frozenset[int] = frozenset()

    @property
    def anchor(self) -> int:
        """An added token that can end a turn; text is tokenised alike after any of them."""
        return min(self.markers) if self.id is None else self.id


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Give a pattern that finds the tokenizer's added tokens in text, the longest first.

    Args:
        tokenizer: The tokenizer.

    Returns:
        A compiled pattern; it matches nothing when there are no added tokens.
    """
    texts = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def find_turn_end(tokenizer: PreTrainedTokenizerBase, render: Render) -> TurnEnd | None:
    """Find what ends an assistant turn.

    Args:
        tokenizer: The tokenizer.
        render: The chat template.

    Returns:
        The end of a turn, or None where neither the turn nor what follows it holds an added token.
    """
    tokens = added_tokens(tokenizer)
    vocabulary = tokenizer.get_added_vocab()
    answer: Message = {"role": "assistant", "content": _ANSWER}
    after_answer = render([_QUESTION, answer], None, False).rpartition(_ANSWER)[2]
    if (written := tokens.search(after_answer)) is not None:
        return TurnEnd(written.group(), vocabulary[written.group()])
    if after_answer.strip():
        return None
    continuations = [render([_QUESTION, answer, _QUESTION], None, False).rpartition(_ANSWER)[2]]
    if not missing_tool_parts(render):
        calling = {**answer, "tool_calls": [tool_call(0, "probe", {"key": "value"})]}
        result = {"role": "tool", "name": "probe", "tool_call_id": call_id(0), "content": "probe_result"}
        turn = render([_QUESTION, calling], None, False)
        continuations.append(render([_QUESTION, calling, result], None, False).removeprefix(turn))
    found = [tokens.search(text) for text in continuations]
    markers = frozenset(vocabulary[match.group()] for match in found if match is not None)
    return TurnEnd(None, None, markers) if markers else None


def cut_after_turn(turn: str, grown: str, end: TurnEnd, last_id: int, tokens: re.Pattern[str]) -> str:
    """Give what a template writes after the end of an assistant turn.

    The ends of turns are counted, not looked for at a fixed place, because a template may render the last
    turn otherwise than an earlier one (an empty think block in front of it, say).

    Args:
        turn: A conversation that ends with the turn.
        grown: The same conversation with what follows.
        end: What ends a turn.
        last_id: The id on which the turn stopped. If it is a role marker the cut is after the marker that the
            template writes, else in front of it.
        tokens: The pattern of `added_tokens`.

    Returns:
        The text after the end of the turn.

    Raises:
        TemplateError: The conversation changed the turn when it grew.
    """
    if end.text is not None:
        parts = grown.split(end.text, turn.count(end.text))
        return parts[-1]
    if not grown.startswith(turn):
        raise TemplateError(
            "The chat template writes no token at the end of an assistant turn and changes the turn when "
            f"tool results follow: {turn!r} became {grown!r}. Such a template cannot be used token-exactly."
        )
    rest = grown[len(turn) :]
    marker = tokens.search(rest)
    return rest[marker.end() :] if marker is not None and last_id in end.markers else rest


def no_end_of_turn() -> TemplateError:
    """Say that a template has no end of turn."""
    return TemplateError(
        "The chat template writes no special token that ends a turn of the assistant, so it is not known "
        "where sampling stops and what follows. Set `tokenizer.chat_template` to one that does."
    )
