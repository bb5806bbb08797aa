"""Messages in the form that templates read, whatever the dataset or the author made of them.

Pure functions; the caller's messages are never changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.chat.pictures import is_image_block
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


@dataclass(frozen=True, slots=True)
class ContentForm:
    """How a template takes the content of messages.

    Attributes:
        text_in_blocks: Text has to come in content blocks, too.
        images: Whether content may have images.
        marker: What the template writes for an image, put into the text of tool results where it shows no blocks in
            them; None where it does.
        disarm: Rewrites text that would pass for an image.
    """

    text_in_blocks: bool = False
    images: bool = False
    marker: str | None = None
    disarm: Callable[[str], str] = str


def to_template(messages: list[Message], form: ArgumentForm, content: ContentForm | None = None) -> list[Message]:
    """Bring messages into the form that a template reads.

    Missing content becomes "", since many templates add strings to it. Text blocks are joined, unless there are images
    among them. Arguments are given as the template can print them: a JSON string stays as it is where the template
    prints strings; where it needs a mapping, the string is decoded, and one that does not hold a JSON object becomes
    `{}`, as do missing arguments.

    Args:
        messages: Messages in OpenAI form.
        form: What the template can print as arguments.
        content: How it takes content; text only by default.

    Returns:
        New messages.

    Raises:
        TemplateError: A message has content that the template cannot show.
    """
    content = content or ContentForm()
    return [_message_to_template(index, message, form, content) for index, message in enumerate(messages)]


def _message_to_template(index: int, message: Message, form: ArgumentForm, shown: ContentForm) -> Message:
    message = {**message, "content": _content(index, message, shown)}
    if message.get("tool_calls"):
        message["tool_calls"] = [_call_to_template(call, form) for call in message["tool_calls"]]
    return message


def _content(index: int, message: Message, form: ContentForm) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        text = form.disarm(content or "")
        return [{"type": "text", "text": text}] if form.text_in_blocks else text
    parts: list[str | None] = []  # None for an image
    for block in content:
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            parts.append(form.disarm(block["text"]))
        elif form.images and is_image_block(block):
            parts.append(None)
        else:
            raise TemplateError(
                f"message {index} ({message.get('role')}) has content blocks that are not text: {str(content)[:200]}. "
                + (
                    "A processor renders text and images."
                    if form.images
                    else "A tokenizer renders text only; give a string or text blocks, or for a vision-language model "
                    "its processor as processing_class."
                )
            )
    if message.get("role") == "tool" and form.marker is not None:
        parts = [form.marker if part is None else part for part in parts]
    texts = [part for part in parts if part is not None]
    if len(texts) == len(parts) and not form.text_in_blocks:
        return "".join(texts)
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


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
