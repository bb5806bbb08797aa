"""The choice of a template that is exact for tool rounds, and the proof of it.

In order: the tokenizer's own template when it is proved; else the training template of its family when that is proved
and writes the same prompts and suffixes; else the own one with repaired suffixes; else it is refused, with the first
message whose rendering changed and both renderings.

**Exact** means, on every generated conversation (`prefix.tool_conversations`): what was rendered stays as the
conversation grows; what follows a turn is what the suffix rule says; and its ids after the turn's are the ids of the
whole text with this tokenizer.

**Repaired** means that the template rewrites turns of the assistant, and nothing but those, when the conversation
goes on (it drops their reasoning, say). The rows keep what was sampled; everything else in them is written by the
template. That is sound if the suffixes do not depend on what is rewritten, so they are derived twice: by the suffix
rule, from a stand-in conversation, and by differential rendering, from each generated conversation with two different
last turns, whose common end begins behind the turn. Both must agree in text and in ids.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any

from agentrl.chat.families import recognise, training_template
from agentrl.chat.prefix import (
    PROBE_TOOLS,
    Render,
    describe_break,
    first_break,
    missing_tool_parts,
    tool_conversations,
)
from agentrl.chat.suffixes import SuffixRule
from agentrl.chat.template import Template
from agentrl.chat.turns import TurnEnd, find_turn_end, no_end_of_turn
from agentrl.errors import TemplateError
from agentrl.types import Message

logger = logging.getLogger(__name__)


class Origin(StrEnum):
    """Where the template in use comes from."""

    OWN = "own"
    """The tokenizer's own template, proved exact."""
    FAMILY = "family"
    """The training template of its family, proved exact."""
    REPAIRED = "repaired"
    """The own template, whose suffixes are proved; rows keep turns that it would rewrite."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out about a template.

    Attributes:
        problem: Why it is not exact; None where it is.
        repaired: Whether its suffixes are exact all the same, and only turns of the assistant are rewritten.
    """

    problem: str | None = None
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A template fit for tool rounds.

    Attributes:
        template: The template.
        origin: Where it comes from.
        family: Name of the family, where it is known.
        problem: What is wrong with the own template, None where nothing is.
        kept: With forks: the exact template, for turns that the own one cannot write; None where it can write all.
    """

    template: Template
    origin: Origin
    family: str | None
    problem: str | None = None
    kept: Template | None = None


def exact_template(own: Template | None) -> Choice:
    """Choose a template that is exact for tool rounds.

    Args:
        own: The tokenizer's own template.

    Returns:
        The template and how it was come by.

    Raises:
        TemplateError: None is exact; says what is wrong with the own one.
    """
    if own is None:
        raise TemplateError("The tokenizer has no chat template. Set `tokenizer.chat_template`.")
    family = recognise(own.source)
    name = None if family is None else family.name
    proof = prove(own, repair=family is None)
    if proof.problem is None:
        return Choice(own, Origin.OWN, name)
    problem = proof.problem
    if family is not None and family.training_template is not None:
        trained = Template(own.tokenizer, training_template(family, own.render), own.variables, own.images)
        begun, own_begun = (_opening_of_turn(template) for template in (trained, own))
        if begun != own_begun:
            problem += (
                f"\nThe training template of {name} begins a turn with {begun!r}, the own one with {own_begun!r}."
            )
        elif (other := prove(trained).problem or _difference(own, trained)) is not None:
            problem += f"\nThe training template of {name} does not help: {other}"
        else:
            if _lacks_tools(own.render):
                form = "a form of ours, which RL has to teach" if family.tools_are_ours else "the form of that family"
                logger.warning(
                    "The chat template shows no tools; the training template of %s adds them in %s.", name, form
                )
            return Choice(trained, Origin.FAMILY, name, proof.problem)
    if proof.repaired or (family is not None and prove(own).repaired):
        logger.warning(
            "The chat template rewrites earlier turns of the assistant; rows keep them as they were sampled, and what "
            "stands between them is the template's. %s",
            proof.problem,
        )
        return Choice(own, Origin.REPAIRED, name, proof.problem)
    unknown = "" if family else "\nIts family is not known, so there is no training template for it."
    raise TemplateError(
        f"The tokenizer's chat template cannot be used with tools: {problem}{unknown}\nSet `tokenizer.chat_template` "
        "to a template that shows tools and keeps earlier turns."
    )


def forking_template(own: Template | None) -> Choice:
    """Take the tokenizer's own template for episodes that fork where it rewrites a turn.

    Args:
        own: The tokenizer's own template.

    Returns:
        The template.

    Raises:
        TemplateError: There is none, it does not show all of a tool round, it has no end of turn, or it cannot write
            some of the generated conversations and no other can.
    """
    if own is None:
        raise TemplateError("The tokenizer has no chat template. Set `tokenizer.chat_template`.")
    family = recognise(own.source)
    if missing := missing_tool_parts(own.render):
        raise TemplateError(
            f"The tokenizer's chat template cannot be used with tools: it does not show {', '.join(missing)}. With "
            'reasoning="fork" no other takes its place; set `tokenizer.chat_template` or reasoning="keep".'
        )
    if find_turn_end(own.tokenizer, own.render) is None:
        raise no_end_of_turn()
    kept = exact_template(own).template if _cannot_write(own) else None
    return Choice(own, Origin.OWN, None if family is None else family.name, kept=kept)


def _cannot_write(own: Template) -> bool:
    """Whether a template raises on a conversation that an episode can have."""
    try:
        for messages in tool_conversations(own.render_quickly):
            own.render_quickly(messages, PROBE_TOOLS, False)
    except TemplateError:
        return True
    return False


def prove(template: Template, *, repair: bool = True) -> Proof:
    """Prove a template on generated conversations, with its tokenizer.

    Args:
        template: The template.
        repair: Whether to find out also if a template that is not exact can be repaired.

    Returns:
        Whether it is exact, and if not, whether it can be used with repaired suffixes.
    """
    render = _remembering(template)
    try:
        if missing := missing_tool_parts(render):
            return Proof(f"it does not show {', '.join(missing)}.")
        end = find_turn_end(template.tokenizer, render)
        if end is None:
            raise no_end_of_turn()
        rule = SuffixRule(template, end)
        problem, repaired = None, True
        for messages in tool_conversations(render, images=template.images is not None):
            if (found := first_break(render, messages, PROBE_TOOLS)) is not None:
                problem = problem or describe_break(messages, found)
                repaired = repaired and repair and _rewrites_turns_only(render, messages, end)
            if problem is not None and not repaired:
                break
            if (wrong := _wrong_suffix(render, messages, rule, end)) is not None:
                return Proof(problem or wrong)
    except TemplateError as error:
        return Proof(str(error))
    return Proof(problem, repaired=problem is not None and repaired)


def _opening_of_turn(template: Template) -> str:
    """What stands behind a question in a prompt; not every template writes less when no turn is to be opened."""
    return template.render([{"role": "user", "content": "probe"}], None, True).rpartition("probe")[2]


def _difference(own: Template, trained: Template) -> str | None:
    """Where a training template writes another prompt or suffix than the own one; rows have nothing else of it.

    Only what the own one shows and does not take back can be compared.
    """
    ours, theirs = _remembering(trained), _remembering(own)
    tools = None if _lacks_tools(theirs) else PROBE_TOOLS
    end = find_turn_end(trained.tokenizer, trained.render)
    assert end is not None  # the training template was proved
    for messages in tool_conversations(theirs, images=own.images is not None):
        turn = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        pairs = []
        with suppress(TemplateError):  # what the own one cannot render has no other rendering
            pairs.append([render(messages[:turn], tools, True) for render in (theirs, ours)])
            kept = tools is not None and first_break(theirs, messages, tools) is None
            for index, after in _rounds(messages) if kept else ():
                pairs.append([_tail(render, messages[:after], index, end) for render in (theirs, ours)])
        for pair in pairs:
            if len(set(pair)) > 1:
                start = _agreement(*pair)
                shown = [text[max(0, start - 20) : start + 100] for text in pair]
                return f"it writes something else.\n  own:      …{shown[0]!r}\n  training: …{shown[1]!r}"
    return None


def _lacks_tools(render: Render) -> bool:
    """Whether a template shows no tools at all; one that refuses a conversation may show them in others."""
    with suppress(TemplateError):
        return bool(missing_tool_parts(render))
    question: list[Message] = [{"role": "user", "content": "probe"}]
    return render(question, PROBE_TOOLS, False) == render(question, None, False)


def _remembering(template: Template) -> Render:
    """Render each conversation once: the questions that make up a proof share most of their renderings."""
    known: dict[tuple[str, str, bool], str] = {}

    def render(messages: list[Message], tools: list[dict[str, Any]] | None, open_turn: bool) -> str:
        key = (repr(messages), repr(tools), open_turn)
        if key not in known:
            known[key] = template.render_quickly(messages, tools, open_turn)
        return known[key]

    return render


def _rounds(messages: list[Message]) -> Iterator[tuple[int, int]]:
    """The turns that are answered: index of the turn, and index after its results."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("tool_calls"):
            yield index, index + 1 + len(message["tool_calls"])


def _wrong_suffix(render: Render, messages: list[Message], rule: SuffixRule, end: TurnEnd) -> str | None:
    """Compare the suffixes of the rule with those that the conversation itself has, in text and in ids."""
    last_id = end.anchor if end.text is not None else -1  # as if no marker had been sampled: the whole glue
    rounds = list(_rounds(messages))
    for turn, after in rounds:
        grown = render(messages[:after], PROBE_TOOLS, True)
        tail = _tail(render, messages[:after], turn, end)
        said = rule.text(last_id, messages[turn], messages[turn + 1 : after], True)
        if tail != said:
            return (
                f"what follows message {turn} (assistant) depends on the conversation before it.\n"
                f"  here:      {tail!r}\n  elsewhere: {said!r}"
            )
    if rounds and rule.encode_all(grown) != rule.encode_all(grown[: len(grown) - len(tail)]) + rule.encode(tail):
        return f"the tokenizer joins what follows message {turn} (assistant) with the turn: {tail!r}"
    return None


def _tail(render: Render, messages: list[Message], turn: int, end: TurnEnd) -> str:
    """What a conversation has after a turn, found as the common end of renderings with two different turns."""
    written = end.written(render(messages[: turn + 1], PROBE_TOOLS, False))
    if written is None:
        return render(messages, PROBE_TOOLS, True).removeprefix(render(messages[: turn + 1], PROBE_TOOLS, False))
    texts = []
    for mark in ("qa", "qb"):  # what differs last in the turn is the last thing that it writes
        changed = messages[turn]
        calls = [
            {**call, "function": {**call["function"], "arguments": {"key": mark}}} for call in changed["tool_calls"]
        ]
        content = f"{changed['content']}{mark}" if changed["content"] else ""
        changed = {**changed, "content": content, "tool_calls": calls}
        texts.append(render([*messages[:turn], changed, *messages[turn + 1 :]], PROBE_TOOLS, True))
    size = _agreement(reversed(texts[0]), reversed(texts[1]))
    return texts[0][len(texts[0]) - size :].partition(written)[2]


def _agreement(first: Iterable[str], second: Iterable[str]) -> int:
    """With how many equal characters two texts begin."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in same)


def _rewrites_turns_only(render: Render, messages: list[Message], end: TurnEnd) -> bool:
    """Whether all but the turns of the assistant stays, in order, when the conversation goes on."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    whole = render(messages, PROBE_TOOLS, False)
    start = render(messages[: turns[0]], PROBE_TOOLS, False)
    if end.text is None or not whole.startswith(start):
        return False
    position = len(start)
    prompt = render(messages[: turns[0]], PROBE_TOOLS, True).removeprefix(start)
    for turn, after in _rounds(messages):
        tail = _tail(render, messages[:after], turn, end)
        kept = f"{end.written(render(messages[: turn + 1], PROBE_TOOLS, False))}{tail.removesuffix(prompt)}"
        position = whole.find(kept, position)
        if position < 0:
            return False
        position += len(kept)
    return True
