"""Whether a model can play an environment: its template with tools, its calls, the room that episodes take."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from agentrl.chat.prefix import tool_call
from agentrl.chat.renderer import Renderer
from agentrl.chat.template import tokenizer_of
from agentrl.chat.verify import verify_template
from agentrl.checks.findings import Finding, failed, passed, warned
from agentrl.checks.images import UNREADABLE, check_sight
from agentrl.checks.policy import RandomPolicy, random_arguments, written
from agentrl.errors import ConfigurationError, ImageError, TemplateError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.environments import EnvironmentSpec
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.rollout.tools import make_tools
from agentrl.types import Task

DRAWS = 8
"""Random calls of each tool that are written and read back."""
LARGE_SHARE = 0.5
"""Share of the completion budget that tool results should leave at least."""

Factories = Callable[[], Any] | Mapping[str, Callable[[], Any]]


def check_model(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    factory: Factories | None,
    tasks: Sequence[Task],
    *,
    tools: Sequence[Callable[..., Any]] = (),
    model: str = "the model",
    shows_pictures: bool = False,
    max_completion_length: int | None,
    max_context: int | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Finding]:
    """Check a tokenizer with the tools and episodes of an environment.

    Args:
        processing_class: The model's tokenizer, or its processor if it sees images.
        factory: Makes environments; None for tools alone or plain prompts.
        tasks: What to play.
        tools: Functions that are offered in every episode.
        model: What the model is called.
        shows_pictures: Whether the environment shows pictures.
        max_completion_length: The budget of an episode, in tokens.
        max_context: The model's context, in tokens; None if unknown.
        template_kwargs: Variables for the chat template.
    """
    kwargs = dict(template_kwargs or {})
    tokenizer = tokenizer_of(processing_class)
    if factory is None and not tools:
        renderer = Renderer(processing_class, template_kwargs=kwargs)
        yield from _budget(renderer, tokenizer, None, (), tasks, max_completion_length, max_context)
        return
    try:
        report = verify_template(tokenizer, template_kwargs=kwargs)
    except ConfigurationError as error:
        yield failed("template", str(error), "set `tokenizer.chat_template`, or take a chat model")
        return
    if report.refusal is not None:
        yield failed("template", report.refusal, "see docs/models.md for the families that are known")
        return
    own = "as it is" if report.own_problem is None else f"{report.origin}: its own one is not exact"
    yield passed("template", f"{report.family or 'unknown family'}, used {own}")
    renderer = Renderer(processing_class, tools=True, template_kwargs=kwargs)
    yield _round_trip(renderer, tokenizer, _schemas(factory, tools))
    if shows_pictures and (blind := check_sight(renderer, model)) is not None:
        yield blind
        return
    yield from _budget(renderer, tokenizer, factory, tools, tasks, max_completion_length, max_context)


def _schemas(factory: Factories | None, tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    factories = factory.values() if isinstance(factory, Mapping) else [] if factory is None else [factory]
    owned = [tool for make in factories for tool in EnvironmentSpec.of(make()).tools.values()]
    return [tool.schema for tool in (*make_tools(tools).values(), *owned)]


def _round_trip(renderer: Renderer, tokenizer: PreTrainedTokenizerBase, schemas: list[dict[str, Any]]) -> Finding:
    """Calls of every tool, written as the template writes them, are read back as they were."""
    draw, count = random.Random(0), 0
    for schema in schemas:
        name = schema["function"]["name"]
        for _ in range(DRAWS):
            arguments = random_arguments(schema["function"]["parameters"], draw)
            turn = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, name, arguments)]}
            try:
                calls = renderer.parse(written(turn, renderer, tokenizer, schemas), schemas).calls
            except TemplateError as error:
                return failed("parsing", f"a call of {name} cannot be written: {error}", "simplify its arguments")
            read = [(call.name, call.arguments, call.error) for call in calls]
            if read != [(name, arguments, None)]:
                return failed(
                    "parsing",
                    f"the call {name}({arguments}) was read back as {read}",
                    "take simpler types for the arguments of this tool (text, numbers, booleans)",
                )
            count += 1
    return passed("parsing", f"{count} random calls of {len(schemas)} tools were written and read back")


def _budget(
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    factory: Factories | None,
    tools: Sequence[Callable[..., Any]],
    tasks: Sequence[Task],
    max_completion_length: int | None,
    max_context: int | None,
) -> Iterator[Finding]:
    """What prompts and tool results of random episodes take of the room that there is."""
    policy = RandomPolicy(renderer, tokenizer)
    engine = RolloutEngine(
        policy,
        renderer,
        tools=tools,
        environments=factory,
        limits=Limits(max_tool_iterations=4),
        failures=FailurePolicy(retries=0, max_rate=1.0),
        tool_max_failures=None,
    )
    try:
        policy.schemas = _schemas(factory, tools)
        played = engine.run(tasks)
    finally:
        engine.close()
    broken = next((t.failure for t in played if t.failure is not None), None)
    if broken is not None:
        advice = UNREADABLE if broken.error.startswith(ImageError.__name__) else "see the traceback in Python"
        yield failed("episodes", f"with this model, {broken.where} raised {broken.error}", advice)
        return
    prompt = max(len(t.prompt_ids) for t in played)
    rounds = sum(t.tool_calls for t in played)
    results = sum(len(t.completion_ids) - t.sampled_length for t in played) / max(rounds, 1)
    seen = f"prompts have up to {prompt} tokens"
    if rounds:
        seen += f", a tool result takes {results:.0f} on average"
    if max_context is not None and prompt >= max_context:
        yield failed("context", f"{seen}; the model's context is {max_context}", "shorten the prompt or the tools")
    elif max_context is not None and max_completion_length is not None and prompt + max_completion_length > max_context:
        yield warned(
            "context",
            f"{seen}; with max_completion_length={max_completion_length} that passes the context of {max_context}",
            f"set max_completion_length to at most {max_context - prompt}: longer episodes are cut",
        )
    elif max_completion_length is not None and results > LARGE_SHARE * max_completion_length:
        yield warned(
            "context",
            f"{seen}: most of max_completion_length={max_completion_length}, which counts tool results",
            "raise max_completion_length, or let the tool answer in fewer words",
        )
    else:
        yield passed("context", seen)
