"""Models whose own chat templates are at hand: in trl (Apache-2.0), a development dependency.

Some are written here in short, because theirs are in no package. For conversations with a system prompt they write
the same text as the models' own, and Mistral's as mistral-common, as was checked when they were written. GLM-4.6 and
4.7 are changes to GLM-4.5. Each is paired with a stand-in tokenizer that has one token a byte, and every marker of its
template as an added token.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_letters
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl.chat.template import Template

_TRL = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
_MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[^|<>\s]{1,30}\|>|<｜[^<>\s]{1,40}｜>|\[/?[A-Z_]{3,20}\]"
    r"|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|end_of_utterance|image|arg_key|arg_value)>"
)


@dataclass(frozen=True)
class Member:
    """A model.

    Attributes:
        name: The model, as the table of the documentation names it.
        file: Its own template in trl.
        family: The family that it must be recognised as.
        eos: What it declares as EOS, further ones behind the first.
        variables: Variables for its template.
        changes: Texts of the file to replace, for relatives that differ in these.
        parallel: Whether it can make several calls in a turn.
        images: Whether it takes images.
        text: The template itself, where it is in no file of trl.
        folder: Its published tokenizer; None for the stand-in.
    """

    name: str
    file: str
    family: str
    eos: tuple[str, ...] = ("<|im_end|>",)
    variables: dict[str, Any] = field(default_factory=dict, hash=False)
    changes: tuple[tuple[str, str], ...] = ()
    parallel: bool = True
    images: bool = False
    text: str = ""
    folder: Path | None = None

    @property
    def source(self) -> str:
        text = self.text or (_TRL / f"{self.file}.jinja").read_text(encoding="utf-8")
        for old, new in self.changes:
            assert old in text
            text = text.replace(old, new)
        return text

    @property
    def template(self) -> Template:
        return Template(self.tokenizer(), self.source, self.variables)

    def tokenizer(self, seed: int | None = None) -> PreTrainedTokenizerFast:
        """The published one or the stand-in; with a seed, that also has tokens for random runs of letters."""
        tokenizer = _published(self.folder) if self.folder else _tokenizer(self.source, self.eos, seed)
        tokenizer.chat_template = self.source
        return tokenizer

    @property
    def eos_ids(self) -> list[int]:
        return self.eos_ids_of(self.tokenizer())

    def eos_ids_of(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        """The ids of what it declares as EOS."""
        vocabulary = tokenizer.get_added_vocab()
        return [vocabulary[text] for text in self.eos if text in vocabulary]


@cache
def _published(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@cache
def _tokenizer(source: str, eos: tuple[str, ...], seed: int | None) -> PreTrainedTokenizerFast:
    """One token a byte, and with a seed random merges of letters: they stay within what a model or a template wrote."""
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    letters, random = list(ascii_letters), Random(seed)
    while seed is not None and len(merges) < 200:
        pair = (random.choice(letters), random.choice(letters))
        if "".join(pair) not in tokens:
            merges.append(pair)
            letters.append("".join(pair))
            tokens.append("".join(pair))
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    markers = sorted({*_MARKER.findall(source), *eos, "<bos>"})
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=eos[0], pad_token=eos[0])


_THINKING = (
    (
        "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking",
        "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable_thinking",
    ),
)
# The same text as mistral-common 1.13.1 writes with `MistralTokenizer.v3(is_tekken=True)` for one question with tools.
_MISTRAL = """
{{- bos_token -}}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- if tools -%}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' + system + message.content + '[/INST]' -}}
    {%- elif message.tool_calls -%}
        {{- '[TOOL_CALLS][' -}}
        {%- for call in message.tool_calls -%}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
            {{- ', "id": "' + call.id[-9:] + '"}' + (', ' if not loop.last else ']') -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif message.role == 'assistant' -%}
        {{- message.content + eos_token -}}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id[-9:] -}}
        {{- '"}[/TOOL_RESULTS]' -}}
    {%- endif -%}
{%- endfor -%}
"""
# Likewise, as mistral-common 1.13.1 writes chat templates for versions 7, 11, 13 and 15 of its tokenizers.
_MISTRAL_V7 = """
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}
    {%- elif message.role == 'user' -%}
        {%- if tools and message == (messages | selectattr('role', 'equalto', 'user') | list)[-1] -%}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' + message.content + '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {{- message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '[TOOL_CALLS][' if loop.first else ', ' -}}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
            {{- ', "id": "' + call.id + '"}' + (']' if loop.last else '') -}}
        {%- endfor -%}
        {{- eos_token -}}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' -}}
    {%- endif -%}
{%- endfor -%}
"""
_V7_CALL = """
            {{- '[TOOL_CALLS][' if loop.first else ', ' -}}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
            {{- ', "id": "' + call.id + '"}' + (']' if loop.last else '') -}}"""
_V11_CALL = """
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id -}}
            {{- '[ARGS]' + call.function.arguments | tojson -}}"""
_REASONING = "{{- message.content -}}"
_MISTRAL_V11 = ((_V7_CALL, _V11_CALL),)
_MAGISTRAL_V11 = (
    *_MISTRAL_V11,
    (_REASONING, "{{- '<think>' + message.reasoning_content + '</think>' if message.reasoning_content }}" + _REASONING),
)
_MISTRAL_V13 = (
    *_MISTRAL_V11,
    ("[CALL_ID]' + call.id", "'"),
    ("list)[-1]", "list)[0]"),
    ("'[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]'", "'[TOOL_RESULTS]'"),
)
_MISTRAL_V13_THINKING = (
    *_MISTRAL_V13,
    (_REASONING, "{{- '[THINK]' + message.reasoning_content + '[/THINK]' if message.reasoning_content }}" + _REASONING),
)
_MISTRAL_V15 = (
    *_MISTRAL_V13_THINKING,
    (
        "{{- '[INST]'",
        '{{- \'[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]\' '
        "if not loop.previtem or loop.previtem.role == 'system' }}{{- '[INST]'",
    ),
)
_PHI4 = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_start|>assistant<|im_sep|>' if add_generation_prompt else '' -}}
"""
# As it writes conversations of text; tools that a system message brings along stand behind that.
_PHI4_MINI = """
{%- for message in messages -%}
    {{- '<|' + message.role + '|>' + message.content -}}
    {%- if message.role == 'system' and message.tools -%}{{- '<|tool|>' + message.tools + '<|/tool|>' -}}{%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else eos_token -}}
"""
_SMOLLM2 = """
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""
# The instructions are left out. It is that for tools; the models have others without.
_COMMAND_R7B = """
{{- bos_token + '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\\nYou are Command.\\n' -}}
{%- if tools -%}
    {{- '\\n## Tool Use\\nWrite <|START_ACTION|> followed by a list.\\n\\n## Available Tools\\n```json\\n[\\n' -}}
    {%- for tool in tools -%}
        {{- '    {"name": "' + tool.function.name + '", "description": "' + tool.function.description -}}
        {{- '", "parameters": ' + tool.function.parameters | tojson + ', "responses": null}' -}}
        {{- ',\\n' if not loop.last else '\\n' -}}
    {%- endfor -%}
    {{- ']\\n```\\n\\n' -}}
{%- endif -%}
{{- '# Default Preamble\\n- Your name is Command.' -}}
{%- set developer = messages[0].content if messages[0].role == 'system' else '' -%}
{{- '\\n\\n# Developer Preamble\\nThese take precedence.\\n' + developer if developer else '' -}}
{{- '<|END_OF_TURN_TOKEN|>' -}}
{%- set seen = namespace(calls=0, ids={}) -%}
{%- for message in (messages[1:] if developer else messages) -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}
        {%- if message.tool_calls -%}
            {{- '<|START_THINKING|>' + (message.tool_plan or '') + '<|END_THINKING|><|START_ACTION|>[\\n' -}}
            {%- for call in message.tool_calls -%}
                {{- '    {"tool_call_id": "' ~ seen.calls ~ '", "tool_name": "' + call.function.name -}}
                {{- '", "parameters": ' + call.function.arguments | tojson + '}' -}}
                {{- ',\\n' if not loop.last else '\\n]<|END_ACTION|>' -}}
                {%- set seen.ids = dict({call.id: seen.calls}, **seen.ids) -%}
                {%- set seen.calls = seen.calls + 1 -%}
            {%- endfor -%}
        {%- else -%}
            {{- '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' -}}
        {%- endif -%}
        {{- '<|END_OF_TURN_TOKEN|>' -}}
    {%- elif message.role == 'tool' -%}
        {%- set first, last = loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool' -%}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\\n' if first else ',\\n' -}}
        {{- '    {\\n        "tool_call_id": "' ~ seen.ids[message.tool_call_id] ~ '",\\n        "results": {\\n' -}}
        {{- '            "0": ' + message.content | tojson + '\\n        },\\n        "is_error": null\\n    }' -}}
        {{- '\\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' if last else '' -}}
    {%- else -%}
        {{- '<|START_OF_TURN_TOKEN|><|' + message.role.upper() + '_TOKEN|>' + message.content -}}
        {{- '<|END_OF_TURN_TOKEN|>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' -}}
"""
_DEEPSEEK_V3_1 = """
{{- bos_token + messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n\\n') -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<｜User｜>' + message.content -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<｜Assistant｜></think>' if loop.previtem.role == 'user' else '' -}}
        {{- message.content.split('</think>', 1)[-1] if not message.tool_calls else message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '' -}}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments -}}
            {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') -}}
        {%- endfor -%}
        {{- '<｜end▁of▁sentence｜>' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role == 'user' -%}
    {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""
_SMOLLM3 = """
{%- set mode = '/no_think' if enable_thinking is false else '/think' -%}
{%- set header = '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') -%}
{%- set asked = messages[0].content if messages[0].role == 'system' else '' -%}
{{- '<|im_start|>system\\n## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\nToday Date: ' -}}
{{- strftime_now('%d %B %Y') + '\\nReasoning Mode: ' + mode + '\\n\\n## Custom Instructions\\n\\n' -}}
{{- (asked.rstrip() or 'You are SmolLM.') + '\\n\\n' -}}
{%- if xml_tools -%}
    {{- '### Tools\\n\\nYou may call one or more functions to assist with the user query.\\n' -}}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n\\n<tools>\\n' -}}
    {%- for tool in xml_tools -%}{{- tool | string + '\\n' -}}{%- endfor -%}
    {{- '</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": ' -}}
    {{- '<args-json-object>}\\n</tool_call>\\n\\n<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
    {%- set own = message.role == 'assistant' -%}
    {{- header + message.content.lstrip('\\n') if own else '<|im_start|>user\\n' + message.content -}}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- header if add_generation_prompt else '' -}}
"""
INTERNVL = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}{{- message.content -}}{%- else -%}
        {%- for block in message.content -%}
            {{- '<IMG_CONTEXT>\\n' if block.type == 'image' else block.text -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""
_GLM_4_6 = (("tc.arguments %}", "tc.arguments or {} %}"),)
# Without `clear_thinking`, which is about turns in front of the last question.
_GLM_4_7 = (
    (
        "<|user|>\n{{ visible_text(m.content) }}\n{{- '/nothink' if (enable_thinking is defined "
        "and not enable_thinking and not visible_text(m.content).endswith(\"/nothink\")) else '' -}}",
        "<|user|>{{ visible_text(m.content) }}",
    ),
    ("{{ '\\n<think>' + reasoning", "{{ '<think>' + reasoning"),
    ("{{ '\\n<think></think>' }}", "{{ '</think>' }}"),
    ("{{ '\\n' + content.strip() }}", "{{ content.strip() }}"),
    ("{{ '\\n<tool_call>' + tc.name }}", "{{- '<tool_call>' + tc.name -}}"),
    ("tc.arguments %}\n{% for k, v in _args.items() %}\n", "tc.arguments %}{% for k, v in _args.items() %}"),
    ("</arg_key>\n<arg_value>{{ v", "</arg_key><arg_value>{{ v"),
    ("</arg_value>\n{% endfor %}\n</tool_call>", "</arg_value>{% endfor %}</tool_call>"),
    ("'\\n<tool_response>\\n'", "'<tool_response>'"),
    ("'\\n</tool_response>'", "'</tool_response>'"),
    ("<|system|>\n{{ visible", "<|system|>{{ visible"),
    (
        "'\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else ''",
        "'</think>' if (enable_thinking is defined and not enable_thinking) else '<think>'",
    ),
)
_GLM_EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_LLAMA = ("<|eot_id|>", "<|eom_id|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
_GEMMA = ("<turn|>", "<|tool_response>")
_COHERE_EOS = ("<|END_OF_TURN_TOKEN|>",)
_PHI_EOS = ("<|endoftext|>", "<|end|>")
_QUIET = {"enable_thinking": False}

TOOL_USERS = (
    Member("Qwen3", "qwen3", "Qwen3"),
    Member("Qwen3, not thinking", "qwen3", "Qwen3", variables=_QUIET),
    Member("Qwen3-Thinking-2507", "qwen3", "Qwen3", changes=_THINKING),
    Member("Qwen3-Instruct-2507", "qwen3_instruct_2507", "Qwen2.5"),
    Member("Qwen2.5", "qwen2_5", "Qwen2.5"),
    Member("Llama 3.1", "llama3_1", "Llama 3", _LLAMA),
    Member("Llama 3.2", "llama3_2", "Llama 3", _LLAMA),
    Member("GPT-OSS", "gptoss", "GPT-OSS", ("<|return|>", "<|call|>"), parallel=False),
    Member("DeepSeek-R1", "deepseekv3", "DeepSeek-V3", _DEEPSEEK),
    Member("DeepSeek-R1-Distill", "deepseek_r1_distill", "DeepSeek-V3", _DEEPSEEK),
    Member("DeepSeek-V3.1", "", "DeepSeek-V3.1", _DEEPSEEK, text=_DEEPSEEK_V3_1),
    Member("DeepSeek-V3.1, thinking", "", "DeepSeek-V3.1", _DEEPSEEK, {"thinking": True}, text=_DEEPSEEK_V3_1),
    Member("GLM-4.5", "glm4moe", "GLM-4-MoE", _GLM_EOS),
    Member("GLM-4.5, not thinking", "glm4moe", "GLM-4-MoE", _GLM_EOS, _QUIET),
    Member("GLM-4.6", "glm4moe", "GLM-4-MoE", _GLM_EOS, changes=_GLM_4_6),
    Member("GLM-4.7", "glm4moe", "GLM-4-MoE", _GLM_EOS, changes=_GLM_4_7),
    Member("GLM-4.7, not thinking", "glm4moe", "GLM-4-MoE", _GLM_EOS, _QUIET, _GLM_4_7),
    Member("Gemma 4 (first revision)", "gemma4_v2", "Gemma 4", _GEMMA),
    Member("Gemma 4", "gemma4_v5", "Gemma 4", _GEMMA),
    Member("Gemma 4, thinking", "gemma4_v5", "Gemma 4", _GEMMA, {"enable_thinking": True}),
    Member("Qwen3.5", "qwen3_5_think", "Qwen3.5"),
    Member("Qwen3.5, small", "qwen3_5_nothink", "Qwen3.5"),
    Member("Qwen3.6", "qwen3_6", "Qwen3.5"),
    Member("Qwen3.6, not thinking", "qwen3_6", "Qwen3.5", variables=_QUIET),
    Member("Qwen3.8", "qwen3_8", "Qwen3.5"),
    Member("Nemotron 3 Nano", "nemotron_3_nano", "Nemotron 3"),
    Member("Nemotron 3 Super", "nemotron_3_super", "Nemotron 3"),
    Member("Nemotron 3 Ultra", "nemotron_3_ultra", "Nemotron 3"),
    Member("LFM2 (first revision)", "lfm2", "LFM2"),
    Member("LFM2", "lfm2_v2", "LFM2"),
    Member("LFM2.5", "lfm2_2_5_v2", "LFM2.5"),
    Member("SmolLM3", "", "SmolLM3", text=_SMOLLM3),
    Member("SmolLM3, not thinking", "", "SmolLM3", variables=_QUIET, text=_SMOLLM3),
    Member("SmolLM2", "", "SmolLM2", text=_SMOLLM2),
    Member("Cohere 2 (Command R7B)", "", "Cohere 2", _COHERE_EOS, text=_COMMAND_R7B),
    Member("Cohere 2 (Tiny Aya)", "cohere2", "Tiny Aya", _COHERE_EOS),
    Member("Phi-4-mini", "", "Phi-4-mini", _PHI_EOS, text=_PHI4_MINI),
    Member("Phi-4", "", "Phi-4", text=_PHI4),
    Member("Phi-3.5", "phi3_5", "Phi-3", _PHI_EOS),
    Member("Phi-3", "phi3", "Phi-3", _PHI_EOS),
    Member("Mistral (v3, Tekken)", "", "Mistral", ("</s>",), text=_MISTRAL),
    Member("Mistral (v7)", "", "Mistral", ("</s>",), text=_MISTRAL_V7),
    Member("Mistral (v11)", "", "Mistral", ("</s>",), changes=_MISTRAL_V11, text=_MISTRAL_V7),
    Member("Magistral (v11)", "", "Magistral", ("</s>",), changes=_MAGISTRAL_V11, text=_MISTRAL_V7),
    Member("Mistral, Ministral (v13)", "", "Mistral", ("</s>",), changes=_MISTRAL_V13, text=_MISTRAL_V7),
    Member("Magistral, Ministral (v13)", "", "Mistral", ("</s>",), changes=_MISTRAL_V13_THINKING, text=_MISTRAL_V7),
    Member("Mistral (v15)", "", "Mistral", ("</s>",), changes=_MISTRAL_V15, text=_MISTRAL_V7),
    Member("Qwen3-VL", "qwen3_vl", "Qwen3-VL", images=True),
    Member("Qwen2-VL, Qwen2.5-VL", "qwen2_5_vl", "Qwen2-VL", images=True),
    Member("Gemma 3", "gemma3", "Gemma 3", ("<eos>", "<end_of_turn>"), images=True),
    Member("InternVL 3, 3.5", "", "InternVL", images=True, text=INTERNVL),
    Member("LLaVA-NeXT", "llava_next", "LLaVA-NeXT", ("</s>",), images=True),
    Member("SmolVLM, SmolVLM2", "smolvlm", "SmolVLM", ("<end_of_utterance>",), images=True),
    Member("Idefics3", "idefics3", "SmolVLM", ("<end_of_utterance>",), images=True),
)
"""Models with tools, or with a training template that has them, the most widely used first."""

NOT_AT_HAND = ("Beam",)
"""Families whose own templates are in no source at hand: only how they write calls is known, and tried."""
