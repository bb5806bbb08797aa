"""Tokenizers made on the spot, for tests that must not download anything.

`fix_tokenizer` has the vocabulary of the fault list (`FIX.tok`): one token a character and the merged token
"ab", so decoding and encoding again changes ids. `qwen_like_tokenizer` has one token a byte and the special
tokens of Qwen. Both are real fast tokenizers with a chat template; `fix_tokenizer` has a response template
too.
"""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, NEWLINE, IMAGE, IMAGE_START, IMAGE_END, AB = 0, 1, 2, 3, 4, 5, 6, 50
"""Ids of `fix_tokenizer`; any other character has id 100 + its code point."""

FIX_VOCAB_SIZE = 356
"""Size of an embedding for the ids of `fix_tokenizer`: they have holes, so `len(tokenizer)` is too few."""

_FIX_CALLS = """
{%- macro thought(message) -%}
    {{- '<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '' -}}
{%- endmacro -%}
{%- macro calls(message) -%}
    {%- for call in message.tool_calls or [] -%}
        {{- '<call>{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments | tojson + '}</call>' -}}
    {%- endfor -%}
{%- endmacro -%}
"""

_FIX_TOOLS = "{%- if tools -%}{{- '<b>tools' + glue -}}{{- tools | tojson + end -}}{%- endif -%}"

_FIX_TEMPLATES = {
    "t0": """
{%- set glue = '\\n' -%}{%- set end = '<e>\\n' -%}"""
    + _FIX_CALLS
    + _FIX_TOOLS
    + """
{%- for message in messages -%}
    {{- '<b>' + message.role + '\\n' + thought(message) -}}
    {{- (message.content or '') + calls(message) + '<e>\\n' -}}
{%- endfor -%}
{{- '<b>assistant\\n' if add_generation_prompt else '' -}}
""",
    "grouped": """
{%- set glue = '|' -%}{%- set end = '<e>' -%}"""
    + _FIX_CALLS
    + _FIX_TOOLS
    + """
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<b>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
        {{- '<r>' + message.content + '</r>' -}}
        {{- '<e>' if loop.last or loop.nextitem.role != 'tool' else '' -}}
    {%- else -%}
        {%- set content = thought(message) + (message.content or '') -%}
        {%- if forget and message.role == 'assistant' and not loop.last -%}
            {%- set content = content.split('</think>')[-1] -%}
        {%- endif -%}
        {{- '<b>' + message.role + '|' + content + calls(message) + '<e>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<b>assistant|' if add_generation_prompt else '' -}}
""",
}
_FIX_TEMPLATES["think"] = "{%- set forget = true -%}" + _FIX_TEMPLATES["grouped"]

COMPACT_TEMPLATE = """
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- for tool in tools -%}
        {{- tool.function.name + '(' + (tool.function.parameters.properties or {}) | join(', ') + ')\\n' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>tool' if loop.first or loop.previtem.role != 'tool' else '' -}}
        {{- '\\n<tool_response>' + message.content + '</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
            {{- call.function.arguments | tojson + '}</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""
"""Like Qwen's format, but short: a tool is one line `name(argument, ...)`. For tiny models of bytes."""


def fix_tokenizer(template: str = "t0") -> PreTrainedTokenizerFast:
    """Make the tokenizer of the fault list.

    Ids: 0 pad, 1 `<b>`, 2 `<e>` (end of turn and EOS), 3 newline, 4 image placeholder, 5 and 6 image start
    and end, 50 "ab", 100 + code point for the other characters of Latin-1; what is outside reads as "?".

    Args:
        template: "t0" (a turn is `<b>role\\n…<e>\\n`, prefix-preserving), "grouped" (`<b>role|…<e>`, a run of
            tool messages is one user turn) or "think" (like grouped, but forgets what stands before
            `</think>` in every assistant turn but the last). All write tools as a first turn and calls as
            `<call>{…}</call>`.

    Returns:
        The tokenizer, with `chat_template` and `response_template` set.

    Raises:
        KeyError: There is no template of this name.
    """
    chat_template = _FIX_TEMPLATES[template]
    characters = [chr(code) for code in (9, *range(32, 127), *range(160, 256))]
    specials = {"<pad>": PAD, "<b>": BOS, "<e>": EOS, "<i>": IMAGE, "<is>": IMAGE_START, "</is>": IMAGE_END}
    vocab = specials | {"\n": NEWLINE, "ab": AB} | {text: 100 + ord(text) for text in characters}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="?"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<b>", eos_token="<e>")
    tokenizer.chat_template = chat_template
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"<b>assistant[\n|]",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<e>", "content": "text"},
        },
    }
    return tokenizer


def qwen_like_tokenizer(template: str = "qwen3", *, seed: int | None = None) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with the special tokens of Qwen: 256 bytes, then 14 special tokens.

    Args:
        template: "qwen3" or "qwen2_5" (our training templates) or "compact" (a short format for tiny models).
        seed: Draws 64 merges of bytes that stand in chat texts, also across words and lines; None for none.

    Returns:
        The tokenizer, with `chat_template` set. `<|im_end|>` is EOS, `<|endoftext|>` pads.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [] if seed is None else _random_merges(random.Random(seed))
    pieces = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    plain = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if template == "compact":
        tokenizer.chat_template = COMPACT_TEMPLATE
    else:
        folder = importlib.resources.files("agentrl.chat_templates")
        tokenizer.chat_template = folder.joinpath(f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def byte_tokenizer(special: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with 256 bytes, then these special tokens; it has no template, no EOS and no padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _random_merges(rng: random.Random) -> list[tuple[str, str]]:
    """Merges in byte-level letters (`Ċ` is a newline, `Ġ` a space), each made of pieces that exist by then."""
    pieces, merges = list("ĊĊĠĠ<>|/{}\"':,.abeinorstx17Ã"), []
    for _ in range(64):
        pair = (rng.choice(pieces), rng.choice(pieces))
        if pair not in merges:
            merges.append(pair)
            pieces.append("".join(pair))
    return merges
