"""Reward models: a sequence classifier with one score a row, used like a reward function.

What is scored is the chat template's text of prompt and completion, or prompt + completion for plain text.
The classifier finds the last token of a row by its padding token, so the tokenizer needs one: a missing one
becomes the EOS token, on tokenizer and model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from agentrl.errors import ConfigurationError, RewardError
from agentrl.types import Message, Prompt

SCORED_ROWS = 16
"""Rows that the model scores at once."""


class RewardModel:
    """A sequence classifier as a reward function.

    Args:
        model: The classifier, or a name or path that `from_pretrained` knows.
        tokenizer: Its tokenizer; None loads the one that lies beside the model.
        model_init_kwargs: Further arguments of `from_pretrained` when `model` is a name.
        trust_remote_code: Whether code that comes with the model may run.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        tokenizer: Any = None,
        *,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if isinstance(model, str):
            options = {"trust_remote_code": trust_remote_code, **(model_init_kwargs or {})}
            classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, **options)
        else:
            classifier = model
        path = classifier.config._name_or_path
        if tokenizer is None:
            if not path:
                raise ConfigurationError(
                    f"the reward model {type(classifier).__name__} was not loaded from anywhere and has no "
                    "tokenizer beside it; pass one in `reward_processing_classes`"
                )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        classifier.config.pad_token_id = tokenizer.pad_token_id
        self.__name__ = path.rstrip("/").split("/")[-1] or type(classifier).__name__
        self.model = classifier.eval()
        self.tokenizer = tokenizer

    def __call__(self, prompts: list[Prompt], completions: list[Prompt]) -> list[float]:
        """Score each completion."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), SCORED_ROWS):
            scores += self._score(texts[start : start + SCORED_ROWS])
        return scores

    def _score(self, texts: list[str]) -> list[float]:
        # The template has written the special tokens already.
        batch = self.tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            logits = self.model(**batch.to(self.model.device)).logits
        if logits.ndim != 2:
            raise RewardError(
                f"the reward model {self.__name__!r} gives logits of shape {tuple(logits.shape)}, not one "
                "row of scores per completion; only sequence-classification models can score"
            )
        return logits[:, 0].float().tolist()

    def _text(self, prompt: Prompt, completion: Prompt) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        messages = [_plain(message) for message in (*_messages(prompt, "user"), *_messages(completion, "assistant"))]
        return self.tokenizer.apply_chat_template(messages, tokenize=False)


def _messages(text: Prompt, role: str) -> list[Message]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _plain(message: Message) -> Message:
    """A message with text content: a classifier reads text only, and few templates take None."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(block.get("text", "") for block in content)
    return message | {"content": content}
