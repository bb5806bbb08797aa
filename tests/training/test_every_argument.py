"""Every argument is read by code that runs, or is refused: none is accepted and ignored.

The sources are searched for reads of each field. Of `transformers.Trainer` only those methods count that are still
reached: what our trainer replaces, and what only replaced methods call, does not.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path

import pytest
import transformers
from transformers import Trainer, TrainingArguments

import agentrl
from agentrl import AsyncGRPOConfig, AsyncRLOOConfig, GRPOConfig, RLOOConfig
from agentrl.generation.base import SamplingParams
from agentrl.training.argument_checks import REFUSED
from agentrl.training.generators import COMMON
from agentrl.training.trainer import RolloutTrainer

AGENTRL = Path(agentrl.__file__).parent
TRANSFORMERS = Path(transformers.__file__).parent
CHECKS = ("argument_checks.py", "objective_checks.py", "vllm_checks.py")
ARGUMENTS = [AGENTRL / "training" / name for name in ("arguments.py", "async_arguments.py", *CHECKS)]

READERS = ["training_args.py", "trainer_callback.py", "trainer_optimizer.py", "modelcard.py", "debug_utils.py"]
READERS += ["integrations/integration_utils.py", "integrations/deepspeed.py", "integrations/neftune.py"]
"""Modules of transformers, besides the trainer, that are given the arguments."""

NOTHING_TO_DO = {
    "do_train": "for scripts; transformers does not read it either",
    "do_predict": "for scripts; transformers does not read it either",
    "local_rank": "deprecated in transformers, which takes the rank from the environment",
    "dataloader_pin_memory": "loaders give rows of a dataset, not tensors: there is nothing to pin",
}
"""Arguments that go unread because either value is satisfied."""


def reads(source: str | ast.AST) -> set[str]:
    """Names that are read from something called `args`, `config` or `self`, by attribute or `getattr`."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source)) if isinstance(source, str) else source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if ast.unparse(node.value).rsplit(".", 1)[-1] in ("args", "_args", "config", "self"):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            found |= {argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)}
    return found


def own_reads() -> set[str]:
    """What agentrl reads; of the configurations themselves, only what their properties read."""
    found = set(COMMON)  # read by name, in `sampling_of`
    for path in AGENTRL.rglob("*.py"):
        if path not in ARGUMENTS:
            found |= reads(path.read_text(encoding="utf-8"))
    for node in (node for path in ARGUMENTS for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list):
            found |= reads(node) if node.name in found else set()
    return found


def reached_methods() -> set[str]:
    """Methods of `transformers.Trainer` that run: public ones that we do not replace, and what these call."""

    def replaced(name: str) -> bool:
        ours = vars(RolloutTrainer).get(name)
        return ours is not None and f"super().{name}" not in inspect.getsource(ours)

    methods = {name: value for name, value in vars(Trainer).items() if inspect.isfunction(value)}
    waiting = [name for name in methods if not name.startswith("_") or name == "__init__"]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached or replaced(name):
            continue
        reached.add(name)
        waiting += reads(inspect.getsource(methods[name])) & methods.keys()
    return reached


def inherited_reads() -> set[str]:
    found = set()
    for name in READERS:
        found |= reads((TRANSFORMERS / name).read_text(encoding="utf-8"))
    for name in reached_methods():
        found |= reads(inspect.getsource(vars(Trainer)[name]))
    return found


def unread(names: list[str], read: set[str]) -> list[str]:
    excused = {*REFUSED, *NOTHING_TO_DO}
    return [name for name in names if name not in read | excused]


INHERITED = [spec.name for spec in dataclasses.fields(TrainingArguments)]
MAPPED = {
    # Our own code maps these in `__post_init__` to what is read.
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "dtype": "model_init_kwargs",
}


CONFIGS = [GRPOConfig, RLOOConfig, AsyncGRPOConfig, AsyncRLOOConfig]


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_own_argument_is_read_or_refused(cls):
    """Invariant 10."""
    own = [spec.name for spec in dataclasses.fields(cls) if spec.name not in INHERITED]
    assert len(own) > 50
    assert unread([MAPPED.get(name, name) for name in own], own_reads()) == []


def test_every_inherited_argument_is_read_by_code_that_runs_or_refused():
    """Invariant 10. What only `transformers`' own loaders and losses read would be ignored here."""
    read = inherited_reads() | own_reads()
    assert unread([MAPPED.get(name, name) for name in INHERITED], read) == []


def test_the_search_sees_what_is_ignored():
    """It does not take a loader's option for read, nor an argument that nothing mentions."""
    assert "get_train_dataloader" not in reached_methods()
    assert "_get_dataloader" not in reached_methods()
    assert "dataloader_drop_last" not in inherited_reads() | own_reads()
    assert unread(["no_such_argument"], own_reads()) == ["no_such_argument"]


def test_nothing_is_listed_for_no_reason():
    fields = {spec.name for cls in CONFIGS for spec in dataclasses.fields(cls)}
    assert set(REFUSED) <= fields
    assert set(NOTHING_TO_DO) <= fields - own_reads()
    assert set(COMMON) <= {spec.name for spec in dataclasses.fields(SamplingParams)}
