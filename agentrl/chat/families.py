"""Known model families: which training template and which response format belong to a chat template.

A family is recognised by the markers its template writes and by those it does not write, never by comparing
whole texts, so a fork with another default prompt or one more space is still recognised. To add a family,
add its training template to `chat_templates/` and a `Family` to `FAMILIES`; the first match counts.
"""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass

from agentrl.chat.formats import CallSyntax, TurnFormat
from agentrl.chat.prefix import Render


@dataclass(frozen=True, slots=True)
class Family:
    """Models that share a chat format.

    Attributes:
        name: Name for messages to the user.
        training_template: File in `chat_templates/`.
        format: How a turn is written.
        markers: What the chat template must contain.
        foreign: What it must not contain: the markers of relatives with another format.
    """

    name: str
    training_template: str
    format: TurnFormat
    markers: tuple[str, ...]
    foreign: tuple[str, ...]


_HERMES = TurnFormat(CallSyntax.HERMES)

_QWEN_MARKERS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "<tool_response>", "<tools>")
# Qwen3.5 and later write calls as XML; the VL models have content blocks.
_QWEN_FOREIGN = ("<function=", "<|vision_start|>")

FAMILIES = (
    Family(
        name="Qwen3",
        training_template="qwen3.jinja",
        format=_HERMES,
        markers=(*_QWEN_MARKERS, "</think>", "reasoning_content"),
        foreign=_QWEN_FOREIGN,
    ),
    Family(
        name="Qwen2.5",
        training_template="qwen2_5.jinja",
        format=_HERMES,
        markers=_QWEN_MARKERS,
        foreign=(*_QWEN_FOREIGN, "<think>", "</think>"),
    ),
)


def recognise(template: str) -> Family | None:
    """Find the family of a chat template.

    Args:
        template: The template's source.

    Returns:
        The family, or None.
    """
    for family in FAMILIES:
        has_markers = all(marker in template for marker in family.markers)
        if has_markers and not any(marker in template for marker in family.foreign):
            return family
    return None


def training_template(family: Family, own: Render) -> str:
    """Give a family's training template with the default system prompt of one of its members.

    Args:
        family: The family.
        own: The member's own template.

    Returns:
        Template source.
    """
    folder = importlib.resources.files("agentrl.chat_templates")
    source = folder.joinpath(family.training_template).read_text(encoding="utf-8")
    system = _default_system(own)
    default = "none" if system is None else json.dumps(system)
    return f"{{%- set default_system = {default} -%}}\n{source}"


def _default_system(own: Render) -> str | None:
    """The system prompt that a template writes for a conversation without one, None where it writes none."""
    user = {"role": "user", "content": "probe"}
    system = {"role": "system", "content": "probe_system"}
    header, found, footer = own([system, user], None, False).partition("probe_system")
    text = own([user], None, False)
    if not found or not text.startswith(header) or not text.endswith(footer):
        return None
    return text[len(header) : len(text) - len(footer)]
