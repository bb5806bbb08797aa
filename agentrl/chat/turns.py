"""Where an assistant turn ends, in text.

Two kinds of templates exist. Most write an end-of-turn token after the assistant's text; some of them (GPT-OSS,
Gemma 4) another one after calls. Some (GLM) write none: the marker of the next role ends the turn, and it is what
the model learns to sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from agentrl.chat.prefix import Render, call_id, missing_tool_parts, tool_call, tool_schema
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
        call_text: The token that ends a turn with calls, None where it is the same as after an answer.
        call_id: Its id.
    """

    text: str | None
    id: int | None
    markers: frozenset[int] = frozenset()
    call_text: str | None = None
    call_id: int | None = None

    @property
    def ids(self) -> frozenset[int]:
        """Ids of the tokens that the template writes at the end of turns."""
        return frozenset(known for known in (self.id, self.call_id) if known is not None)

    def written(self, turn: str) -> str | None:
        """Give the token that ends a turn.

        Args:
            turn: The rendering of a conversation that ends with the turn.

        Returns:
            The token; None where the template writes none.
        """
        if self.call_text is not None and turn.rstrip().endswith(self.call_text):
            return self.call_text
        return self.text

    @property
    def anchor(self) -> int:
        """An added token that can end a turn; text is tokenised alike after any of them."""
        return min(self.markers) if self.id is None else self.id


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Give a pattern that finds the tokenizer's added tokens in text, the longest first.

    Those of white space alone (Gemma 3 has one for a line break) are left out: they mark nothing.

    Args:
        tokenizer: The tokenizer.

    Returns:
        A compiled pattern; it matches nothing when there are no added tokens.
    """
    texts = sorted((text for text in tokenizer.get_added_vocab() if text.strip()), key=len, reverse=True)
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
    after_answer = _after_answer(render, [answer])
    if (written := tokens.search(after_answer)) is not None:
        # Only what also stands there when the conversation goes on: some templates write EOS behind the last turn.
        going_on = tokens.findall(_after_answer(render, [answer, _QUESTION]))
        both = zip(tokens.findall(after_answer), going_on, strict=False)
        kept = [alone for alone, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
        text = kept[-1] if kept else written.group()
        end = TurnEnd(text, vocabulary[text])
        called = _end_after_calls(tokens, render)
        return end if called in (None, end.text) else replace(end, call_text=called, call_id=vocabulary[called])
    if after_answer.strip():
        return None
    continuations = [_after_answer(render, [answer, _QUESTION])]
    if not missing_tool_parts(render):
        calling = {**answer, "tool_calls": [tool_call(0, "probe", {"key": "value"})]}
        result = {"role": "tool", "name": "probe", "tool_call_id": call_id(0), "content": "probe_result"}
        turn = render([_QUESTION, calling], None, False)
        continuations.append(render([_QUESTION, calling, result], None, False).removeprefix(turn))
    found = [tokens.search(text) for text in continuations]
    markers = frozenset(vocabulary[match.group()] for match in found if match is not None)
    return TurnEnd(None, None, markers) if markers else None


def _after_answer(render: Render, messages: list[Message]) -> str:
    return render([_QUESTION, *messages], None, False).rpartition(_ANSWER)[2]


def _end_after_calls(tokens: re.Pattern[str], render: Render) -> str | None:
    """The added token behind which a turn with calls has nothing but white space; None where there is none."""
    calling: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [tool_call(0, "probe", {"key": "probe_value"})],
    }
    try:
        _, shown, after_call = render([_QUESTION, calling], None, False).rstrip().rpartition("probe_value")
    except TemplateError:
        return None
    last = [match for match in tokens.finditer(after_call) if shown and match.end() == len(after_call)]
    return last[0].group() if last else None


def prompt_after_results(render: Render) -> str:
    """Give what a template writes in front of the turn that answers results.

    Args:
        render: The chat template.

    Returns:
        The text; "" also where it cannot render results.
    """
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "probe", {"key": "value"})]}
    result: Message = {"role": "tool", "name": "probe", "tool_call_id": call_id(0), "content": "probe_result"}
    messages, tools = [_QUESTION, calling, result], [tool_schema("probe")]
    try:
        return render(messages, tools, True).removeprefix(render(messages, tools, False))
    except TemplateError:
        return ""


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
    if (written := end.written(turn)) is not None:
        count = turn.count(written)
        parts = grown.split(written, count)
        if len(parts) <= count:
            raise TemplateError(
                f"The chat template takes back the end of an assistant turn when the conversation goes on: {turn!r} "
                f"became {grown!r}. What follows the turn cannot be found."
            )
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
