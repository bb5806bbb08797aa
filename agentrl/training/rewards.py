"""Rewards: from trajectories to one number per trajectory and source.

A reward source is a reward function, a reward model or an environment class with `get_reward`. A reward
function is called with keyword arguments, as many as its signature takes:

- `prompts`, `completions`, `completion_ids`: one entry per completion (the ids of an episode that forked are those of
  its rows, one after the other);
- every dataset column except `prompt`, and the extra fields of a `rollout_func`: lists, None where missing;
- `trainer_state`, `log_extra(column, values)`, `log_metric(name, value)`;
- `environments`, only with an `environment_factory`: the instance that played each rollout. A function that uses it
  must name it: to others it may be None in a resumed run, for a rollout that was finished before.

Sync functions run one after the other in the thread that calls `compute`: they may use signals or libraries
that are not thread-safe. Async ones are awaited together. Rollouts whose environment failed are shown to no
function and have no reward.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from agentrl.errors import ConfigurationError, RewardError
from agentrl.rollout.calling import is_async
from agentrl.rollout.schemas import function_name
from agentrl.training.reward_functions import RewardFunction, distinct_names
from agentrl.training.reward_models import RewardModel
from agentrl.types import Trajectory

logger = logging.getLogger(__name__)

RewardSource = Callable[..., Any] | PreTrainedModel | str

KEYWORDS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""What every reward function is offered besides the dataset's columns; a column of such a name is hidden."""


class RewardSet:
    """All reward sources of a run, in one order: the functions, then the environment classes.

    Args:
        reward_funcs: One source or several: functions, sequence classifiers, or names of classifiers.
        weights: One weight per function, None for 1.0 each; environments always weigh 1.0.
        processing_classes: The reward models' tokenizers: one for all of them, or one entry per function.
        environments: Class names of the environments that own a reward, by environment name
            (`EnvironmentPool.reward_owners`); None when the run has no environment at all.
        columns: The dataset's columns, to check what the functions need; None when they are not known
            beforehand (a streamed dataset, or a `rollout_func` that adds fields).
        model_init_kwargs: For reward models given by name.
        trust_remote_code: For reward models given by name.

    Raises:
        ConfigurationError: There is no source, the weights or tokenizers do not match, or a function needs
            something that it will not get.

    Attributes:
        names: The sources' names, in order.
        weights: Their weights.
    """

    def __init__(
        self,
        reward_funcs: RewardSource | Sequence[RewardSource] | None,
        *,
        weights: Sequence[float] | None = None,
        processing_classes: Any = None,
        environments: Mapping[str | None, str] | None = None,
        columns: Collection[str] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        sources = reward_sources(reward_funcs)
        self._owners = dict(environments or {})
        self._has_environments = environments is not None
        owners = list(dict.fromkeys(self._owners.values()))
        if not sources and not owners:
            raise ConfigurationError(
                "nothing gives a reward: pass `reward_funcs`, or an `environment_factory` whose class has a "
                "method `get_reward`"
            )
        functions: list[Callable[..., Any]] = [
            RewardModel(source, tokenizer, model_init_kwargs=model_init_kwargs, trust_remote_code=trust_remote_code)
            if isinstance(source, PreTrainedModel | str)
            else source
            for source, tokenizer in zip(sources, _per_source(processing_classes, len(sources)), strict=True)
        ]
        names = distinct_names(map(function_name, functions), taken=owners)
        self.functions = [RewardFunction(*pair) for pair in zip(names, functions, strict=True)]
        self.names = [*names, *owners]
        self.weights = [*_weights(weights, len(sources)), *(1.0 for _ in owners)]
        if columns is not None:
            self._check_columns(columns)

    @property
    def see_environments(self) -> bool:
        """Whether a function names `environments` as a parameter."""
        return any("environments" in reward.named for reward in self.functions)

    def to(self, device: Any) -> None:
        """Move the reward models to a device."""
        for reward in self.functions:
            if isinstance(reward.function, RewardModel):
                reward.function.model.to(device)

    def compute(
        self,
        trajectories: Sequence[Trajectory],
        *,
        trainer_state: Any = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
    ) -> list[list[float | None]]:
        """Reward trajectories; to be called before their environments are released.

        Args:
            trajectories: R finished rollouts.
            trainer_state: Handed to the functions.
            log_extra: Takes a column name and R values.
            log_metric: Takes a metric's name and value.
            run: Runs a coroutine to its end, for the async functions. The default makes a new event loop: it
                neither suits clients that they keep between calls nor works inside a running loop.

        Returns:
            R rows with one entry per source, None where it does not apply.

        Raises:
            RewardError: A function returned something that is not one reward per completion.
        """
        count = len(trajectories)
        rows = [row for row, t in enumerate(trajectories) if t.outcome.is_signal]
        offered = self._offered([trajectories[row] for row in rows]) | {
            "trainer_state": trainer_state,
            "log_extra": None if log_extra is None else _column_logger(log_extra, rows, count),
            "log_metric": log_metric,
        }
        returned = self._call(offered, run) if rows else [[] for _ in self.functions]
        columns = [
            _scatter(reward.read(values, len(rows)), rows, count)
            for reward, values in zip(self.functions, returned, strict=True)
        ]
        for owner in self.names[len(self.functions) :]:
            columns.append([t.reward if self._owner(t) == owner else None for t in trajectories])
        rewards = [[column[row] for column in columns] for row in range(count)]
        if unscored := sum(
            trajectories[row].turn_rewards is None and all(value is None for value in rewards[row]) for row in rows
        ):
            logger.warning("%d of %d rollouts got a reward from none of %s", unscored, len(rows), self.names)
        return rewards

    def metrics(self, rewards: Sequence[Sequence[float | None]]) -> dict[str, float]:
        """`rewards/{name}/mean` and `/std` over the rows where the source applied; none where it never did.

        The standard deviation is unbiased, and 0 for a single row.
        """
        metrics = {}
        for index, name in enumerate(self.names):
            values = [value for row in rewards if (value := row[index]) is not None]
            if values:
                metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
                metrics[f"rewards/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        return metrics

    def _check_columns(self, columns: Collection[str]) -> None:
        keywords = KEYWORDS | ({"environments"} if self._has_environments else set())
        offered = keywords | (set(columns) - {"prompt"})
        for reward in self.functions:
            if missing := [name for name in reward.requires if name not in offered]:
                raise ConfigurationError(
                    f"the reward function {reward.name!r} needs {missing}, which is neither a dataset column "
                    f"({sorted(columns)}) nor one of {sorted(keywords)}; add the column or "
                    "give the parameter a default"
                )

    def _offered(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """What the functions are offered, one list entry per trajectory."""
        columns = dict.fromkeys(name for t in trajectories for name in (*t.task.columns, *t.extra))
        offered: dict[str, Any] = {
            name: [t.extra.get(name, t.task.columns.get(name)) for t in trajectories] for name in columns
        }
        offered.pop("prompt", None)
        if any(t.task.environment is not None for t in trajectories):
            offered["environment"] = [t.task.environment for t in trajectories]
        if self._has_environments:
            offered["environments"] = [t.environment for t in trajectories]
        return offered | {
            "prompts": [t.prompt for t in trajectories],
            "completions": [t.completion for t in trajectories],
            "completion_ids": [[token for row in t.rows for token in row.completion_ids] for t in trajectories],
        }

    def _call(self, offered: Mapping[str, Any], run: Callable[[Coroutine[Any, Any, Any]], Any]) -> list[Any]:
        """What each function returns."""
        returned: dict[str, Any] = {}
        waiting = [reward for reward in self.functions if is_async(reward.function)]
        if waiting:
            returned |= run(_gather(waiting, offered))
        for reward in self.functions:
            if reward not in waiting:
                returned[reward.name] = reward.function(**reward.arguments(offered))
        return [returned[reward.name] for reward in self.functions]

    def _owner(self, trajectory: Trajectory) -> str | None:
        """Class name of the environment that owns this trajectory's reward."""
        return self._owners.get(trajectory.task.environment, self._owners.get(None))


async def _gather(rewards: Sequence[RewardFunction], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Await all functions together, by name; the first error is raised once none is running any more."""
    calls = [reward.function(**reward.arguments(offered)) for reward in rewards]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return {reward.name: result for reward, result in zip(rewards, results, strict=True)}


def _column_logger(
    log_extra: Callable[[str, list[Any]], None], rows: Sequence[int], count: int
) -> Callable[[str, Sequence[Any]], None]:
    """What functions get as `log_extra`: they see only some rows, the table has all."""

    def log_column(column: str, values: Sequence[Any]) -> None:
        if len(values) != len(rows):
            raise RewardError(f"log_extra({column!r}, ...) got {len(values)} values for {len(rows)} completions")
        log_extra(column, _scatter(values, rows, count))

    return log_column


def _scatter(values: Sequence[Any], rows: Sequence[int], count: int) -> list[Any]:
    """Put values back at their rows among `count`, None elsewhere."""
    scattered: list[Any] = [None] * count
    for row, value in zip(rows, values, strict=True):
        scattered[row] = value
    return scattered


def reward_sources(reward_funcs: RewardSource | Sequence[RewardSource] | None) -> list[RewardSource]:
    """What the user passed as `reward_funcs`, as a list.

    Raises:
        ConfigurationError: Something in it can give no reward.
    """
    if reward_funcs is None:
        return []
    sources: list[Any] = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    for source in sources:
        if not (isinstance(source, str) or callable(source)):
            raise ConfigurationError(
                f"`reward_funcs` holds {source!r}, which is no function, sequence classifier or name of one"
            )
    return sources


def _per_source(processing_classes: Any, count: int) -> list[Any]:
    if not isinstance(processing_classes, list | tuple):
        return [processing_classes] * count
    if len(processing_classes) != count:
        raise ConfigurationError(
            f"`reward_processing_classes` has {len(processing_classes)} entries for {count} reward "
            "functions; give one entry per function (None for plain functions), or a single tokenizer for all"
        )
    return list(processing_classes)


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise ConfigurationError(
            f"`reward_weights` has {len(weights)} entries for {count} reward functions; give one per "
            "function (environments with `get_reward` always weigh 1.0)"
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigurationError(f"`reward_weights` must be finite numbers, not {list(weights)}")
    return [float(weight) for weight in weights]
