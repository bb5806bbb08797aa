"""A chat template of a tokenizer, and the choice of one that is exact for tool rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from agentrl.chat.families import recognise, training_template
from agentrl.chat.messages import ArgumentForm, to_template
from agentrl.chat.prefix import check_prefix_preserving, missing_tool_parts, tool_call
from agentrl.errors import TemplateError
from agentrl.types import Message

_QUESTION: Message = {"role": "user", "content": "probe"}


class Template:
    """A chat template with the tokenizer and the variables it is rendered with.

    Attributes:
        tokenizer: Gives the special tokens that templates read.
        source: The template.
        variables: Variables of the template, such as `enable_thinking`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, variables: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.variables = variables
        self._form = self._argument_form()

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
        return self._apply(to_template(messages, self._form), tools, open_turn, continue_last)

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

    @property
    def generation_prompt(self) -> str:
        """What the template writes in front of a turn of the assistant."""
        return self.render([_QUESTION], None, True).removeprefix(self.render([_QUESTION], None, False))

    def _argument_form(self) -> ArgumentForm:
        """Find out by rendering calls what the template can print as arguments."""
        as_string = self._render_call('{"probe_key": "probe_value"}')
        as_mapping = self._render_call({"probe_key": "probe_value"})
        string = as_string is not None and '{"probe_key": "probe_value"}' in as_string
        python = as_mapping is None or "{'probe_key': 'probe_value'}" in as_mapping
        return ArgumentForm(mapping=not (string and python), string=string)

    def _render_call(self, arguments: dict[str, Any] | str) -> str | None:
        turn = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "probe", arguments)]}
        try:
            return self._apply([_QUESTION, turn], None, False)
        except TemplateError:
            return None


def own_template(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any], tools: bool) -> Template | None:
    """Give the tokenizer's chat template.

    Args:
        tokenizer: The tokenizer.
        variables: Variables for the template.
        tools: Whether to take the template for tools, where the tokenizer has several.

    Returns:
        The template, or None where the tokenizer has none.
    """
    if not tokenizer.chat_template:
        return None
    # Only whether there are tools counts here, not which.
    source = tokenizer.get_chat_template(tools=[{}] if tools else None)
    return Template(tokenizer, source, variables)


def exact_template(own: Template | None) -> Template:
    """Choose a template that is exact for tool rounds.

    Args:
        own: The tokenizer's own template.

    Returns:
        The own template where it is exact, else the training template of its family.

    Raises:
        TemplateError: Neither is; says what is wrong with the own one.
    """
    if own is None:
        raise TemplateError("The tokenizer has no chat template. Set `tokenizer.chat_template`.")
    problem = _problem(own)
    if problem is None:
        return own
    family = recognise(own.source)
    if family is None:
        raise TemplateError(
            f"The tokenizer's chat template cannot be used with tools: {problem}\nIts family is not known, "
            "so there is no training template for it. Set `tokenizer.chat_template` to a template that keeps "
            "earlier turns."
        )
    trained = Template(own.tokenizer, training_template(family, own.render), own.variables)
    if trained.generation_prompt != own.generation_prompt:
        problem += (
            f"\nThe training template of {family.name} begins a turn with "
            f"{trained.generation_prompt!r}, the own one with {own.generation_prompt!r}."
        )
    elif (other := _problem(trained)) is not None:
        problem += f"\nThe training template of {family.name} does not help: {other}"
    else:
        return trained
    raise TemplateError(
        f"The tokenizer's chat template cannot be used with tools: {problem}\nSet `tokenizer.chat_template` "
        "to a template that keeps earlier turns."
    )


def _problem(template: Template) -> str | None:
    """Why a template is not exact for tool rounds, None where it is."""
    try:
        missing = missing_tool_parts(template.render)
        if missing:
            return f"it does not show {', '.join(missing)}."
        check_prefix_preserving(template.render)
    except TemplateError as error:
        return str(error)
    return None
