"""Messages in the form that templates read, whatever the dataset or the author made of them.

Pure functions; the caller's messages are never changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agentrl.errors import TemplateError
from agentrl.types import Message

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which messages carry reasoning."""


def clean_messages(messages: list[Message]) -> list[Message]:
    """Drop the keys without a value that Arrow put into messages.

    Arrow gives all structs of a column the same keys and fills the missing ones with None, at every depth: a
    user message gains `tool_calls: None`, a call of one tool the arguments of another one. A None that the
    author wrote cannot be told from those, so it is dropped as well; who needs it writes the arguments as a
    JSON string. None as an element of a list stays, because Arrow never adds elements.

    Args:
        messages: Messages as they came out of a dataset.

    Returns:
        New messages without None values.
    """
    return [_drop_nulls(message) for message in messages]


def clean_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys without a value that Arrow put into the structs of a dataset row.

    Args:
        row: The columns of one row.

    Returns:
        A new row with the same columns, those that are None included, cleaned by the rule of
        `clean_messages`.
    """
    return {name: _drop_nulls(value) for name, value in row.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """What a template can print as the arguments of a call.

    Attributes:
        mapping: A dict comes out as something else than Python's repr of it.
        string: A JSON string comes out as it is.
    """

    mapping: bool
    string: bool


def to_template(messages: list[Message], form: ArgumentForm) -> list[Message]:
    """Bring messages into the form that a text template reads.

    Missing content becomes "", since many templates add strings to it. Text blocks are joined. Arguments are
    given as the template can print them: a JSON string stays as it is where the template prints strings;
    where it needs a mapping, the string is decoded, and one that does not hold a JSON object becomes `{}`,
    as do missing arguments.

    Args:
        messages: Messages in OpenAI form.
        form: What the template can print as arguments.

    Returns:
        New messages.

    Raises:
        TemplateError: A message has content that is not text.
    """
    return [_message_to_template(index, message, form) for index, message in enumerate(messages)]


def _message_to_template(index: int, message: Message, form: ArgumentForm) -> Message:
    message = {**message, "content": _text(index, message)}
    if message.get("tool_calls"):
        message["tool_calls"] = [_call_to_template(call, form) for call in message["tool_calls"]]
    return message


def _text(index: int, message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    blocks = [block.get("text") if isinstance(block, dict) else None for block in content]
    texts = [text for text in blocks if isinstance(text, str)]
    if len(texts) != len(blocks):
        raise TemplateError(
            f"message {index} ({message.get('role')}) has content blocks that are not text: "
            f"{str(content)[:200]}. A tokenizer renders text only; give a string or text blocks."
        )
    return "".join(texts)


def _call_to_template(call: dict[str, Any], form: ArgumentForm) -> dict[str, Any]:
    function = call.get("function")
    if function is None:
        return {**call, "arguments": _arguments(call.get("arguments"), form)}
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), form)}}


def _arguments(arguments: Any, form: ArgumentForm) -> dict[str, Any] | str:
    if isinstance(arguments, str) and form.string:
        return arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return arguments if form.mapping else json.dumps(arguments, ensure_ascii=False)
