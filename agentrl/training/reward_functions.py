"""One reward function: which keywords it takes, and whether what it returned is one reward per completion.

It must return a list, tuple or one-dimensional array or tensor with exactly one entry per completion: a
number, or None where it does not apply. NaN counts as None and is reported once. Anything else is refused and
never broadcast: a single number, a wrong count, an (R, 1) tensor, a generator, infinity, text.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from agentrl.errors import RewardError
from agentrl.rollout.environments import as_number

logger = logging.getLogger(__name__)


class RewardFunction:
    """A reward function and what its signature says.

    Args:
        name: Its name in metrics, unique within a run.
        function: What the user gave, or a `RewardModel`.

    Attributes:
        accepts: The keywords it takes, None if it takes any.
        requires: The keywords it cannot do without.
        named: The keywords that it names.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.name = name
        self.function = function
        self.named = frozenset(p.name for p in named)
        self.accepts = None if takes_any else self.named
        self.requires = [p.name for p in named if p.default is p.empty]
        self._told_nan = False

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """The offered keywords that it takes; lists are copied, as functions may change theirs."""
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in offered.items()
            if self.accepts is None or name in self.accepts
        }

    def read(self, returned: Any, count: int) -> list[float | None]:
        """Check what it returned for `count` completions.

        Raises:
            RewardError: It is not one number or None per completion.
        """
        values = returned.tolist() if getattr(returned, "ndim", None) == 1 else returned
        if not isinstance(values, list | tuple) or len(values) != count:
            raise RewardError(
                f"the reward function {self.name!r} must return a list of {count} numbers, one per "
                f"completion, but returned {_shown(returned)}"
            )
        return [self._entry(index, value, count) for index, value in enumerate(values)]

    def _entry(self, index: int, value: Any, count: int) -> float | None:
        if value is None:
            return None
        number = as_number(value)
        if number is None or math.isinf(number):
            raise RewardError(
                f"the reward function {self.name!r} must return a list of {count} finite numbers or "
                f"None, but entry {index} is {reprlib.repr(value)}"
            )
        if not math.isnan(number):
            return number
        if not self._told_nan:
            self._told_nan = True
            logger.warning("the reward function %r returned NaN, which counts as None: no reward", self.name)
        return None


def distinct_names(names: Iterable[str], taken: Collection[str] = ()) -> list[str]:
    """Number the names that occur before or are taken: `f`, `f_2`, `f_3`.

    Example:
        >>> distinct_names(["f", "g", "f"])
        ['f', 'g', 'f_2']
    """
    used, distinct = set(taken), []
    for name in names:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        distinct.append(next(candidate for candidate in candidates if candidate not in used))
        used.add(distinct[-1])
    return distinct


def _shown(returned: Any) -> str:
    if hasattr(returned, "shape"):
        return f"a {type(returned).__name__} of shape {tuple(returned.shape)}"
    if isinstance(returned, list | tuple):
        return f"{len(returned)} entries"
    return f"{type(returned).__name__} {reprlib.repr(returned)}"
