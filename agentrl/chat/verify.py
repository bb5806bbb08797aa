"""What is known of a tokenizer's chat template, as a report: for `agentrl templates` and for tests.

Nothing here raises on a template that cannot be used; the report says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentrl.chat.families import recognise
from agentrl.chat.renderer import Renderer
from agentrl.chat.repair import Origin, prove
from agentrl.chat.template import own_template
from agentrl.errors import ConfigurationError, TemplateError


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What becomes of a template with tools.

    Attributes:
        family: Name of its family, None where it is not known.
        own_problem: Why the own template is not exact for tool rounds, None where it is.
        origin: Which template is used with `reasoning="keep"`, None where it is refused.
        tools_are_ours: Whether it writes tools in a form of ours, because the model was trained on none.
        refusal: Why it is refused.
        forks: Whether `reasoning="fork"` makes a difference: the template can be used so, and is not exact.
        end_of_turn: The token that ends a turn, None where there is none or the marker of the next role does it.
        reads_calls: Whether it is known how the model writes calls.
    """

    family: str | None
    own_problem: str | None
    origin: Origin | None
    tools_are_ours: bool
    refusal: str | None
    forks: bool
    end_of_turn: str | None
    reads_calls: bool

    @property
    def usable(self) -> bool:
        """Whether the model can be trained with tools."""
        return self.origin is not None

    def __str__(self) -> str:
        lines = [f"family: {self.family or 'not known'}", f"end of turn: {self.end_of_turn!r}"]
        lines.append(f"own template: {self.own_problem or 'exact'}")
        if self.refusal is None:
            ours = ", in a form of ours that RL has to teach" if self.tools_are_ours else ""
            lines.append(f"used with tools: {self.origin}{ours}")
        else:
            lines.append(f"refused with tools: {self.refusal}")
        lines.append(f'reasoning="fork" {"makes a difference" if self.forks else "is refused or changes nothing"}')
        return "\n".join(lines)


def verify_template(
    model: str | PreTrainedTokenizerBase,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> TemplateReport:
    """Find out whether, and how, a model can be trained with tools.

    Args:
        model: A tokenizer, or the name or folder of a model.
        template_kwargs: Variables for the chat template.
        trust_remote_code: Allow tokenizer code from the hub to run.

    Returns:
        The report.

    Raises:
        ConfigurationError: There is no tokenizer of that name, or it has no chat template.
    """
    tokenizer = _load(model, trust_remote_code) if isinstance(model, str) else model
    try:
        own = own_template(tokenizer, template_kwargs or {}, tools=True)
    except TemplateError as error:
        raise ConfigurationError(f"The chat template of {model} cannot be read: {error}") from error
    if own is None:
        raise ConfigurationError("The tokenizer has no chat template. Set `tokenizer.chat_template`.")
    family = recognise(own.source)
    problem = prove(own, repair=False).problem
    options: dict[str, Any] = {"template_kwargs": dict(template_kwargs or {})}
    plain, _ = _renderer(tokenizer, options)
    kept, refusal = _renderer(tokenizer, options | {"tools": True})
    forking, _ = _renderer(tokenizer, options | {"tools": True, "reasoning": "fork"})
    origin = None if kept is None or kept.choice is None else kept.choice.origin
    return TemplateReport(
        family=None if family is None else family.name,
        own_problem=problem,
        origin=origin,
        tools_are_ours=family is not None and family.tools_are_ours and origin is Origin.FAMILY,
        refusal=refusal,
        forks=forking is not None and problem is not None,
        end_of_turn=None if plain is None else plain.end_of_turn,
        reads_calls=plain is not None and plain.reads_calls,
    )


def _renderer(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> tuple[Renderer | None, str | None]:
    try:
        return Renderer(tokenizer, **options), None
    except TemplateError as error:
        return None, str(error)


def _load(model: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"No tokenizer could be loaded from {model!r}: {error}") from error
    return tokenizer
