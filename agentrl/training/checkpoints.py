"""What a checkpoint holds besides weights, optimizer and random states: the window in flight, metrics not yet logged.

A checkpoint often falls between two steps of one window (`num_iterations`, `steps_per_generation`). The rollouts of
that window were paid for, and the policy that sampled them is gone, so each process writes its share of it: the laid
out rows with their logprobs and advantages, as safetensors with JSON, never a pickle. The resumed run takes the steps
that are left from it and is, bit for bit, the run that was never interrupted.

`trainer_state.json` is written last. A run that was killed while it saved leaves a folder that lacks it, or lacks the
share of a process; such a folder is not resumed from, the one before it is.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import safetensors
import safetensors.torch
from torch import Tensor
from transformers.trainer_callback import TrainerState

from agentrl.training.batching import MicroBatch
from agentrl.training.data import Shape
from agentrl.training.metrics import MetricStore
from agentrl.training.windows import Window

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATE = "trainer_state.json"


@dataclass(slots=True)
class InFlight:
    """What a process has begun and not finished when a checkpoint is written.

    Attributes:
        window: The window of which steps are left, None between two windows.
        metrics: What was measured since the last log.
    """

    window: Window | None = None
    metrics: MetricStore = field(default_factory=MetricStore)


def share_name(rank: int) -> str:
    """The file of a process within a checkpoint."""
    return f"rollouts-{rank}.safetensors"


def save_in_flight(folder: str | Path, state: InFlight, shape: Shape) -> None:
    """Write this process's share; it is there whole or not at all.

    Args:
        folder: The checkpoint.
        state: What to write.
        shape: How windows are cut; names the process as well.
    """
    window = state.window
    tensors: dict[str, Tensor] = {}
    batches: list[dict[str, Any]] = []
    for index, batch in enumerate(window.batches if window is not None else []):
        values = {spec.name: getattr(batch, spec.name) for spec in dataclasses.fields(batch)}
        values |= {f"images.{name}": value for name, value in values.pop("images").items()}
        held = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        # Copies, since micro-batches are often views of one tensor, which the format refuses.
        tensors |= {f"{index}.{name}": value.detach().cpu().clone().contiguous() for name, value in held.items()}
        batches.append({name: value for name, value in values.items() if name not in held and value is not None})
    header = {
        "shape": _portable(shape),
        "window": None if window is None else {"identity": window.identity, "rows": window.rows, "batches": batches},
        "metrics": state.metrics.entries(),
    }
    path = Path(folder) / share_name(shape.rank)
    temporary = path.with_suffix(".part")
    safetensors.torch.save_file(tensors, temporary, metadata={"agentrl": json.dumps(header, default=_plain)})
    os.replace(temporary, path)


def load_in_flight(folder: str | Path, shape: Shape) -> InFlight:
    """Read this process's share of a checkpoint.

    Without one (an older checkpoint, or `save_only_model`), or when windows are cut otherwise by now, nothing is in
    flight, and a window that was cut by the checkpoint is played again with the policy of the checkpoint.
    """
    path = Path(folder) / share_name(shape.rank)
    if not path.exists():
        return InFlight()
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["agentrl"])
        if header["shape"] != _portable(shape):
            logger.warning(
                "%s was written with %s, and windows are now cut by %s; a window that it cuts in two is played again",
                folder,
                header["shape"],
                _portable(shape),
            )
            return InFlight()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    window = None
    if (saved := header["window"]) is not None:
        batches = []
        for index, plain in enumerate(saved["batches"]):
            held = {name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith(f"{index}.")}
            images = {name.split(".", 1)[1]: held.pop(name) for name in list(held) if name.startswith("images.")}
            batches.append(MicroBatch(**fields_of(MicroBatch, plain) | held | {"images": images}))
        window = Window(tuple(saved["identity"]), saved["rows"], batches, metrics={}, own_metrics=[], tokens_seen=0)
    return InFlight(window, MetricStore.of(header["metrics"]))


def processes_of(folder: str | Path) -> int | None:
    """Return how many processes wrote a checkpoint, None if it does not say."""
    if not (share := Path(folder) / share_name(0)).exists():
        return None
    with safetensors.safe_open(share, framework="pt") as file:
        number: int = json.loads(file.metadata()["agentrl"])["shape"]["world_size"]
    return number


def last_complete(output_dir: str | Path) -> str | None:
    """Return the newest checkpoint of a run that was written whole, None if there is none."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[-1].isdigit()]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        if _is_complete(folder):
            return str(folder)
        logger.warning("%s was not written whole and is passed over", folder)
    return None


def _is_complete(folder: Path) -> bool:
    try:
        TrainerState.load_from_json(str(folder / STATE))
    except (OSError, ValueError, TypeError):
        return False
    # Without shares: save_only_model, or a checkpoint of another trainer.
    return all((folder / share_name(rank)).exists() for rank in range(processes_of(folder) or 0))


def _portable(shape: Shape) -> dict[str, int]:
    """What has to be the same for a window to be usable."""
    return {name: value for name, value in dataclasses.asdict(shape).items() if name != "rank"}


def _plain(value: Any) -> Any:
    """What `json` cannot write by itself, as `fields_of` reads it."""
    return [value.start, value.stop] if isinstance(value, range) else dataclasses.asdict(value)


def restored(cls: type[T], plain: dict[str, Any]) -> T:
    """Make a dataclass of what `json` made of its `dataclasses.asdict`."""
    return cls(**fields_of(cls, plain))


def fields_of(cls: type, plain: dict[str, Any]) -> dict[str, Any]:
    """Give the fields of a dataclass the types that JSON took from them; those that were left out were None."""
    hints = get_type_hints(cls)
    return {spec.name: _typed(hints[spec.name], plain.get(spec.name)) for spec in dataclasses.fields(cls)}


def _typed(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    options = [option for option in get_args(hint) if option is not type(None)]
    if isinstance(hint, UnionType) and len(options) == 1:
        return _typed(options[0], value)
    if get_origin(hint) is tuple:
        kinds = options if len(options) == len(value) and Ellipsis not in options else [options[0]] * len(value)
        return tuple(map(_typed, kinds, value))
    if get_origin(hint) is list and dataclasses.is_dataclass(options[0]):
        return [_typed(options[0], entry) for entry in value]
    if hint is range:
        return range(*value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(hint, type) and hasattr(hint, "_fields"):  # a NamedTuple
        return hint(*map(_typed, get_type_hints(hint).values(), value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint(**fields_of(hint, value))
    return value
