"""What samples on the command line: a model in this process, or one behind a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from agentrl.errors import ConfigurationError

API_KEY = "OPENAI_API_KEY"
"""Environment variable with the key of a server."""


class Policy(NamedTuple):
    """A generator with its tokenizer or processor, and the ids that end its turns besides the tokenizer's own."""

    generator: Any
    processing_class: Any
    eos_ids: Iterable[int]


def show_bars(shown: bool) -> None:
    """Let transformers draw progress bars, or not.

    Args:
        shown: Whether anybody watches; in a file each step of a bar is text. Only a terminal shows them in any case.
    """
    from transformers.utils import logging

    if shown and sys.stderr.isatty():
        logging.enable_progress_bar()
    else:
        logging.disable_progress_bar()


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by the name or folder of its model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no tokenizer could be loaded from {name!r}: {error}") from error


def load_processing_class(name: str) -> Any:
    """Load what a model reads with, by its name or folder: its tokenizer, or its processor if it sees images."""
    from transformers import AutoConfig, AutoProcessor

    tokenizer = load_tokenizer(name)
    return AutoProcessor.from_pretrained(name) if sees_images(AutoConfig.from_pretrained(name)) else tokenizer


def sees_images(config: Any) -> bool:
    """Whether a configuration is that of a vision-language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def local_policy(name: str, *, dtype: str = "auto") -> Policy:
    """Load a model into this process, onto a GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, ProcessorMixin

    from agentrl.generation.factory import make_generator
    from agentrl.training.loading import declared_eos_ids

    show_bars(True)
    try:
        reads = load_processing_class(name)
        loader: Any = AutoModelForImageTextToText if isinstance(reads, ProcessorMixin) else AutoModelForCausalLM
        model = loader.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no model could be loaded from {name!r}: {error}") from error
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return Policy(make_generator(model), reads, declared_eos_ids(model))


def served_policy(url: str, name: str, *, served: str | None = None) -> Policy:
    """Sample from a server that takes and gives token ids; the tokenizer is here.

    Args:
        url: The server.
        name: Where the tokenizer is.
        served: The name that the server knows the model by, if it serves several.
    """
    from transformers import GenerationConfig

    from agentrl.generation.completions import CompletionsGenerator

    tokenizer = load_tokenizer(name)
    try:
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:
        eos = None  # the tokenizer and its template say what ends a turn
    generator = CompletionsGenerator(url, model=served, api_key=os.environ.get(API_KEY))
    return Policy(generator, tokenizer, [] if eos is None else [eos] if isinstance(eos, int) else eos)


def chat_policy(url: str, name: str) -> Any:
    """Ask a server for messages, by which it is generator and renderer at once.

    Args:
        url: The server.
        name: The name that it knows the model by.
    """
    from agentrl.generation.chat_server import ChatServer

    return ChatServer(url, model=name, api_key=os.environ.get(API_KEY))
