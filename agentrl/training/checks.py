"""Checks of what the user passes to a trainer, before anything is loaded or run.

Each check raises `ConfigurationError` with what was wrong, where, and what to change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import datasets

from agentrl.errors import ConfigurationError
from agentrl.training.arguments import RolloutConfig
from agentrl.types import Prompt

Environments = Callable[[], Any] | dict[str, Callable[[], Any]]


def check_configuration(args: Any, expected: type[RolloutConfig], trainer: str) -> None:
    """Check that a trainer's configuration is one of its own, and that the process drives one device."""
    if not isinstance(args, expected):
        raise ConfigurationError(f"{trainer} takes a {expected.__name__}, not a {type(args).__name__}.")
    if args.n_gpu > 1:
        raise ConfigurationError(
            f"this process sees {args.n_gpu} GPUs, which transformers.Trainer would drive with DataParallel; start "
            "one process a GPU instead (accelerate launch script.py), or show it one (CUDA_VISIBLE_DEVICES=0)."
        )


def check_sources(
    *,
    reward_funcs: Sequence[Any],
    tools: Sequence[Any],
    environments: Environments | None,
    rollout_func: Callable[..., Any] | None,
    agent: Any,
    train_dataset: Any,
    args: RolloutConfig,
) -> None:
    """Check that there are tasks to play, and that what plays them does not contradict itself."""
    if rollout_func is not None and (tools or environments is not None):
        raise ConfigurationError(
            "rollout_func replaces the rollout engine, so `tools` and `environment_factory` would never be used; "
            "drop them or drop rollout_func."
        )
    if agent is not None:
        others = {"tools": tools, "environment_factory": environments, "rollout_func": rollout_func}
        if given := [name for name, value in others.items() if value]:
            raise ConfigurationError(f"an agent owns its loop, so {' and '.join(given)} would never be used; drop it.")
        if args.max_tool_calling_iterations is not None:
            raise ConfigurationError(
                f"max_tool_calling_iterations={args.max_tool_calling_iterations}: an agent runs its tools itself, so "
                "they are not counted here; limit its steps in the program, or set max_completion_length."
            )
    if args.reasoning != "keep" and not tools and environments is None and agent is None:
        raise ConfigurationError(
            f"reasoning={args.reasoning!r} says how an episode goes on after a tool round, but there are neither "
            "`tools` nor an `environment_factory`; leave it at 'keep'."
        )
    if environments is None and not reward_funcs and agent is None:
        raise ConfigurationError(
            "there is no reward: pass reward_funcs, or an environment_factory whose class has get_reward()."
        )
    if train_dataset is None:
        if environments is None:
            raise ConfigurationError("train_dataset is missing; only an environment can do without one.")
        if isinstance(environments, dict):
            raise ConfigurationError(
                "environment_factory is a dict, so train_dataset needs a column `environment` that picks one of "
                f"{sorted(environments)} for each row."
            )
        if args.max_steps <= 0:
            raise ConfigurationError("without a train_dataset nothing says how long to train: set max_steps.")
    if isinstance(train_dataset, datasets.IterableDataset) and args.max_steps <= 0:
        raise ConfigurationError("a train_dataset without a length needs max_steps, which is not set.")
    if isinstance(train_dataset, datasets.IterableDataset) and (rounds := args.dynamic_sampling_max_rounds):
        raise ConfigurationError(
            f"dynamic_sampling_max_rounds={rounds} needs a train_dataset with a length: prompts taken out of turn from "
            "a stream would be missing from it later, and a resumed run would not find its place. Make it a Dataset."
        )


def check_rows(
    dataset: datasets.Dataset | datasets.IterableDataset, environments: Environments | None, *, tools: bool
) -> None:
    """Check the columns of a dataset, and those values that can be read without running it.

    Args:
        dataset: A training or evaluation dataset. Of a stream only the declared columns are checked here.
        environments: One factory, several by name, or none.
        tools: Whether rollouts call tools, which needs conversational prompts.
    """
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        several = f"; pick one of {sorted(dataset)}" if isinstance(dataset, dict) else ""
        raise ConfigurationError(
            f"a {type(dataset).__name__} is not a dataset; expected datasets.Dataset or IterableDataset{several}."
        )
    columns = dataset.column_names
    if columns is None:
        return
    if "prompt" not in columns and environments is None:
        raise ConfigurationError(f"the dataset has no column `prompt`; its columns are {sorted(columns)}.")
    if isinstance(environments, dict) and "environment" not in columns:
        raise ConfigurationError(
            f"environment_factory is a dict, so the dataset needs a column `environment` with one of "
            f"{sorted(environments)} in each row; its columns are {sorted(columns)}."
        )
    if "tools" in columns and not tools:
        warnings.warn(
            "the dataset has a column `tools`, which the model is not shown: it is passed on like any other column. "
            "What the model can call comes from the trainer's `tools` and from environments, as in TRL.",
            stacklevel=4,
        )
    if not isinstance(dataset, datasets.Dataset):
        return
    if isinstance(environments, dict):
        for index, name in enumerate(dataset["environment"]):
            check_environment_name(name, environments, f"row {index}")
    if "prompt" in columns and len(dataset):
        check_prompt(dataset[0]["prompt"], "row 0", environments, tools=tools)


def check_environment_name(name: Any, environments: dict[str, Any], where: str) -> None:
    """Check that a row's `environment` is one of the factories."""
    if name not in environments:
        raise ConfigurationError(
            f"{where} of the dataset has environment={name!r}, which environment_factory does not have; "
            f"known are {sorted(environments)}."
        )


def check_prompt(prompt: Prompt | None, where: str, environments: Environments | None, *, tools: bool) -> None:
    """Check that a prompt has the form that its rollout needs."""
    if prompt is None:
        if environments is None:
            raise ConfigurationError(f"{where} of the dataset has no prompt.")
        return
    if isinstance(prompt, str):
        if tools:
            raise ConfigurationError(
                f"{where} of the dataset has a plain-text prompt, but tools are called in conversations; make it "
                'messages: [{"role": "user", "content": ...}].'
            )
        return
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and "role" in m for m in prompt):
        raise ConfigurationError(
            f"{where} of the dataset has the prompt {str(prompt)[:80]!r}; expected text or a list of messages, each "
            'with a "role".'
        )


def given_datasets(train_dataset: Any, eval_dataset: Any) -> list[Any]:
    """The training dataset and those of evaluation, as far as they were passed."""
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    return [dataset for dataset in (train_dataset, *evaluated) if dataset is not None]


def common_columns(datasets: Sequence[Any]) -> set[str] | None:
    """Return the columns that every dataset has, None where a stream does not say."""
    names = [dataset.column_names for dataset in datasets]
    if any(columns is None for columns in names):
        return None
    return set.intersection(*map(set, names)) if names else set()
