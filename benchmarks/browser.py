"""What the browser environment costs, and that a scripted policy solves its tasks.

- scripted: `--episodes` episodes over all shipped tasks, by `agentrl.testing.browsing`; every one must earn 1.
- random: as many, of five actions anywhere; what they earn is what chance earns.
- a screenshot, a click (action, wait, screenshot) and a reset: medians, one episode at a time.
- processes: started by the browser, and left when the last environment was closed; must be none.

`--parallel` episodes share the browser. Exits with 1 when an episode was not solved or a process is left.

    python benchmarks/browser.py [--episodes 100] [--parallel 2] [--repeats 50] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from agentrl.envs import Browser
from agentrl.errors import ConfigurationError
from agentrl.testing.browsing import act_at_random, solve

Play = Callable[[Any, str, str, int], Awaitable[int]]


async def scripted(env: Any, task: str, instruction: str, seed: int) -> int:
    return await solve(env, task, instruction)


async def at_random(env: Any, task: str, instruction: str, seed: int) -> int:
    await act_at_random(env, random.Random(seed), 5)
    return 5


async def episodes(browser: Browser, play: Play, options: argparse.Namespace) -> tuple[list[float], float]:
    """Rewards, and actions a second."""
    work = iter(range(options.episodes))
    rewards: list[float] = []
    actions = 0

    async def player() -> None:
        nonlocal actions
        env = browser()
        for number in work:
            task = browser.names[number % len(browser.names)]
            text, _ = await env.reset(task=task, seed=number)
            actions += await play(env, task, text["text"], number)
            rewards.append(await env.get_reward())
        await env.close()

    start = time.perf_counter()
    await asyncio.gather(*(player() for _ in range(options.parallel)))
    return rewards, actions / (time.perf_counter() - start)


async def median(repeats: int, work: Callable[[], Awaitable[Any]]) -> float:
    """Milliseconds; the first time does not count."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        await work()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def measure(browser: Browser, options: argparse.Namespace) -> bool:
    solved, rate = await episodes(browser, scripted, options)
    print(f"scripted    {sum(solved):.0f} of {len(solved)} solved, {rate:.1f} actions a second")
    lucky, rate = await episodes(browser, at_random, options)
    print(f"random      {sum(lucky):.0f} of {len(lucky)} solved, {rate:.1f} actions a second")
    env = browser()
    print(f"reset       {await median(options.repeats, lambda: env.reset(task='form', seed=0)):.0f} ms")
    print(f"screenshot  {await median(options.repeats, env.screenshot):.0f} ms")
    print(f"click       {await median(options.repeats, lambda: env.click(300, 95)):.0f} ms")
    started = len(processes())
    await env.close()
    left = processes()
    print(f"processes   {started} at work, {len(left)} left")
    return sum(solved) == len(solved) and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.repeats = 4, 2
    try:
        browser = Browser()
    except ConfigurationError as error:
        print(f"left out: {error}")
        return
    sys.exit(not asyncio.run(measure(browser, options)))


if __name__ == "__main__":
    main()
