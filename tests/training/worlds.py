"""Worlds of several processes on this machine, for tests of distributed training."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORLD_SECONDS = 300
"""Longest life of a world, also where the machine is busy; a deadlock ends here, with the stack of every thread."""


def run_world(function: Callable[..., Any], folder: Path, *args: Any, world_size: int = 2) -> list[Any]:
    """Call `function(*args)` in the processes of a new gloo world and return what each gave back.

    Processes come from a fork server that has imported everything already, and meet at a file, so there is no port
    to be taken. Whatever happens, none is alive when this returns.

    Raises:
        AssertionError: A process raised, died or was still busy after `WORLD_SECONDS`; carries its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.runs", "peft"])
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
            notes = [path.read_text() for path in sorted(folder.glob("notes-*"))]  # a process may not have come so far
            raise AssertionError("\n".join([f"process {rank} of {world_size} gave no answer", *notes]))
        results.append(pickle.loads(answer.read_bytes()))
    return results


def _wait(processes: list[Any]) -> None:
    """Wait for all, or for the first that fails: the others would only wait for it."""
    deadline = time.monotonic() + WORLD_SECONDS + 30
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
