"""`agentrl train` and `agentrl options`: what the trainers do in Python, with every field of their configuration."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.mistakes import mistakes
from agentrl.cli.rollout import AsJson, Env, Tool

if TYPE_CHECKING:
    from agentrl.training.trainer import RolloutTrainer

FURTHER: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options that are not ours are fields of the configuration."""

ROWS = 500
"""Rows of each of several environments where no dataset routes them."""


class Algorithm(StrEnum):
    """What trains."""

    GRPO = "grpo"
    RLOO = "rloo"
    ASYNC_GRPO = "async-grpo"
    ASYNC_RLOO = "async-rloo"


def train(
    context: typer.Context,
    env: Env = None,
    model: Annotated[str | None, typer.Option(help="A model's folder or its name on the hub.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Prompts and columns: a file, a folder or a hub name.")] = None,
    tool: Tool = None,
    reward: Annotated[list[str] | None, typer.Option(help="Reward function, module:function; may be repeated.")] = None,
    algorithm: Annotated[Algorithm | None, typer.Option(help="What trains.  [default: grpo]")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON with any of these; options win over it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from output_dir's last checkpoint.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live status.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last figures as one JSON object.")] = False,
) -> None:
    """Train a model. Any field of the configuration is an option: --learning_rate 1e-5 --max_steps 100 ...

    `agentrl options WORD` lists them. Several GPUs: accelerate launch -m agentrl train ...

    The run's folder is printed first. Exit codes: 0 trained, 1 training failed, 2 what was typed cannot work.
    """
    typed: dict[str, Any] = {
        "env": env,
        "model": model,
        "dataset": dataset,
        "tool": tool,
        "reward": reward,
        "algorithm": algorithm,
    }
    with mistakes():
        written = {} if config is None else _read(config)
        named = {k: typed[k] or written.pop(k, None) for k in typed}
        chosen = Algorithm(_one_of(str(named.pop("algorithm") or "grpo"), Algorithm))
        args = _arguments(chosen, named["model"], fields_of(chosen, context.args, written))
        folder = Path(args.output_dir or ".")
        if args.process_index == 0:
            typer.echo(f"run: {folder.absolute()}", err=as_json)
        trainer = _trainer(chosen, named, args, quiet=quiet)
        result = trainer.train(resume_from_checkpoint=resume or None)
        trainer.save_model()
    if as_json and trainer.is_world_process_zero():
        logs = [log for log in trainer.state.log_history if "reward" in log]
        last = logs[-1] if logs else {}
        typer.echo(json.dumps({"output_dir": str(folder), "step": trainer.state.global_step, **result.metrics, **last}))


def options(
    word: Annotated[str, typer.Argument(help="Only those whose name or help holds this word.")] = "",
    algorithm: Annotated[Algorithm, typer.Option(help="Whose.")] = Algorithm.GRPO,
    as_json: AsJson = False,
) -> None:
    """List the fields of the configuration, which `agentrl train` takes as options."""
    parser = _parser(algorithm)
    rows = [
        {"name": action.dest, "default": _plain(default), "help": " ".join((action.help or "").split())}
        for action, default in parser
        if word.lower() in f"{action.dest} {action.help}".lower() and action.dest not in ("help",)
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"--{row['name']} ({row['default']})\n    {row['help'][:300]}")


def fields_of(algorithm: Algorithm, arguments: Sequence[str], written: dict[str, Any]) -> dict[str, Any]:
    """The fields of the configuration that were given, on the command line or in the file; the former win.

    Args:
        algorithm: Whose configuration.
        arguments: `--name value ...`; hyphens are as good as underscores in names.
        written: What the file says.

    Raises:
        ConfigurationError: A field does not exist, or its value cannot be read.
    """
    from agentrl.errors import ConfigurationError

    parser = _parser(algorithm)
    names = {option.lstrip("-") for action, _ in parser for option in action.option_strings}
    given = [_underscored(argument) for argument in arguments]
    for name in [*written, *(a.partition("=")[0][2:] for a in given if a.startswith("--"))]:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"; did you mean {' or '.join('--' + match for match in near)}?" if near else ""
            raise ConfigurationError(f"there is no option --{name}{hint} (agentrl options WORD lists them)")
    return written | _parse(parser, given)


def _arguments(algorithm: Algorithm, model: str | None, fields: dict[str, Any]) -> Any:
    """The configuration of a run."""
    from agentrl.errors import ConfigurationError

    if model is None:
        raise ConfigurationError("name a model (--model)")
    fields = {"output_dir": f"runs/{Path(model).name}-{algorithm.value}", "report_to": "none"} | fields
    fields["disable_tqdm"] = True  # the live status stands for it
    try:
        return _classes(algorithm)[0](**fields)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from error


def _trainer(algorithm: Algorithm, named: dict[str, Any], args: Any, *, quiet: bool) -> RolloutTrainer:
    from datasets import Dataset
    from transformers import PrinterCallback

    from agentrl.cli.data import load_rows
    from agentrl.cli.environments import load_environment, tasks_of
    from agentrl.cli.policies import show_bars
    from agentrl.training.status import LiveStatus

    env, dataset = named["env"], named["dataset"]
    factory = None if env is None else load_environment(env)
    rows: Any = tasks_of(factory, ROWS) if dataset is None else load_rows(dataset)
    if isinstance(rows, list):
        rows = Dataset.from_list(rows) if rows else None
    show_bars(not quiet)
    trainer: RolloutTrainer = _classes(algorithm)[1](
        model=named["model"],
        reward_funcs=_functions(named["reward"]) or None,
        args=args,
        train_dataset=rows,
        tools=_functions(named["tool"]) or None,
        environment_factory=factory,
    )
    show_bars(False)  # from here on the live status shows where the run is
    trainer.remove_callback(PrinterCallback)  # standard output is for results
    if not quiet:
        trainer.add_callback(LiveStatus())
    return trainer


def _functions(names: str | Sequence[str] | None) -> list[Any]:
    """Functions by their names; a file may name a single one without a list."""
    from agentrl.cli.environments import load_callable

    return [load_callable(name) for name in ([names] if isinstance(names, str) else names or ())]


def _classes(algorithm: Algorithm) -> tuple[Any, Any]:
    from agentrl.training import arguments, async_arguments
    from agentrl.training.async_grpo import AsyncGRPOTrainer
    from agentrl.training.async_rloo import AsyncRLOOTrainer
    from agentrl.training.grpo import GRPOTrainer
    from agentrl.training.rloo import RLOOTrainer

    return {
        Algorithm.GRPO: (arguments.GRPOConfig, GRPOTrainer),
        Algorithm.RLOO: (arguments.RLOOConfig, RLOOTrainer),
        Algorithm.ASYNC_GRPO: (async_arguments.AsyncGRPOConfig, AsyncGRPOTrainer),
        Algorithm.ASYNC_RLOO: (async_arguments.AsyncRLOOConfig, AsyncRLOOTrainer),
    }[algorithm]


def _parser(algorithm: Algorithm) -> Any:
    """The argument parser that transformers makes of a configuration, with the default of each option."""
    import argparse

    from transformers import HfArgumentParser

    parser = HfArgumentParser(_classes(algorithm)[0], allow_abbrev=False, exit_on_error=False, add_help=False)
    actions = [(action, action.default) for action in parser._actions]
    for action, _ in actions:
        action.default, action.required = argparse.SUPPRESS, False
    return _Options(actions, parser)


class _Options(list[Any]):
    """Actions with their defaults; only what is given comes out of `parser`."""

    def __init__(self, actions: list[Any], parser: Any) -> None:
        super().__init__(actions)
        self.parser = parser


def _parse(options: _Options, arguments: list[str]) -> dict[str, Any]:
    import argparse

    from agentrl.errors import ConfigurationError

    try:
        found, rest = options.parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigurationError(str(error)) from None
    if rest:
        raise ConfigurationError(f"what is {' '.join(map(repr, rest))}? Options look like --name value")
    return vars(found)


def _underscored(argument: str) -> str:
    """An option with underscores in its name, as the fields have them."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _read(path: Path) -> dict[str, Any]:
    import yaml

    from agentrl.errors import ConfigurationError

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"--config {path} must hold names and values")
    return value


def _one_of(value: str, kind: type[StrEnum]) -> str:
    from agentrl.errors import ConfigurationError

    if value not in list(kind):
        raise ConfigurationError(f"algorithm: {value!r} is none of {', '.join(kind)}")
    return value


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
