"""What tests of whole training runs share: small trainers, and worlds of several processes."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from agentrl.generation.base import SamplingParams
from agentrl.generation.local import LocalGenerator
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import EOS, FIX_VOCAB_SIZE, fix_tokenizer
from agentrl.training.arguments import RolloutConfig
from agentrl.training.grpo import GRPOTrainer
from agentrl.training.rloo import RLOOTrainer
from agentrl.training.trainer import RolloutTrainer

TRAINERS: dict[str, type[RolloutTrainer]] = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}
WORLD_SECONDS = 60
"""Longest life of a world of processes; a deadlock ends here, with the stack of every thread."""


def rows(count: int) -> Dataset:
    """Prompts of different lengths, with the row's number as column `row`."""
    return Dataset.from_dict({"prompt": [f"prompt {'x' * (i % 3)}{i}" for i in range(count)], "row": list(range(count))})


def length_and_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs from row to row and depends on nothing but the sampled ids."""
    return [(sum(ids) % 11) / 10 - 0.1 * len(ids) for ids in completion_ids]


def scripted(model: PreTrainedModel | None = None) -> ScriptedGenerator:
    """Samples by the turn's seed alone, 1 to 5 ids and the stop id: the same rows for any weights and processes."""

    def turn(_: str, __: list[int], params: SamplingParams) -> list[int]:
        draw = random.Random(params.seed)
        return [draw.randrange(132, 226) for _ in range(draw.randint(1, 5))] + [EOS]

    return ScriptedGenerator(turn)


def local(model: PreTrainedModel) -> LocalGenerator:
    """The real generator, with a cache that fits tiny models."""
    return LocalGenerator(model, max_cache_tokens=8192)


def make_config(algorithm: str, folder: Path | str, **options: Any) -> RolloutConfig:
    """A configuration for seconds-long runs on the CPU: two generations, logs at each step, nothing saved."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    return TRAINERS[algorithm].config_class(str(folder), **{**defaults, **options})


def make_trainer(
    algorithm: str,
    folder: Path | str,
    *,
    model: PreTrainedModel | None = None,
    reward: Any = length_and_ids,
    dataset: Any = None,
    generator: Any = scripted,
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> RolloutTrainer:
    """A trainer of a tiny Llama.

    Args:
        algorithm: "grpo" or "rloo".
        folder: Where checkpoints go.
        model: The policy; by default the same random one each time.
        reward: A reward function or several.
        dataset: Training rows; by default 4.
        generator: A function of the model.
        keywords: Further keywords of the trainer.
        **options: Arguments of the configuration.
    """
    return TRAINERS[algorithm](
        model if model is not None else small_model(),
        reward,
        make_config(algorithm, folder, **options),
        rows(4) if dataset is None else dataset,
        processing_class=fix_tokenizer(),
        generator=generator,
        **(keywords or {}),
    )


def small_model(**overrides: Any) -> PreTrainedModel:
    """A random Llama for the ids of `fix_tokenizer`, whose logits are spread out little enough to stay random."""
    return tiny_model("llama", vocab_size=FIX_VOCAB_SIZE, **{"initializer_range": 0.1, **overrides})


def weights(trainer: RolloutTrainer) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def step_logs(trainer: RolloutTrainer) -> list[dict[str, Any]]:
    """The training logs, one a logged step."""
    return [log for log in trainer.state.log_history if "loss" in log]


def logged(trainer: RolloutTrainer, name: str) -> list[Any]:
    """The values of one training metric, step by step; None where a log lacks it."""
    return [log.get(name) for log in step_logs(trainer)]


# Worlds -------------------------------------------------------------------------------------------------------------


def run_world(function: Callable[..., Any], folder: Path, *args: Any, world_size: int = 2) -> list[Any]:
    """Call `function(*args)` in the processes of a new gloo world and return what each gave back.

    Processes come from a fork server that has imported everything already, and meet at a file, so there is no port
    to be taken. Whatever happens, none is alive when this returns.

    Raises:
        AssertionError: A process raised, died or was still busy after `WORLD_SECONDS`; carries its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.helpers", "peft"])
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        context.Process(target=_member, args=(function, args, folder, rank, world_size), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    results = []
    for rank in range(world_size):
        answer = folder / f"answer-{rank}"
        if not answer.exists():
            notes = "\n".join(f"[process {r}]\n{(folder / f'notes-{r}').read_text()}" for r in range(world_size))
            raise AssertionError(f"process {rank} of {world_size} gave no answer\n{notes}")
        results.append(pickle.loads(answer.read_bytes()))
    return results


def _wait(processes: list[Any]) -> None:
    """Wait for all, or for the first that fails: the others would only wait for it."""
    deadline = time.monotonic() + WORLD_SECONDS + 10
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            return
        time.sleep(0.02)


def _member(function: Callable[..., Any], args: tuple[Any, ...], folder: Path, rank: int, world_size: int) -> None:
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    torch.set_num_threads(1)
    with (folder / f"notes-{rank}").open("w") as notes:
        faulthandler.dump_traceback_later(WORLD_SECONDS, exit=True, file=notes)
        try:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world_size
            )
            answer = pickle.dumps(function(*args))
            torch.distributed.barrier()
        except BaseException:
            traceback.print_exc(file=notes)
            notes.flush()
            os._exit(1)
        temporary = folder / f"part-{rank}"
        temporary.write_bytes(answer)
        temporary.rename(folder / f"answer-{rank}")
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # without the goodbyes of gloo's and the generator's threads
