"""Rollouts that a user's own function plays: `rollout_func`.

It gets the prompts, one for each completion wanted, and the trainer, and gives back a dict of lists with one entry a
completion: `prompt_ids`, `completion_ids`, `logprobs` (of the sampled tokens under the distribution they were drawn
from, None or NaN where it is not known; anything where `env_mask` is 0), and optionally `env_mask` (1 on tokens that
the model sampled; default all). Every other entry reaches the reward functions under its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from agentrl.chat.renderer import Renderer
from agentrl.errors import RolloutError
from agentrl.training.recording import Recorder
from agentrl.types import FinishReason, Limit, Outcome, Prompt, Task, Trajectory, Turn

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def play_custom(
    rollout_func: Callable[..., Any],
    tasks: Sequence[Task],
    trainer: Any,
    renderer: Renderer,
    recorder: Recorder,
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> list[Trajectory]:
    """Play tasks with a user's function, unless the journal has all of them from before the run was cut off.

    Args:
        rollout_func: The function.
        tasks: One for each completion wanted.
        trainer: Passed on to the function.
        renderer: Makes completions readable for the reward functions.
        recorder: Keeps the trajectories.
        run: Runs what the recorder does to its end.

    Raises:
        RolloutError: The answer is not one aligned row a prompt.
    """
    if not tasks:
        return []
    if (played := run(recorder.played(tasks))) is not None:
        return list(played)
    started = time.time()
    trajectories = _ask(rollout_func, tasks, trainer, renderer)
    run(recorder.keep(trajectories, started))
    return trajectories


def _ask(rollout_func: Callable[..., Any], tasks: Sequence[Task], trainer: Any, renderer: Renderer) -> list[Trajectory]:
    """Call a user's function and make its answer into trajectories."""
    answer = rollout_func([task.prompt for task in tasks], trainer)
    _check(answer, len(tasks))
    extra = {name: values for name, values in answer.items() if name not in (*REQUIRED, "env_mask")}
    masks = answer.get("env_mask") or [[1] * len(ids) for ids in answer["completion_ids"]]
    logprobs = answer["logprobs"] or [None] * len(tasks)
    trajectories = []
    for row, task in enumerate(tasks):
        ids, mask = list(answer["completion_ids"][row]), list(masks[row])
        scores = [math.nan if score is None else score for score in logprobs[row] or [None] * len(ids)]
        if not len(ids) == len(mask) == len(scores):
            raise RolloutError(
                f"rollout_func gave row {row} {len(ids)} completion_ids, {len(mask)} env_mask entries and "
                f"{len(scores)} logprobs; expected one of each for each token."
            )
        ended = bool(ids) and ids[-1] in renderer.stop_ids
        trajectories.append(
            Trajectory(
                task=task,
                prompt=task.prompt or "",
                prompt_ids=list(answer["prompt_ids"][row]),
                completion=_readable(task.prompt, ids, renderer),
                completion_ids=ids,
                loss_mask=[int(bool(sampled)) for sampled in mask],
                logprobs=[score if sampled else 0.0 for score, sampled in zip(scores, mask, strict=True)],
                outcome=Outcome.FINISHED if ended else Outcome.TRUNCATED,
                limit=None if ended else Limit.COMPLETION,
                turns=_turns(mask),
                extra={name: values[row] for name, values in extra.items()},
            )
        )
    return trajectories


def _check(answer: Any, count: int) -> None:
    if not isinstance(answer, dict) or (missing := [name for name in REQUIRED if name not in answer]):
        got = sorted(answer) if isinstance(answer, dict) else type(answer).__name__
        raise RolloutError(f"rollout_func must give back a dict with {', '.join(REQUIRED)}; it gave {got}.")
    if "logprob_token_ids" in answer:
        raise RolloutError(
            "rollout_func gave logprob_token_ids: several logprobs a token are not part of this version; give the "
            "logprob of each sampled token."
        )
    assert not missing
    for name, values in answer.items():
        if values is None and name in ("logprobs", "env_mask"):
            continue
        if not hasattr(values, "__len__") or len(values) != count:
            size = len(values) if hasattr(values, "__len__") else type(values).__name__
            raise RolloutError(
                f"rollout_func gave {size} entries of {name}; it got {count} prompts, one for each completion wanted "
                "(each prompt comes num_generations times), and must give as many entries."
            )


def _readable(prompt: Prompt | None, ids: list[int], renderer: Renderer) -> Prompt:
    text = renderer.text(ids)
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _turns(mask: Sequence[int]) -> list[Turn]:
    """Return the runs of sampled tokens as turns."""
    turns, start = [], None
    for position, sampled in enumerate([*mask, 0]):
        if sampled and start is None:
            start = position
        elif not sampled and start is not None:
            turns.append(Turn(start, position, FinishReason.STOP))
            start = None
    return turns
