"""Whether a template can be used token-exactly for tool rounds.

Two questions about a template, answered by rendering conversations made for it: does it show all of a tool
round, and does a conversation that grows keep the text it had. Pure functions of a `Render`; nothing here
knows tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.errors import TemplateError
from agentrl.types import Message

Render = Callable[[list[Message], list[dict[str, Any]] | None, bool], str]
"""Messages, tools and whether to add the generation prompt, to text."""


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
            f"  before: …{self.before[:160]!r}\n  after:  …{self.after[:160]!r}"
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
    tools = [tool_schema("probe_called")]
    for messages in tool_conversations(_thoughts(render)):
        found = first_break(render, messages, tools)
        if found is not None:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(f"In a conversation of {roles}, {found}")


def _thoughts(render: Render) -> tuple[str, ...]:
    """Where a sampled turn can have reasoning, seen from what the generation prompt has already written."""
    question = [{"role": "user", "content": "probe"}]
    header = render(question, None, True).removeprefix(render(question, None, False))
    if "</think>" in header:
        return ("none",)
    return ("field", "inline") if "<think>" in header else ("none", "field", "inline")


def tool_conversations(thoughts: tuple[str, ...]) -> Iterator[list[Message]]:
    """Generate conversations with tool rounds of every shape.

    Args:
        thoughts: Where turns have reasoning: "none", "field" (`reasoning_content`) or "inline" (in the
            content).

    Yields:
        Conversations of one or two rounds, each with one or several calls, with and without content, all
        with a final answer.
    """
    for thought in thoughts:
        for content in ("", "Let me see."):
            for rounds in ((1,), (2,), (1, 2), (3, 1)):
                yield _conversation(thought, content, rounds)


def _conversation(thought: str, content: str, rounds: tuple[int, ...]) -> list[Message]:
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How much?"},
    ]
    number = 0
    for calls in rounds:
        numbers = range(number, number + calls)
        made = [tool_call(index, "probe_called", {"key": f"v{index}"}) for index in numbers]
        messages.append({**_turn(thought, content), "tool_calls": made})
        for index in numbers:
            result = {"role": "tool", "name": "probe_called", "tool_call_id": call_id(index)}
            messages.append({**result, "content": f"r{index}"})
        number += calls
    return [*messages, _turn(thought, "Seven.")]


def _turn(thought: str, content: str) -> Message:
    if thought == "inline":
        content = f"<think>\nbecause\n</think>\n\n{content}"
    reasoning = {"reasoning_content": "because"} if thought == "field" else {}
    return {"role": "assistant", "content": content, **reasoning}
