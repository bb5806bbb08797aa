"""How families write a turn of the assistant: plain definitions, named so that a family can point at them.

The code that reads each syntax is in `agentrl.chat.calls`; what a whole turn is made of, in
`agentrl.chat.parsing`. A format that a user gives as a transformers response template is in
`agentrl.chat.response_templates`; one found by rendering, in `agentrl.chat.derivation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CallSyntax(StrEnum):
    """How a model writes tool calls. `{}` stands for a JSON object of arguments."""

    HERMES = "hermes"
    """`<tool_call>{"name": "f", "arguments": {}}</tool_call>`: Qwen2.5, Qwen3, SmolLM3 (XML tools), Hermes."""
    XML = "xml"
    """`<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`: Qwen3.5, Qwen3-Coder, Nemotron 3."""
    GLM = "glm"
    """`<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`: GLM 4.5, 4.6, 4.7."""
    DEEPSEEK = "deepseek"
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f` and a fenced JSON block (V3, R1), or
    `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}` (V3.1), each up to `<｜tool▁call▁end｜>`."""
    LLAMA = "llama"
    """`{"name": "f", "parameters": {}}`, maybe after `<|python_tag|>`, several joined by `;`: Llama 3.1 to 3.3."""
    PYTHONIC = "pythonic"
    """`[f(a=1), g()]` at the start of a line, maybe within `<|python_start|>` and `<|python_end|>`: Llama 4."""
    LFM2 = "lfm2"
    """`<|tool_call_start|>[f(a=1)]<|tool_call_end|>`: LFM2, LFM2.5."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": "f", "arguments": {}}]` or `[TOOL_CALLS]f[ARGS]{}`: Mistral, Ministral, Magistral."""
    HARMONY = "harmony"
    """Messages on channels, a call being a message to `functions.f`; also says what is reasoning: GPT-OSS."""
    BEAM = "beam"
    """As `HARMONY`, but each argument `<rfl:parameter name="k">\\nv\\n</rfl:parameter>`: Beam."""
    COHERE = "cohere"
    """`<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>`: Command R7B, Command A."""
    GEMMA = "gemma"
    """`<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`: Gemma 4."""
    FUNCTION_GEMMA = "function_gemma"
    """`<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>`: FunctionGemma."""
    PHI = "phi"
    """`<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>`: Phi-4-mini."""
    PYTHON_TAGS = "python_tags"
    """`<code>f(a=1)</code>`: SmolLM3 (Python tools)."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """JSON objects between literal markers, for models of no known family.

    Attributes:
        opening: What stands in front of the object, or of a list of them.
        closing: What ends it.
        name_key: The key that holds the tool's name.
        arguments_key: The key that holds its arguments.
    """

    opening: str
    closing: str
    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What a model writes around its reasoning, and the field of the message that its template reads it from."""

    opening: str = "<think>"
    closing: str = "</think>"
    field: str = "reasoning_content"


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How a family writes a turn of the assistant.

    Attributes:
        calls: How it writes calls; None where it has none.
        reasoning: What surrounds its reasoning; None where it writes none. Harmony uses only `field`.
    """

    calls: CallSyntax | JsonCalls | None
    reasoning: Reasoning | None = Reasoning()
