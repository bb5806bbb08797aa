"""A tokenizer made from the text it will have to read."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# How the template writes an assistant turn, so that what the model samples can be read back as a message.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def make_tokenizer(conversations: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary from rendered conversations.

    Only numbers and line ends split a text, so a number is one token and so is a phrase that always returns, such
    as the JSON around the arguments of a call. Episodes stay short, which is what makes training on a CPU quick.
    A line end belongs to what stands before it: no token reaches from "assistant\\n" into the assistant's words,
    which is where sampling begins. Every byte is in the vocabulary, so any other text can be read too.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+"), behavior="isolated"),
            pre_tokenizers.Split("\n", behavior="merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    markup = re.compile("|".join(re.escape(token) for token in CONTROL + MARKUP))
    tokenizer.train_from_iterator((part for text in conversations for part in markup.split(text)), trainer)
    # As with Qwen, the marks around tool calls are single tokens but part of the text, so decoding keeps them.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast
