"""Tasks that are pages: each writes its own instruction and checks its own success.

A page is plain HTML with scripts. Before its own scripts run, `window.agentrl` is there (init.js) with functions that
draw from the episode's seed: `integer(low, high)`, `pick(list)`, `shuffle(list)`. The page leaves two things in it:

- `agentrl.instruction`, what the model is told;
- `agentrl.success`, a function: whether the task is done as the page now is.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from datasets import Dataset

from agentrl.envs.browser.chromium import Chromium
from agentrl.envs.browser.environment import BrowserEnvironment
from agentrl.envs.browser.origins import PAGES
from agentrl.errors import ConfigurationError, EnvironmentFailure


class BrowserTask(BrowserEnvironment):
    """One page to do something on; made by `Browser`. The reward is 1 if it is done in the end, else 0."""

    def __init__(self, chromium: Chromium, names: Sequence[str], timeout: float) -> None:
        super().__init__(chromium, timeout=timeout)
        self._names = names
        self._url = ""

    async def reset(self, task: str | None = None, seed: int = 0) -> Any:
        """Open a task's page, drawn from the seed; without a name also the task is.

        Returns:
            The page's instruction and how it looks.
        """
        if task is None:
            task = random.Random(seed).choice(self._names)
        if task not in self._names:
            raise EnvironmentFailure(f"there is no task {task!r}; the column `task` must name one of {self._names}")
        self._url = f"{PAGES}/{quote(task)}.html"
        look = await super().reset(self._url, seed)
        instruction = await self._run(lambda page: page.evaluate("agentrl.instruction"))
        if not isinstance(instruction, str) or not instruction:
            raise EnvironmentFailure(f"the page {task}.html left no text in `agentrl.instruction`")
        return [{"type": "text", "text": instruction}, *look]

    async def get_reward(self) -> float:
        """1.0 if the task's page is still there and says that it is done, else 0.0."""
        if self.page.url.partition("#")[0] != self._url:
            return 0.0
        return float(await self._run(lambda page: page.evaluate("agentrl.success() === true")))


class Browser:
    """A factory of environments in which the model does a task on a page: `environment_factory=Browser()`.

    All instances share one Chromium.

    Args:
        pages: A folder of your own pages, one `NAME.html` for each task; the shipped ones by default.
        timeout: Seconds that one action may take until the browser counts as broken.
        **chromium: Arguments of `Chromium`: origins, executable, width, height, sandbox.

    Raises:
        ConfigurationError: Playwright or Chromium is not installed, or an argument makes no sense.
    """

    def __init__(self, pages: Path | str | None = None, *, timeout: float = 30.0, **chromium: Any) -> None:
        if pages is None:
            with as_file(files("agentrl.envs.browser") / "pages") as shipped:
                self._chromium = Chromium(shipped, **chromium)
        else:
            self._chromium = Chromium(pages, **chromium)
        self._timeout = timeout
        self.names = tuple(sorted(name[:-5] for name in self._chromium.files if name.endswith(".html")))
        if not self.names:
            raise ConfigurationError(f"the folder {pages} has no page NAME.html")

    def __call__(self) -> BrowserTask:
        """An environment; it has no page before its first `reset`."""
        return BrowserTask(self._chromium, self.names, self._timeout)

    def tasks(self, names: Iterable[str] | None = None, *, repeat: int = 1) -> Dataset:
        """A dataset with the column `task`. The seed of each rollout's group decides how its page is drawn.

        Args:
            names: Which tasks; all by default.
            repeat: How often each occurs.

        Raises:
            ConfigurationError: There is no task of a name.
        """
        wanted = self.names if names is None else tuple(names)
        if unknown := sorted(set(wanted) - set(self.names)):
            raise ConfigurationError(f"there are no tasks {unknown}; there are {list(self.names)}")
        return Dataset.from_dict({"task": list(wanted) * repeat})
