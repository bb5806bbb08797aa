"""The token-exact bridge between messages and ids.

A row is the prompt's ids, then sampled ids and suffixes in turn. The prompt is rendered once. A suffix, what
stands between a sampled turn and the next one, is cut out of the rendering of a short stand-in conversation
with the same shape of turn and the real results, so that no sampled id is ever decoded and encoded again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from agentrl.chat.continuation import Continuation
from agentrl.chat.derivation import find_format
from agentrl.chat.families import recognise
from agentrl.chat.forks import continue_or_fork
from agentrl.chat.images import encode_with_images
from agentrl.chat.messages import clean_messages
from agentrl.chat.parsing import ParsedTurn, parse_turn
from agentrl.chat.pictures import (
    count_images,
    drop_repeated_pictures,
    forget_pictures,
    last_picture,
    take_pictures,
)
from agentrl.chat.repair import Choice, exact_template, forking_template
from agentrl.chat.suffixes import SuffixRule
from agentrl.chat.template import Template, own_template, tokenizer_of
from agentrl.chat.turns import find_turn_end, no_end_of_turn, prompt_after_results
from agentrl.errors import TemplateError
from agentrl.types import Encoded, Image, ImageSpan, Message, Prompt

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_CACHED = 1024
"""Entries of each cache; the oldest goes first."""


class Renderer:
    """Turns messages into ids and sampled ids into messages; one per tokenizer and template, for one thread.

    Attributes:
        stop_ids: Ids that end a turn: the tokenizer's EOS, `eos_ids`, and the template's end-of-turn token.
        choice: Which template is used and why; None without tools, where it is the tokenizer's own.
    """

    def __init__(
        self,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        template_kwargs: dict[str, Any] | None = None,
        tools: bool = False,
        eos_ids: Iterable[int] = (),
        reasoning: str = "keep",
        keep_images: int | None = None,
        drop_repeated_images: bool = False,
        max_image_pixels: int | None = None,
    ) -> None:
        """Make a renderer.

        Args:
            processing_class: A tokenizer, or the processor of a vision-language model, whose messages can have images;
                it is not changed.
            template_kwargs: Variables for the chat template, such as `enable_thinking`.
            tools: Whether there will be tool rounds. Then the template is proved fit for them here; where the
                tokenizer's own is not, the training template of its family takes its place.
            eos_ids: Further ids that end a turn, such as those of the model's generation config. A role
                marker that ends turns has to be among them (or be the tokenizer's EOS).
            reasoning: What becomes of earlier turns that the tokenizer's own template would rewrite, as many drop
                their reasoning. "keep": the row keeps them as they were sampled. "fork": the model sees what the
                template makes of them, in a new row.
            keep_images: Most images that the model sees at once, the last ones. When a tool round brings more, the
                episode goes on in a new row, in whose prompt the earlier ones are left out. None: all.
            drop_repeated_images: Whether a tool's image with the same pixels as the image before it is told in words.
            max_image_pixels: Most pixels of an image; larger ones are made smaller. None: no limit.

        Raises:
            TemplateError: No template is fit for tool rounds, or it is not known how to parse calls.
        """
        # Calling a tokenizer sets its padding and truncation: others that use it meanwhile must not change ids here.
        processing_class = copy.deepcopy(processing_class)
        self._tokenizer = tokenizer = tokenizer_of(processing_class)
        own = own_template(processing_class, template_kwargs or {}, tools, max_image_pixels=max_image_pixels)
        self._forks = reasoning == "fork"
        self._keep_images = keep_images
        self._drops_repeats = drop_repeated_images
        choose = forking_template if self._forks else exact_template
        self.choice: Choice | None = choose(own) if tools else None
        self._template = own if self.choice is None else self.choice.template
        self._end = None if self._template is None else find_turn_end(tokenizer, self._template.render)
        end_ids = frozenset[int]() if self._end is None else self._end.ids
        eos_id = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stop_ids: frozenset[int] = frozenset((*eos_id, *end_ids, *eos_ids))
        self._prompt = "" if self._template is None else self._template.generation_prompt
        self._results_prompt = prompt_after_results(self._template.render) if tools and self._template else ""
        self._format = (
            None
            if own is None or self._template is None
            else find_format(self._template, self.end_of_turn, recognise(own.source))
        )
        if tools and not self.reads_calls:
            raise TemplateError(
                "It is not known how this model writes tool calls: its chat template is of no known family, "
                "and no known format reads back the calls that it renders. Set "
                "`tokenizer.response_template` (see the chat response parsing guide of transformers)."
            )
        self._suffixes = None if self._template is None or self._end is None else SuffixRule(self._template, self._end)
        self._kept_suffixes = self._suffixes_where_own_raises()
        self._images = None if own is None else own.images
        self._prompts: dict[Any, Encoded] = {}
        self._decode = _decoder(tokenizer)

    def _suffixes_where_own_raises(self) -> SuffixRule | None:
        kept = None if self.choice is None else self.choice.kept
        end = None if kept is None else find_turn_end(self._tokenizer, kept.render)
        return None if kept is None or end is None else SuffixRule(kept, end)

    @property
    def end_of_turn(self) -> str | None:
        """The token that ends a turn in the template, None where there is none or the next role's marker does it."""
        return None if self._end is None else self._end.text

    @property
    def sees_images(self) -> bool:
        """Whether messages can have images."""
        return self._images is not None

    @property
    def never_sampled(self) -> tuple[int, ...] | None:
        """Ids that a model must not write: what stands for an image; None where there are none."""
        return None if self._images is None else (self._images.placeholder_id,)

    @property
    def reads_calls(self) -> bool:
        """Whether it is known how the model writes calls."""
        return self._format is not None and self._format.calls is not None

    def prompt_ids(self, prompt: Prompt, tools: list[dict[str, Any]] | None) -> list[int]:
        """Encode a prompt.

        Args:
            prompt: Text, encoded as it is with the tokenizer's special tokens, or messages, rendered with the
                generation prompt; a last message of the assistant is continued instead.
            tools: Tool schemas; an empty list is no tools.

        Returns:
            The ids, never padded.

        Raises:
            TemplateError: There is no chat template, or it cannot render the messages.
            ImageError: An image of the messages cannot be processed or placed.
        """
        return self.encode_prompt(prompt, tools).ids

    def encode_prompt(self, prompt: Prompt, tools: list[dict[str, Any]] | None) -> Encoded:
        """Encode a prompt with its images; see `prompt_ids`."""
        if isinstance(prompt, str):
            return Encoded(list(self._tokenizer(prompt, padding=False)["input_ids"]))
        if self._template is None:
            raise TemplateError(
                "The prompt has messages but the tokenizer has no chat template. Set "
                "`tokenizer.chat_template` or give prompts as text."
            )
        messages, images = self._process_images(prompt)
        if images:  # the cache would keep their pixels
            return self._render_prompt(self._template, messages, tools, images)
        key = (repr(prompt), repr(tools))  # the members of a group share their prompt
        if (known := self._prompts.get(key)) is None:
            known = self._prompts[key] = self._render_prompt(self._template, messages, tools, images)
            if len(self._prompts) > _CACHED:
                del self._prompts[next(iter(self._prompts))]
        return Encoded(list(known.ids))

    def _render_prompt(
        self,
        template: Template,
        prompt: list[Message],
        tools: list[dict[str, Any]] | None,
        images: Sequence[Image],
    ) -> Encoded:
        messages = clean_messages(prompt)
        prefilled = bool(messages) and messages[-1].get("role") == "assistant"
        text = template.render(messages, tools, not prefilled, continue_last=prefilled)
        return encode_with_images(template.images, self._encode, text, images)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, padding=False)["input_ids"])

    def _process_images(self, messages: list[Message]) -> tuple[list[Message], list[Image]]:
        """Take the pictures out of messages and process them."""
        if self._images is None:
            return messages, []
        messages = self._without_repeats(messages)
        if self._keep_images is not None:
            messages = forget_pictures(messages, self._keep_images)
        messages, pictures = take_pictures(messages)
        return messages, [self._images.process(picture) for picture in pictures]

    def _without_repeats(self, messages: list[Message], earlier: Sequence[Message] = ()) -> list[Message]:
        """Leave out images that are the same as the one before, which may be among earlier messages."""
        return drop_repeated_pictures(messages, last_picture(earlier)) if self._drops_repeats else messages

    def suffix_ids(
        self,
        last_id: int,
        assistant: Message,
        results: list[Message],
        tools: list[dict[str, Any]] | None,
    ) -> list[int]:
        """Encode what stands between a sampled turn and the next one.

        That is the template's glue after the end of the turn, the results as one run, the generation prompt.
        After a turn that ended on another declared EOS than the template's end-of-turn token, it is the
        same: what follows the template's end of turn. Where the next role's marker ends turns and was
        sampled, it is not repeated.

        Args:
            last_id: The last sampled id, a stop id.
            assistant: The parsed turn. Only its shape counts: which fields it has and which tools it calls.
            results: The messages that answer it.
            tools: Tool schemas; an empty list is no tools. Only whether there are any counts.

        Returns:
            The ids of the suffix.

        Raises:
            TemplateError: The template cannot render the messages, or has no end of turn.
        """
        if self._suffixes is None:
            raise no_end_of_turn()
        return self._suffixes.ids(last_id, assistant, results, tools is not None and len(tools) > 0)

    def continuation(
        self,
        prompt: Prompt,
        completion: list[Message],
        results: list[Message],
        sampled: list[int],
        tools: list[dict[str, Any]] | None,
    ) -> Continuation:
        """Encode what comes after a sampled turn: a suffix, or a new row where the template rewrites the old one.

        Args:
            prompt: The prompt of the episode.
            completion: The messages after it; the last is the sampled turn.
            results: The messages that answer that turn.
            sampled: The ids of that turn, with the stop id that ended it.
            tools: Tool schemas.

        Returns:
            The ids. With `reasoning="keep"` they are a suffix, unless there are more images than are kept.

        Raises:
            TemplateError: The template cannot render the messages, or not those of this prompt again.
            ImageError: An image of the results cannot be processed or placed.
        """
        if self._template is None or self._end is None or self._suffixes is None:
            raise no_end_of_turn()
        history = completion if isinstance(prompt, str) else [*prompt, *completion]
        results, images = self._process_images(self._without_repeats(results, history))
        full = self._is_full(history, len(images))
        if not self._forks and not full:
            suffix = self._suffixes.encoded(sampled[-1], completion[-1], results, bool(tools), images)
            return Continuation(suffix.ids, len(suffix.ids), images=suffix.images)
        if isinstance(prompt, str) or (prompt and prompt[-1]["role"] == "assistant"):
            raise TemplateError(
                "A text prompt, or one whose last message the model continues, cannot be rendered again after a tool "
                'round. Give messages that end with another role, or set reasoning="keep" and keep_images=None.'
            )
        messages, earlier = self._process_images(history)
        if full:
            added = self._suffixes.encoded(sampled[-1], completion[-1], results, bool(tools), images)
            shown = forget_pictures([*messages, *results], self._keep_images or 0)
            images = [*earlier, *images][-count_images(shown) :]
            text = self._template.render(clean_messages(shown), tools, True)
            context = encode_with_images(self._images, self._suffixes.encode_all, text, images)
            return Continuation(context.ids, len(added.ids), forks=True, images=context.images)
        return continue_or_fork(
            self._template,
            self._end,
            self._suffixes,
            self._kept_suffixes,
            messages,
            results,
            tools,
            sampled=self._decode(sampled[:-1]),
            last_id=sampled[-1],
            images=[*earlier, *images],
        )

    def locate_images(self, messages: Sequence[Message], ids: Sequence[int]) -> tuple[ImageSpan, ...]:
        """Find images in ids that were rendered before, as a journal has them.

        Args:
            messages: Messages; what the ids show are their last images.
            ids: A prompt or a suffix.

        Raises:
            ImageError: They are not the images of these messages.
        """
        if self._images is None:
            return ()
        images = self._process_images(list(messages))[1]
        left = sum(token == self._images.placeholder_id for token in ids)
        shown: list[Image] = []
        while left > 0 and images:
            shown.insert(0, images.pop())
            left -= shown[0].placeholders
        return self._images.locate(ids, shown)

    def _is_full(self, messages: list[Message], coming: int) -> bool:
        """Whether the row has no place for more images after those of its messages."""
        if self._keep_images is None:
            return False
        shown = count_images(self._without_repeats(messages))
        return min(shown, self._keep_images) + coming > self._keep_images

    def parse(self, ids: list[int], tools: list[dict[str, Any]] | None, *, first_call: int = 0) -> ParsedTurn:
        """Read a sampled turn; see `agentrl.chat.parsing` for the rules.

        Args:
            ids: The sampled ids, with or without a stop token at the end.
            tools: Tool schemas, which give types to arguments in formats that write them as bare text.
            first_call: Number of calls earlier in the rollout; makes the ids of calls unique within it.

        Returns:
            The message and its calls. Where the format of the model is not known, all text is content.
        """
        stopped = bool(ids) and ids[-1] in self.stop_ids
        text = self._decode(ids[:-1] if stopped else ids)
        if self._format is None:
            return ParsedTurn({"role": "assistant", "content": text.strip()}, [])
        # Some templates open a thought only in front of a first turn: one that answers results goes on with the last.
        prompt = self._results_prompt if first_call else self._prompt
        return parse_turn(text, self._format, prompt=prompt, tools=tools, first_call=first_call, stopped=stopped)

    def text(self, ids: list[int]) -> str:
        """Decode ids without special tokens, for the completion of a text prompt.

        Args:
            ids: Ids of a completion.

        Returns:
            The text.
        """
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Decode with special tokens and nothing cleaned up; straight from the backend, which is much quicker."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return partial(backend.decode, skip_special_tokens=False)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
