"""Readers of the syntaxes in which models write tool calls, one module for each kind of notation.

The published notations are those of the models' own chat templates; each reader is tested against what such a
template renders.
"""

from __future__ import annotations

import re

from agentrl.chat.calls.gemma_calls import FUNCTION_GEMMA, GEMMA
from agentrl.chat.calls.json_calls import DEEPSEEK, LLAMA, MISTRAL, tagged
from agentrl.chat.calls.python_calls import LFM2, PYTHON_TAGS, PYTHONIC
from agentrl.chat.calls.reading import Syntax
from agentrl.chat.calls.xml_calls import GLM, XML
from agentrl.chat.formats import CallSyntax, JsonCalls

_COHERE_FRAMING = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

_SYNTAXES = {
    CallSyntax.HERMES: tagged("<tool_call>", "</tool_call>"),
    CallSyntax.XML: XML,
    CallSyntax.GLM: GLM,
    CallSyntax.DEEPSEEK: DEEPSEEK,
    CallSyntax.LLAMA: LLAMA,
    CallSyntax.PYTHONIC: PYTHONIC,
    CallSyntax.LFM2: LFM2,
    CallSyntax.MISTRAL: MISTRAL,
    CallSyntax.COHERE: tagged(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        ("tool_name", "name"),
        ("parameters",),
        framing=_COHERE_FRAMING,
        ids=("tool_call_id", re.compile("[0-9]{1,9}")),
    ),
    CallSyntax.GEMMA: GEMMA,
    CallSyntax.FUNCTION_GEMMA: FUNCTION_GEMMA,
    CallSyntax.PHI: tagged("<|tool_call|>", "<|/tool_call|>"),
    CallSyntax.PYTHON_TAGS: PYTHON_TAGS,
}


def syntax_of(calls: CallSyntax | JsonCalls) -> Syntax:
    """The reader of a syntax.

    Args:
        calls: Its name, or its markers. Those of GPT-OSS and Beam are no syntax of single calls, see `calls.harmony`.

    Returns:
        How to find and read such calls.
    """
    if isinstance(calls, JsonCalls):
        return tagged(calls.opening, calls.closing, (calls.name_key,), (calls.arguments_key,))
    return _SYNTAXES[calls]
