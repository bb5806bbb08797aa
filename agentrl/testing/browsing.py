"""A scripted policy that solves the shipped tasks of `agentrl.envs.browser`, with the tools that a model has.

It reads the instruction. It knows where things are from Playwright's view of the page, which no tool shows; what it
does there goes through the mouse and the keyboard.
"""

from __future__ import annotations

import random
import re
from typing import Any


async def solve(env: Any, task: str, instruction: str) -> int:
    """Play a task to its end on an environment that was reset; gives the number of actions."""
    agent = _Agent(env)
    await SCRIPTS[task](agent, instruction)
    return agent.actions


async def act_at_random(env: Any, rng: random.Random, actions: int) -> None:
    """Do anything, anywhere."""
    for _ in range(actions):
        x, y = rng.randrange(640), rng.randrange(480)
        choice = rng.randrange(6)
        if choice <= 2:
            await env.click(x, y)
        elif choice == 3:
            await env.type(rng.choice(["a", "42", "Ada", "\n"]))
        elif choice == 4:
            await env.scroll(0, rng.choice([-100, 100]))
        else:
            await env.drag(x, y, rng.randrange(640), rng.randrange(480))


class _Agent:
    def __init__(self, env: Any) -> None:
        self.env = env
        self.actions = 0

    def find(self, selector: str, text: str | None = None) -> Any:
        found = self.env.page.locator(f"{selector}:visible")
        return found if text is None else found.filter(has_text=re.compile(rf"^\s*{re.escape(text)}\W*$"))

    async def place(self, what: Any) -> tuple[int, int]:
        box = await what.bounding_box()
        return round(box["x"] + box["width"] / 2), round(box["y"] + box["height"] / 2)

    async def click(self, selector: str, text: str | None = None) -> None:
        self.actions += 1
        await self.env.click(*await self.place(self.find(selector, text)))

    async def type(self, text: str) -> None:
        self.actions += 1
        await self.env.type(text)


async def _form(agent: _Agent, instruction: str) -> None:
    ticket, name, city = _words(r"Order a (\w+) ticket for the name (\w+) and the city (\w+)", instruction)
    await agent.click("input[name=name]")
    await agent.type(name)
    await agent.click("input[name=city]")
    await agent.type(city)
    await agent.click(f"input[value={ticket}]")
    await agent.click("button")


async def _menu(agent: _Agent, instruction: str) -> None:
    for label in _words(r"Choose (\w+) > (\w+) > (\w+)", instruction):
        await agent.click("nav button", label)


async def _drag(agent: _Agent, instruction: str) -> None:
    (colour,) = _words(r"the (\w+) box", instruction)
    start = await agent.place(agent.find(f"[data-colour={colour}]"))
    agent.actions += 1
    await agent.env.drag(*start, *await agent.place(agent.find("#target")))


async def _table(agent: _Agent, instruction: str) -> None:
    asked, article = _words(r"(price|pieces|shelf).* article (\w+)", instruction)
    row = agent.env.page.locator("tr").filter(has_text=article)
    column = ["article", "price", "pieces", "shelf"].index(asked)
    await agent.click("input")
    await agent.type(await row.locator("td").nth(column).inner_text())
    await agent.click("button")


async def _popup(agent: _Agent, instruction: str) -> None:
    (month,) = _words(r"report of (\w+)", instruction)
    agent.actions += 2
    no = agent.find("#popup button").filter(has_text=re.compile("No thanks|Not now|Skip"))
    await agent.env.click(*await agent.place(no))
    await agent.env.click(*await agent.place(agent.find(".files div").filter(has_text=month).locator("button")))


async def _checkboxes(agent: _Agent, instruction: str) -> None:
    wanted = _words("Tick (.*) and nothing", instruction)[0].split(", ")
    boxes = agent.find("input")
    for index in range(await boxes.count()):
        box = boxes.nth(index)
        if (await box.get_attribute("name") in wanted) != await box.is_checked():
            agent.actions += 1
            await agent.env.click(*await agent.place(box))
    await agent.click("button")


async def _slider(agent: _Agent, instruction: str) -> None:
    name, goal = _words(r"Set (\w+) to (\d+)", instruction)
    slider = agent.find(f"input[name={name}]")
    box, thumb = await slider.bounding_box(), 16
    share = int(goal) / int(await slider.get_attribute("max"))
    await agent.env.click(
        round(box["x"] + thumb / 2 + (box["width"] - thumb) * share), round(box["y"] + box["height"] / 2)
    )
    agent.actions += 1
    away = int(goal) - int(await slider.input_value())  # by a step at most
    for _ in range(abs(away)):
        agent.actions += 1
        await agent.env.press("ArrowRight" if away > 0 else "ArrowLeft")
    await agent.click("button")


async def _search(agent: _Agent, instruction: str) -> None:
    (person,) = _words(r"Choose (\w+ \w+)", instruction)
    await agent.click("input")
    await agent.type(person)
    await agent.click("#list button")


def _words(pattern: str, instruction: str) -> tuple[str, ...]:
    match = re.search(pattern, instruction)
    assert match is not None, instruction
    return match.groups()


SCRIPTS = {
    "checkboxes": _checkboxes,
    "drag": _drag,
    "form": _form,
    "menu": _menu,
    "popup": _popup,
    "search": _search,
    "slider": _slider,
    "table": _table,
}
