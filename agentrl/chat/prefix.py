"""Whether a template can be used token-exactly for tool rounds.

Two questions about a template, answered by rendering conversations made for it: does it show all of a tool
round, and does a conversation that grows keep the text it had. Pure functions of a `Render`; nothing here
knows tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.chat.messages import REASONING_FIELDS
from agentrl.errors import TemplateError
from agentrl.types import Message

Render = Callable[[list[Message], list[dict[str, Any]] | None, bool], str]
"""Messages, tools and whether to add the generation prompt, to text."""

_SHOWN = 160
"""Characters of a rendering that an error shows."""


def tool_schema(name: str) -> dict[str, Any]:
    """Give a small tool definition, for probing.

    Args:
        name: The tool's name.

    Returns:
        A JSON schema in OpenAI form.
    """
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    return {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": parameters},
    }


def tool_call(index: int, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Give a call in OpenAI form.

    Args:
        index: Number of the call within the rollout.
        name: The tool's name.
        arguments: The keyword arguments, as a template reads them.

    Returns:
        The entry of `tool_calls`.
    """
    return {"id": call_id(index), "type": "function", "function": {"name": name, "arguments": arguments}}


def call_id(index: int) -> str:
    """Name a call by its number within the rollout.

    Some templates (Mistral's) raise unless an id has nine letters or digits, so all have.

    Args:
        index: Number of the call within the rollout, from 0.

    Returns:
        The id.
    """
    return f"call{index:05d}"


def missing_tool_parts(render: Render) -> list[str]:
    """Find out what of a tool round a template does not show.

    Args:
        render: The template.

    Returns:
        Names of the missing parts; empty when the template can be used with tools.
    """
    tools = [tool_schema("probe_declared"), tool_schema("probe_called")]
    question = {"role": "user", "content": "probe_question"}
    call = tool_call(0, "probe_called", {"key": "probe_value"})
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "probe_called", "tool_call_id": call_id(0), "content": "probe_result"}
    before = render([question], tools, False)
    after = render([question, turn, result], tools, False)
    shown = {
        "tool definitions": "probe_declared" in before,
        # The definitions hold the name too, so count.
        "names of called tools": after.count("probe_called") > before.count("probe_called"),
        "arguments of tool calls": "probe_value" in after,
        "tool results": "probe_result" in after,
    }
    return [part for part, is_shown in shown.items() if not is_shown]


def supports_tools(render: Render) -> bool:
    """Tell whether a template shows tool definitions, calls with their arguments, and results.

    Args:
        render: The template.

    Returns:
        Whether all parts of a tool round are shown.
    """
    return not missing_tool_parts(render)


@dataclass(frozen=True, slots=True)
class Break:
    """Where a growing conversation changed text that was already there.

    Attributes:
        index: The message whose rendering changed.
        role: Its role.
        before: The text from the change on, before the conversation grew.
        after: The same after it.
    """

    index: int
    role: str
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"the rendering of message {self.index} ({self.role}) changes when the conversation goes on.\n"
            f"  before: …{self.before[:_SHOWN]!r}\n  after:  …{self.after[:_SHOWN]!r}"
        )


def first_break(render: Render, messages: list[Message], tools: list[dict[str, Any]] | None) -> Break | None:
    """Find the first place where a conversation, played turn by turn, changes what was already rendered.

    A turn begins with the generation prompt after the messages before it, and ends where the results of its
    calls begin; both texts must be the beginning of all later ones.

    Args:
        render: The template.
        messages: The whole conversation.
        tools: The tools declared in it.

    Returns:
        The break, or None where the template is prefix-preserving on this conversation.
    """
    seen = ""
    for size, open_turn in _stages(messages):
        text = render(messages[:size], tools, open_turn)
        if not text.startswith(seen):
            return _locate(render, messages, tools, seen, text)
        seen = text
    return None


def _stages(messages: list[Message]) -> Iterator[tuple[int, bool]]:
    """What the sampler sees before and after each turn: number of messages, and whether a turn is open."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield index, True
            yield index + 1, False
    if messages[-1]["role"] != "assistant":
        yield len(messages), True


def _locate(
    render: Render, messages: list[Message], tools: list[dict[str, Any]] | None, before: str, after: str
) -> Break:
    start = next(
        (index for index, (old, new) in enumerate(zip(before, after, strict=False)) if old != new),
        min(len(before), len(after)),
    )
    ends = [len(render(messages[: size + 1], tools, False)) for size in range(len(messages))]
    index = next((index for index, end in enumerate(ends) if end > start), len(messages) - 1)
    context = max(0, start - 20)
    return Break(index, messages[index]["role"], before[context:], after[context:])


def check_prefix_preserving(render: Render) -> None:
    """Prove on generated tool conversations that a template is prefix-preserving.

    Args:
        render: The template.

    Raises:
        TemplateError: It is not; names the message whose rendering changed and shows both renderings.
    """
    for messages in tool_conversations(render):
        found = first_break(render, messages, PROBE_TOOLS)
        if found is not None:
            raise TemplateError(describe_break(messages, found))


def describe_break(messages: list[Message], found: Break) -> str:
    """Say where which conversation broke.

    Args:
        messages: The conversation.
        found: The break.

    Returns:
        One sentence and the two renderings.
    """
    return f"In a conversation of {', '.join(message['role'] for message in messages)}, {found}"


PROBE_TOOLS = [tool_schema("probe_called"), tool_schema("probe_other")]
"""The tools that are declared in the conversations of `tool_conversations`."""

_SYSTEM: list[Message] = [{"role": "system", "content": "Be brief."}]
_SHAPES: tuple[tuple[list[Message], str, tuple[int, ...]], ...] = (
    (_SYSTEM, "Let me see.", ()),
    ([], "Let me see.", (1,)),
    (_SYSTEM, "", (1,)),
    ([], "", (2,)),
    (_SYSTEM, "Zürich, 東京 🙂", (1, 2)),
    ([], "", (3, 1)),
    ([], "One.\n\nTwo words, " + "and more " * 99 + "end.", (1, 1, 1)),
    (_SYSTEM, "", (1, 1, 2)),
)
"""System prompt, content of the turns, and the number of calls in each tool round."""
_RESULTS = ("7", '{"price": [1, null], "note": "é <b>"}', "", " two words \n", "東京 🙂\n\nend", "long " * 99 + "end")
"""Contents of tool results; those of one conversation differ."""


def tool_conversations(render: Render, *, images: bool = False) -> Iterator[list[Message]]:
    """Generate conversations of every shape that an episode can have.

    Args:
        render: The template. It decides where turns can have reasoning.
        images: Whether messages can have images.

    Yields:
        Conversations of zero to three tool rounds, each with one or several calls, with and without a system
        prompt, content and reasoning, with short, long, empty and non-ASCII texts, all with a final answer; where
        messages can have images, also with images in the question and in every result.
    """
    kinds = _thoughts(render)
    for index, thoughts in enumerate(kinds):
        for system, content, rounds in _SHAPES[1::2] if index else _SHAPES:
            yield _conversation(thoughts, system, content, rounds)
    if images:
        yield [_with_image(message) for message in _conversation(kinds[0], _SYSTEM, "", (1, 2))]


def _with_image(message: Message) -> Message:
    if message["role"] not in ("user", "tool"):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}, {"type": "image"}]}


def _thoughts(render: Render) -> list[tuple[str, ...]]:
    """Where the turns of a conversation can have reasoning, in turns, given what the generation prompt has written.

    A turn has "none", a "field" (`reasoning_content` and its other names), or writes it "inline".
    """
    question: list[Message] = [{"role": "user", "content": "probe"}]
    header = render(question, None, True).removeprefix(render(question, None, False))
    if "</think>" in header:
        return [("none",)]
    if "<think>" in header:
        return [("field",), ("inline",)]
    return [("none",), ("field",), ("inline",), ("none", "field")]


def _conversation(
    thoughts: tuple[str, ...], system: list[Message], content: str, rounds: tuple[int, ...]
) -> list[Message]:
    messages: list[Message] = [*system, {"role": "user", "content": "How much?"}]
    number = 0
    for index, calls in enumerate(rounds):
        numbers = range(number, number + calls)
        made = [tool_call(call, "probe_called", {"key": f"v{call}"}) for call in numbers]
        messages.append({**_turn(thoughts[index % len(thoughts)], content), "tool_calls": made})
        for call in numbers:
            result = {"role": "tool", "name": "probe_called", "tool_call_id": call_id(call)}
            messages.append({**result, "content": f"{_RESULTS[call % len(_RESULTS)]}"})
        number += calls
    return [*messages, _turn(thoughts[len(rounds) % len(thoughts)], "Seven.")]


def _turn(thought: str, content: str) -> Message:
    if thought == "inline":
        content = f"<think>\nbecause\n</think>\n\n{content}"
    reasoning = dict.fromkeys(REASONING_FIELDS, "because") if thought == "field" else {}
    return {"role": "assistant", "content": content, **reasoning}
