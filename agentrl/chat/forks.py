"""How a conversation goes on under a template that rewrites earlier turns.

A template that drops the reasoning of earlier turns gives the model, after a tool round, another context than the row
so far. With `reasoning="fork"` the model sees exactly that context: where the template keeps the row, the row grows by
a suffix; where it rewrites a turn, the episode continues as a new row whose prompt is the rewritten context. Where it
cannot write what was said at all (GPT-OSS raises on text and reasoning beside a call, Llama on two calls), there is no
other context than the row, which grows as with `reasoning="keep"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.chat.continuation import Continuation
from agentrl.chat.images import encode_with_images
from agentrl.chat.messages import clean_messages
from agentrl.chat.pictures import count_images
from agentrl.chat.suffixes import SuffixRule
from agentrl.chat.template import Template
from agentrl.chat.turns import TurnEnd, added_tokens, cut_after_turn
from agentrl.errors import TemplateError
from agentrl.types import Image, Message


def continue_or_fork(
    template: Template,
    end: TurnEnd,
    rule: SuffixRule,
    kept: SuffixRule | None,
    messages: list[Message],
    results: list[Message],
    tools: list[dict[str, Any]] | None,
    *,
    sampled: str,
    last_id: int,
    images: Sequence[Image] = (),
) -> Continuation:
    """Render the context of the next turn, and find out whether it keeps the row.

    It does if it begins with the context of the last turn and then has that turn, as it was sampled or as the template
    writes it when it is the last.

    Args:
        template: The template.
        end: What ends a turn.
        rule: Encodes suffixes.
        kept: Encodes those of turns that the template cannot write; None where it can write all.
        messages: The conversation, with the sampled turn at its end; image blocks are empty.
        results: The messages that answer the turn, likewise.
        tools: Tool schemas.
        sampled: Text of the sampled turn, without the token that ended it.
        last_id: The id that ended it.
        images: The images of the conversation and the results, in order.

    Returns:
        A suffix or a new row.

    Raises:
        TemplateError: No template can render the messages.
    """
    messages = clean_messages(messages)
    new = images[len(images) - count_images(results) :]
    try:
        prompt = template.render_quickly(messages[:-1], tools, True)
        grown = template.render_quickly([*messages, *results], tools, True)
    except TemplateError:
        if kept is None:
            raise
        suffix = kept.encoded(last_id, messages[-1], results, bool(tools), new)
        return Continuation(suffix.ids, len(suffix.ids), images=suffix.images)
    stopped = end.call_text if last_id == end.call_id else end.text
    for turn in (f"{prompt}{sampled}{stopped or ''}", template.render_quickly(messages, tools, False)):
        if (written := end.written(turn)) is not None:
            turn = f"{turn.rpartition(written)[0]}{written}"
        if turn.startswith(prompt) and grown.startswith(turn):
            text = cut_after_turn(turn, grown, end, last_id, added_tokens(template.tokenizer))
            suffix = encode_with_images(template.images, rule.encode, text, new)
            return Continuation(suffix.ids, len(suffix.ids), images=suffix.images)
    added = len(rule.encoded(last_id, messages[-1], results, bool(tools), new).ids)
    context = encode_with_images(template.images, rule.encode_all, grown, images)
    return Continuation(context.ids, added, forks=True, images=context.images)
