"""Known model families: how each writes a turn, and which training template takes the place of its own.

A family is recognised by the markers that its chat template writes and by those it does not write, never by comparing
whole texts, so a fork with another default prompt or one more space is still recognised. To add a family, add a
`Family` to `FAMILIES`, and a training template to `chat_templates/` where the models' own one is not exact.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentrl.chat.formats import CallSyntax, Reasoning, TurnFormat
from agentrl.chat.prefix import Render, tool_schema
from agentrl.chat.turns import prompt_after_results
from agentrl.errors import TemplateError
from agentrl.types import Message


@dataclass(frozen=True, slots=True)
class Family:
    """Models that share a chat format.

    Attributes:
        name: Name for messages to the user.
        markers: What the chat template must contain.
        foreign: What it must not contain: the markers of relatives with another format.
        format: How a turn is written.
        training_template: File in `chat_templates/`; None where the members' own templates are exact, or not at hand.
        facts: What the training template has to know of the member's own: name of a variable, and a pattern whose
            group is searched in the own prompt for a question.
        tools_are_ours: Whether that template writes tools in a form of ours, because the members were trained on none.
    """

    name: str
    markers: tuple[str, ...]
    format: TurnFormat
    foreign: tuple[str, ...] = ()
    training_template: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    tools_are_ours: bool = False


_HERMES = TurnFormat(CallSyntax.HERMES)
_PLAIN_HERMES = TurnFormat(CallSyntax.HERMES, reasoning=None)
_CHATML = ("<|im_start|>", "<|im_end|>")
_QWEN = ("<tool_call>", "<tool_response>", "<tools>")
_XML = ("<function=", "<parameter=")
_MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
_COHERE = ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>")
# Command R7B's template opens a turn whether it is asked to or not.
_COHERE_FACTS = {"generation_prompt": r"(<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>.*)\Z"}
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")

# The first match counts: a family stands in front of those whose markers are a part of its own.
FAMILIES = (
    Family(
        "SmolLM3",
        ("<|im_start|>", "Reasoning Mode: ", "## Custom Instructions"),
        _HERMES,
        training_template="smollm3.jinja",
        facts={"persona": r"## Custom Instructions\n\n((?s:.*?))\n\n<\|im_start\|>"},
    ),
    Family("Nemotron 3", (*_CHATML, *_XML, "<name>", "<description>", "</think>"), TurnFormat(CallSyntax.XML)),
    Family("Qwen3.5", (*_CHATML, *_QWEN, *_XML, "</think>"), TurnFormat(CallSyntax.XML)),
    Family("Qwen3-VL", (*_CHATML, *_QWEN, "<|vision_start|>"), _HERMES, foreign=(*_XML, "default_system")),
    Family(
        "Qwen2-VL",
        (*_CHATML, "<|vision_start|>", "<|image_pad|>"),
        _PLAIN_HERMES,
        foreign=_XML,
        training_template="qwen2_vl.jinja",
        tools_are_ours=True,
    ),
    Family(
        "InternVL",
        (*_CHATML, "<IMG_CONTEXT>"),
        _PLAIN_HERMES,
        training_template="internvl.jinja",
        tools_are_ours=True,
    ),
    Family(
        "Qwen3",
        (*_CHATML, *_QWEN, "</think>", "reasoning_content"),
        _HERMES,
        foreign=(*_XML, "<|vision_start|>"),
        training_template="qwen3.jinja",
    ),
    Family(
        "Qwen2.5",
        (*_CHATML, *_QWEN),
        _HERMES,
        foreign=(*_XML, "<|vision_start|>", "<think>", "</think>"),
        training_template="qwen2_5.jinja",
    ),
    Family(
        "LFM2",
        (*_CHATML, "<|tool_list_start|>", "<|tool_response_start|>"),
        TurnFormat(CallSyntax.LFM2, reasoning=None),
        training_template="lfm2.jinja",
    ),
    Family("LFM2.5", (*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"), TurnFormat(CallSyntax.LFM2)),
    Family(
        "Llama 3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "ipython", '"parameters": '),
        TurnFormat(CallSyntax.LLAMA, reasoning=None),
        training_template="llama3.jinja",
        facts={"date_string": r"Today Date: (.*)\n"},
    ),
    Family(
        "Beam",
        ("<|channel|>", "<rfl:parameter"),
        TurnFormat(CallSyntax.BEAM, Reasoning(field="thinking")),
    ),
    Family(
        "GPT-OSS",
        ("<|start|>", "<|channel|>analysis<|message|>", "<|channel|>commentary", "<|call|>", "functions."),
        TurnFormat(CallSyntax.HARMONY, Reasoning(field="thinking")),
        training_template="gpt_oss.jinja",
    ),
    Family(
        "DeepSeek-V3",
        (*_DEEPSEEK, "```json"),
        TurnFormat(CallSyntax.DEEPSEEK),
        training_template="deepseek_v3.jinja",
    ),
    Family(
        "DeepSeek-V3.1",
        _DEEPSEEK,
        TurnFormat(CallSyntax.DEEPSEEK),
        foreign=("```json",),
        training_template="deepseek_v3_1.jinja",
    ),
    Family(
        "GLM-4-MoE",
        ("[gMASK]<sop>", "<|observation|>", "<arg_key>", "<arg_value>"),
        TurnFormat(CallSyntax.GLM),
    ),
    Family(
        "Gemma 4",
        ("<|turn>", "<turn|>", "<|tool_call>call:"),
        TurnFormat(CallSyntax.GEMMA, Reasoning("<|channel>thought\n", "<channel|>")),
        training_template="gemma4.jinja",
    ),
    Family(
        "Gemma 3",
        ("<start_of_turn>", "<end_of_turn>"),
        _PLAIN_HERMES,
        training_template="gemma3.jinja",
        tools_are_ours=True,
    ),
    Family(
        "Phi-4-mini",
        ("<|tool|>", "<|/tool|>", "<|end|>"),
        TurnFormat(CallSyntax.PHI, reasoning=None),
        training_template="phi4_mini.jinja",
    ),
    Family(
        "Phi-3",
        ("<|end|>", "<|assistant|>"),
        _PLAIN_HERMES,
        foreign=("<|tool|>", "<|observation|>"),
        training_template="phi.jinja",
        facts={
            "opening": r"\A(.*?)<\|user\|>",
            "closing": r"probe(<\|end\|>\n?)",
            "generation_prompt": r"(<\|assistant\|>\n?)\Z",  # the own one ends with EOS when it opens no turn
        },
        tools_are_ours=True,
    ),
    Family(
        "Cohere 2",
        (*_COHERE, "<|START_ACTION|>", "<|START_TOOL_RESULT|>"),
        TurnFormat(CallSyntax.COHERE, Reasoning("<|START_THINKING|>", "<|END_THINKING|>")),
        training_template="cohere2.jinja",
        facts=_COHERE_FACTS,
    ),
    Family(
        "Tiny Aya",
        _COHERE,
        TurnFormat(CallSyntax.COHERE, reasoning=None),
        training_template="cohere2.jinja",
        facts=_COHERE_FACTS,
        tools_are_ours=True,
    ),
    Family(
        "Phi-4",
        (*_CHATML, "<|im_sep|>"),
        _PLAIN_HERMES,
        training_template="phi.jinja",
        facts={"opening": r"\A(.*?)<\|im_start\|>", "closing": r"probe(<\|im_end\|>\n?)"},
        tools_are_ours=True,
    ),
    Family("Magistral", (*_MISTRAL, "<think>", "</think>"), TurnFormat(CallSyntax.MISTRAL)),
    Family(
        "Mistral",
        _MISTRAL,
        TurnFormat(CallSyntax.MISTRAL, Reasoning("[THINK]", "[/THINK]")),
    ),
    Family(
        "LLaVA-NeXT",
        ("[INST]", "[/INST]", "<image>"),
        _PLAIN_HERMES,
        foreign=("[AVAILABLE_TOOLS]",),
        training_template="llava_next.jinja",
        facts={"opening": r"\A(.*?)\[INST\]"},
        tools_are_ours=True,
    ),
    Family(
        "SmolVLM",
        ("<end_of_utterance>", "<image>"),
        _PLAIN_HERMES,
        training_template="smolvlm.jinja",
        facts={"opening": r"\A(.*?)User:"},
        tools_are_ours=True,
    ),
    Family("SmolLM2", (*_CHATML, "role"), _PLAIN_HERMES, foreign=("tool", "think"), training_template="smollm2.jinja"),
)

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def recognise(template: str) -> Family | None:
    """Find the family of a chat template.

    Args:
        template: The template's source. Its comments do not count.

    Returns:
        The family, or None.
    """
    template = _COMMENT.sub("", template)
    for family in FAMILIES:
        has_markers = all(marker in template for marker in family.markers)
        if has_markers and not any(marker in template for marker in family.foreign):
            return family
    return None


def training_template(family: Family, own: Render) -> str:
    """Give a family's training template with what it has to know of one of its members.

    Args:
        family: The family; it must have a training template.
        own: The member's own template.

    Returns:
        Template source.

    Raises:
        TemplateError: The family has no training template, or the member's own does not show a fact.
    """
    if family.training_template is None:
        raise TemplateError(f"There is no training template for {family.name}.")
    folder = importlib.resources.files("agentrl.chat_templates")
    source = folder.joinpath(family.training_template).read_text(encoding="utf-8")
    values = {name: find(own) for name, find in _KNOWN.items() if name in source and name not in family.facts}
    values |= {name: _fact(family, name, pattern, own) for name, pattern in family.facts.items()}
    return "".join(f"{{%- set {name} = {_literal(value)} -%}}\n" for name, value in values.items()) + source


_QUESTION: Message = {"role": "user", "content": "probe"}


def _literal(value: str | list[str] | None) -> str:
    """A value as Jinja writes it; a character that JSON escapes as two halves would fall apart there."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _fact(family: Family, name: str, pattern: str, own: Render) -> str:
    found = re.search(pattern, own([_QUESTION], None, True))
    if found is None:
        raise TemplateError(
            f"The chat template looks like one of {family.name} but does not write {pattern!r}, from which the "
            f"training template takes `{name}`. Set `tokenizer.chat_template`."
        )
    return found.group(1)


def _default_system(own: Render) -> str | None:
    """The system prompt that a template writes for a conversation without one, None where it writes none."""
    user = {"role": "user", "content": "probe"}
    system = {"role": "system", "content": "probe_system"}
    header, found, footer = own([system, user], None, False).partition("probe_system")
    text = own([user], None, False)
    if not found or not text.startswith(header) or not text.endswith(footer):
        return None
    return text[len(header) : len(text) - len(footer)]


def _generation_prompt(own: Render) -> str:
    return own([_QUESTION], None, True).removeprefix(own([_QUESTION], None, False))


def _openings(own: Render) -> list[str]:
    """A question without and with a system prompt, and the same two with a tool."""
    system: Message = {"role": "system", "content": "probe_system"}
    prompts: list[list[Message]] = [[_QUESTION], [system, _QUESTION]]
    return [own(prompt, tools, False) for tools in (None, [tool_schema("probe_tool")]) for prompt in prompts]


_KNOWN: Mapping[str, Callable[[Render], str | list[str] | None]] = {
    "default_system": _default_system,
    "generation_prompt": _generation_prompt,
    "results_prompt": prompt_after_results,
    "openings": _openings,
}
"""What a training template can know of any member's own, by the name of the variable."""
