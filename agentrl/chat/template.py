"""A chat template of a tokenizer, rendered as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.nodes
from transformers import PreTrainedTokenizerBase

from agentrl.chat.images import ImageReader
from agentrl.chat.messages import REASONING_FIELDS, ArgumentForm, ContentForm, to_template
from agentrl.chat.prefix import tool_call, tool_schema
from agentrl.errors import TemplateError
from agentrl.types import Message

if TYPE_CHECKING:
    from transformers import ProcessorMixin

try:  # not public: without it, or should it change, rendering is only slower
    from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template
except ImportError:
    compile_template = None  # type: ignore[assignment]

_QUESTION: Message = {"role": "user", "content": "probe"}


class Template:
    """A chat template with the tokenizer and the variables it is rendered with.

    Attributes:
        tokenizer: Gives the special tokens that templates read.
        source: The template.
        variables: Variables of the template, such as `enable_thinking`.
        images: Reads the images of messages; None where they have none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str,
        variables: Mapping[str, Any],
        images: ImageReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.variables = variables
        self.images = images
        self._content = self._content_form()
        self._form = self._argument_form()
        self._compiled: jinja2.Template | None = None
        self._compiled = self._proved_compiled()

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        open_turn: bool,
        *,
        continue_last: bool = False,
    ) -> str:
        """Render a conversation.

        Args:
            messages: The messages.
            tools: Tool schemas; an empty list is no tools, because many templates ask `is not none`.
            open_turn: Whether to add the generation prompt.
            continue_last: Whether to leave the last message open, without its end of turn.

        Returns:
            The text.

        Raises:
            TemplateError: A message is not text, or the template raised.
        """
        return self._apply(to_template(messages, self._form, self._content), tools, open_turn, continue_last)

    def render_quickly(self, messages: list[Message], tools: list[dict[str, Any]] | None, open_turn: bool) -> str:
        """Render messages that hold nothing but plain text, calls and no reasoning.

        The same text as from `render`, without transformers' preparation of arbitrary messages, which costs as much
        as the rendering itself. Other messages, and templates whose renderings differ, are passed on to `render`.
        """
        if self._compiled is not None and all(map(_is_plain, messages)):
            with suppress(jinja2.TemplateError, TypeError, ValueError):  # `render` says what is wrong
                return self._render_compiled(to_template(messages, self._form, self._content), tools, open_turn)
        return self.render(messages, tools, open_turn)

    def _render_compiled(self, messages: list[Message], tools: list[dict[str, Any]] | None, open_turn: bool) -> str:
        assert self._compiled is not None
        return self._compiled.render(
            messages=messages,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=open_turn,
            **self.tokenizer.special_tokens_map,
            **self.variables,
        )

    def _proved_compiled(self) -> jinja2.Template | None:
        """Compile the template as transformers does; None where that is not possible or renders differently.

        Raises:
            TemplateError: Its syntax is wrong.
        """
        if compile_template is None:
            return None
        try:
            self._compiled = compile_template(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"The chat template is no Jinja template: line {error.lineno}: {error.message}. "
                "Set `tokenizer.chat_template`."
            ) from error
        turn = {"role": "assistant", "content": "c", "tool_calls": [tool_call(0, "probe", {"a": 1})]}
        result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": " r\n"}
        probes = [([_QUESTION, turn], None, False), ([_QUESTION, turn, result, result], [tool_schema("probe")], True)]
        try:
            same = all(self._render_compiled(*probe) == self._apply(*probe) for probe in probes)
        except (TemplateError, jinja2.TemplateError, TypeError, ValueError):
            return None  # a template without tools, say
        return self._compiled if same else None

    def _apply(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        open_turn: bool,
        continue_last: bool = False,
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=open_turn,
                continue_final_message=continue_last,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"The chat template cannot render messages of the roles {roles}: "
                f"{type(error).__name__}: {error}. Change the messages or set `tokenizer.chat_template`."
            ) from error
        return str(text)

    def plain(self, text: str) -> str:
        """Give a text as it is shown: what would pass for an image in it is written so that it does not."""
        return self._content.disarm(text)

    def literals(self) -> list[str]:
        """Give all strings that the source compares, joins or splits with, each once.

        Raises:
            TemplateError: The template cannot be read without transformers.
        """
        if self._compiled is None:
            raise TemplateError("The chat template could not be compiled as transformers does.")
        constants = self._compiled.environment.parse(self.source).find_all(jinja2.nodes.Const)
        return list(dict.fromkeys(node.value for node in constants if isinstance(node.value, str)))

    @property
    def generation_prompt(self) -> str:
        """What the template writes in front of a turn of the assistant."""
        return self.render([_QUESTION], None, True).removeprefix(self.render([_QUESTION], None, False))

    def _content_form(self) -> ContentForm:
        """Find out by rendering messages how the template takes their content."""
        in_blocks = not self._shows("probe", "probe") and self._shows([{"type": "text", "text": "probe"}], "probe")
        if self.images is None:
            return ContentForm(in_blocks)
        form = ContentForm(in_blocks, images=True, disarm=self.images.disarm)
        self._content = form
        self._form = ArgumentForm(mapping=True, string=False)
        call = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "probe", {"a": 1})]}
        result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": [{"type": "image"}]}
        with suppress(TemplateError):
            if self.images.placeholder in self.render([_QUESTION, call, result], None, False):
                return form
        return replace(form, marker=self._marker())

    def _shows(self, content: Any, text: str) -> bool:
        try:
            return text in self._apply([{"role": "user", "content": content}], None, False)
        except TemplateError:
            return False

    def _marker(self) -> str:
        """What the template writes for an image between two texts of a user, the placeholder if it is elsewhere."""
        assert self.images is not None
        blocks = [{"type": "text", "text": "probe_a"}, {"type": "image"}, {"type": "text", "text": "probe_b"}]
        with suppress(TemplateError):
            shown = self._apply([{"role": "user", "content": blocks}], None, False)
            marker = shown.partition("probe_a")[2].partition("probe_b")[0]
            if marker.count(self.images.placeholder) == 1:
                return marker
        return self.images.placeholder

    def _argument_form(self) -> ArgumentForm:
        """Find out by rendering calls what the template can print as arguments."""
        as_string = self._render_call('{"probe_key": "probe_value"}')
        as_mapping = self._render_call({"probe_key": "probe_value"})
        string = as_string is not None and '{"probe_key": "probe_value"}' in as_string
        python = as_mapping is None or "{'probe_key': 'probe_value'}" in as_mapping
        return ArgumentForm(mapping=not (string and python), string=string)

    def _render_call(self, arguments: dict[str, Any] | str) -> str | None:
        turn = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "probe", arguments)]}
        as_given = ArgumentForm(mapping=True, string=True)
        try:
            return self._apply(to_template([_QUESTION, turn], as_given, self._content), None, False)
        except TemplateError:
            return None


def _is_plain(message: Message) -> bool:
    """Whether there is nothing in a message that transformers prepares: reasoning under other names."""
    return type(message.get("content")) in (str, list) and message.keys().isdisjoint(REASONING_FIELDS)


def tokenizer_of(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or that of a processor."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    tokenizer: PreTrainedTokenizerBase = processing_class.tokenizer
    return tokenizer


def own_template(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    variables: Mapping[str, Any],
    tools: bool,
    *,
    max_image_pixels: int | None = None,
) -> Template | None:
    """Give the chat template of a tokenizer or a processor; that of a processor's tokenizer where it has none itself.

    Args:
        processing_class: The tokenizer or processor.
        variables: Variables for the template.
        tools: Whether to take the template for tools, where there are several.
        max_image_pixels: See `ImageReader`.

    Returns:
        The template, or None where there is none.

    Raises:
        ConfigurationError: The processor is not one of images.
    """
    images, source = None, None
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        images = ImageReader(processing_class, max_image_pixels)
        own = processing_class.chat_template
        source = own.get("tool_use" if tools else "default", own.get("default")) if isinstance(own, dict) else own
    tokenizer = tokenizer_of(processing_class)
    if source is None:
        if not tokenizer.chat_template:
            return None
        # Only whether there are tools counts here, not which.
        source = tokenizer.get_chat_template(tools=[{}] if tools else None)
    template = Template(tokenizer, source, variables, images)
    if images is None or not _lacks_bos(template):
        return template
    return Template(tokenizer, "{{ bos_token }}" + source, variables, images)


def _lacks_bos(template: Template) -> bool:
    """Whether encoding a rendered text adds a BOS, as processors, unlike tokenizers, have it for rendered text too."""
    tokenizer = template.tokenizer
    ids = tokenizer("probe", padding=False)["input_ids"]
    with suppress(TemplateError):
        begins = template.render([_QUESTION], None, False).startswith(tokenizer.bos_token or "")
        return not begins and ids[0] == tokenizer.bos_token_id
    return False
