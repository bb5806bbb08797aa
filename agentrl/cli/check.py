"""`agentrl check`: what can be found out before a GPU hour is spent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.mistakes import mistakes
from agentrl.cli.rollout import AsJson, Env, Tool, json_object, make_tasks

if TYPE_CHECKING:
    from agentrl.checks.findings import Finding
    from agentrl.checks.memory import Sizes


def check(
    env: Env = None,
    model: Annotated[str | None, typer.Option(help="A model's folder or name; its weights are not loaded.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Tasks: a file, a folder or a name on the hub.")] = None,
    tool: Tool = None,
    reward: Annotated[bool, typer.Option("--reward-functions", help="Reward functions will score, not it.")] = False,
    groups: Annotated[int, typer.Option(help="Tasks to play; of several environments, each.")] = 3,
    group: Annotated[int, typer.Option(help="Episodes of each, at least 2.")] = 4,
    max_completion_length: Annotated[int, typer.Option(help="As it will be in training.")] = 512,
    per_device_train_batch_size: Annotated[int, typer.Option(help="As it will be in training.")] = 8,
    beta: Annotated[float, typer.Option(help="As it will be: above 0 needs a reference model.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="Of the weights, as in model_init_kwargs.")] = "float32",
    chat_template_kwargs: Annotated[str, typer.Option(help="JSON, for the chat template.")] = "{}",
    seed: Annotated[int, typer.Option(help="Decides tasks and random calls.")] = 42,
    as_json: AsJson = False,
) -> None:
    """Check an environment, and a model with it. Exits with 1 if anything fails; warnings are no failures."""
    with mistakes():
        kwargs = json_object(chat_template_kwargs, "--chat-template-kwargs")
        sizes = {"length": max_completion_length, "rows": per_device_train_batch_size, "beta": beta, "dtype": dtype}
        findings = list(_findings(env, model, dataset, tool or [], reward, groups, group, kwargs, seed, sizes))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        counts = {status: sum(f.status == status for f in findings) for status in ("pass", "warn", "fail")}
        typer.echo("\n".join(map(str, findings)))
        typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    raise typer.Exit(1 if any(finding.status == "fail" for finding in findings) else 0)


def _findings(
    env: str | None,
    model: str | None,
    dataset: str | None,
    named_tools: Sequence[str],
    scored: bool,
    groups: int,
    group: int,
    kwargs: dict[str, Any],
    seed: int,
    sizes: dict[str, Any],
) -> Iterator[Finding]:
    from agentrl.checks.environment import check_environment
    from agentrl.checks.memory import check_memory
    from agentrl.checks.model import check_model
    from agentrl.cli.data import load_rows
    from agentrl.cli.environments import load_callable, load_environment, tasks_of
    from agentrl.cli.policies import load_processing_class
    from agentrl.errors import ConfigurationError

    if env is None and model is None and not named_tools:
        raise ConfigurationError("name an environment (--env), tools (--tool), a model (--model), or some of these")
    if env is None and named_tools and dataset is None:
        raise ConfigurationError("--tool without --env goes with --dataset, the prompts to call them in")
    if groups < 1 or group < 2:
        raise ConfigurationError(f"--groups {groups} --group {group}: expected at least 1 and 2")
    factory = None if env is None else load_environment(env)
    tools = [load_callable(name) for name in named_tools]
    rows = tasks_of(factory, groups) if dataset is None else load_rows(dataset)
    tasks = make_tasks(rows, len(rows) if isinstance(factory, Mapping) and dataset is None else groups, group, seed)
    broken = shows_pictures = False
    if factory is not None or tools:
        found = check_environment(factory, tasks, tools=tools, scored=scored)
        broken = any(finding.status == "fail" for finding in found)
        shows_pictures = any(finding.check == "images" for finding in found)
        yield from found
    if model is None:
        return
    reads, config = load_processing_class(model), _config(model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not broken and (factory is not None or dataset is not None):  # what cannot be played cannot be measured
        lengths: dict[str, Any] = {"max_completion_length": sizes["length"], "max_context": context}
        options: dict[str, Any] = {"template_kwargs": kwargs, "model": model, "shows_pictures": shows_pictures}
        yield from check_model(reads, factory, tasks[::group], tools=tools, **options, **lengths)
    yield check_memory(_sizes(config, sizes), _device_memory())


def _config(model: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model)


def _sizes(config: Any, given: dict[str, Any]) -> Sizes:
    """The sizes of a model, of which only the configuration is read, and of full batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from agentrl.checks.memory import Sizes
    from agentrl.cli.policies import sees_images

    loader = AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM
    with torch.device("meta"):
        parameters = loader.from_config(config).num_parameters()
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = given["rows"] * given["length"]
    return Sizes(
        parameters=parameters,
        trained=parameters,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        key_value=heads * head,
        vocabulary=text.vocab_size,
        micro_batch_tokens=tokens,
        cached_tokens=tokens,
        bytes_each=getattr(torch, given["dtype"]).itemsize,
        reference=given["beta"] > 0,
    )


def _device_memory() -> int | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
