"""ORS servers of openreward itself, with environments of ours; run by the interpreter of `make servers`.

`GET /health/sessions` tells how many sessions are open, how often a tool ran, how long the session that was silent for
longest has been so, and the headers of the last `/create`.
"""

import asyncio
import base64
import io
import os
import time
from typing import Any

import openreward.environments.server as implementation
from fastapi import Request
from openreward.environments import Environment, ImageBlock, Server, Split, TextBlock, ToolOutput, terminal, tool
from openreward.environments.types import ListToolsOutput, ToolSpec
from PIL import Image
from pydantic import BaseModel, Field
from serving import nursery

RAN: list[str] = []
"""Tools that ran, in order."""


def said(text: str, reward: float | None = None, finished: bool = False) -> ToolOutput:
    return ToolOutput(blocks=[TextBlock(text=text)], reward=reward, finished=finished)


def picture(color: str) -> ImageBlock:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(file, "PNG")
    return ImageBlock(data=base64.b64encode(file.getvalue()).decode(), mimeType="image/png")


class Number(BaseModel):
    number: int = Field(description="The guess.", ge=0)


class Guess(Environment):
    """The right guess is worth 1 and ends the episode; a warm one 0.25."""

    @classmethod
    def list_splits(cls):
        return [Split(name="train", type="train"), "hard"]

    @classmethod
    def list_tasks(cls, split: str):
        count = {"train": 12, "hard": 3}[split]
        return [{"number": i % 10, "clues": {f"clue {i}": [i, None]}} for i in range(count)]

    def get_prompt(self):
        return [TextBlock(text="Guess my number"), TextBlock(text=" between 0 and 9.")]

    @tool
    def guess(self, args: Number) -> ToolOutput:
        """Guess the number."""
        RAN.append("guess")
        number = self.task_spec["number"]
        if args.number == number:
            return said("correct", 1.0, True)
        return said("higher" if number > args.number else "lower", 0.25 if abs(number - args.number) == 1 else None)

    @tool
    def give_up(self) -> ToolOutput:
        """Give up."""
        RAN.append("give_up")
        return said("a pity", -0.5, True)


class Digit(Guess):
    """Which digit is right does not depend on the task: something that can be learnt without reading."""

    @classmethod
    def list_tasks(cls, split: str):
        return [{"number": 3, "id": i} for i in range(12)]


class Answer(BaseModel):
    answer: str = Field(max_length=40)


class Quiz(Environment):
    """The final answer is graded by a terminal tool; a look into the book costs 0.1."""

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str):
        return [{"question": f"{i} + {i}?", "answer": str(i + i)} for i in range(4)]

    def get_prompt(self):
        return [TextBlock(text=self.task_spec["question"])]

    @tool
    def look_up(self) -> ToolOutput:
        """Look into the book."""
        RAN.append("look_up")
        return said(self.task_spec["answer"], -0.1)

    @terminal
    @tool
    def submit(self, args: Answer) -> ToolOutput:
        """Grade the answer."""
        RAN.append(f"submit {args.answer}")
        return said("graded", float(args.answer == self.task_spec["answer"]), True)


class Item(BaseModel):
    name: str
    count: int = 1


class Order(BaseModel):
    items: list[Item]
    notes: dict[str, str] = {}


class Gallery(Environment):
    """Images in prompt and results, nested arguments, and tools that only some tasks have."""

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str):
        return [{"extra": "dig"}, {"extra": "fly"}]

    def get_prompt(self):
        return [TextBlock(text="What is this?"), picture("red")]

    @tool
    def order(self, args: Order) -> ToolOutput:
        """Order several items."""
        return said(" ".join(f"{item.count}x{item.name}" for item in args.items), 0.5)

    @tool
    def look(self) -> ToolOutput:
        return ToolOutput(blocks=[TextBlock(text="here: "), picture("blue")])

    def list_task_tools(self):
        extra = self.task_spec["extra"]
        return ListToolsOutput(tools=[ToolSpec(name=extra, description=f"Can {extra}.", input_schema=None)])

    @tool(shared=False)
    def dig(self) -> ToolOutput:
        return said("a hole", 1.0)

    @tool(shared=False)
    def fly(self) -> ToolOutput:
        return said("a cloud", 1.0)


class Trouble(BaseModel):
    what: str
    amount: float = Field(1.0, le=1e6)


class Troubled(Environment):
    """Does what it is told: sleeps, raises, dies, answers at length. Setting a task up can be trouble too."""

    def __init__(self, task_spec=None, secrets=None) -> None:
        super().__init__(task_spec or {}, secrets or {})
        time.sleep(self.task_spec.get("construct", 0))

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str):
        return [{}]

    async def setup(self) -> None:
        if self.task_spec.get("setup") == "raise":
            raise RuntimeError("setup exploded")
        await asyncio.sleep(self.task_spec.get("setup", 0))

    def get_prompt(self):
        return [TextBlock(text="What is the trouble?")]

    @tool
    async def do(self, args: Trouble) -> ToolOutput:
        """Make trouble."""
        RAN.append(args.what)
        match args.what:
            case "sleep":
                await asyncio.sleep(args.amount)
            case "raise":
                raise RuntimeError("the tool\nexploded")
            case "exit":
                os._exit(3)
            case "nonsense":
                return "no ToolOutput"  # type: ignore[return-value]
            case "spaces":
                return said(spaces(int(args.amount)), 1.0)
            case "accents":
                return said("é" * int(args.amount), 1.0)
            case "nan":
                return said("not a number", float("nan"))
        return said("done", args.amount)


def spaces(count: int) -> str:
    """Text that is mostly spaces, so that pieces of 4096 characters begin and end with some."""
    return "".join("x" if i % 97 == 0 else " " for i in range(count))


WORLDS = {"guess": Guess, "digit": Digit, "quiz": Quiz, "gallery": Gallery, "troubled": Troubled}


def world(name: str):
    """A function that makes the application of a world."""

    def make(setup_wait: float | None = None, beside: str | None = None) -> Any:
        if setup_wait is not None:
            implementation._SETUP_WAIT_TIMEOUT_S = setup_wait
            implementation._SETUP_WAIT_RETRY_AFTER_S = 1
        server = Server([WORLDS[name], *([WORLDS[beside]] if beside else [])])
        headers: dict[str, str] = {}

        @server.app.get("/health/sessions")  # a path below /health, for others are redirected to an environment
        async def sessions() -> dict[str, Any]:
            silent = [time.monotonic() - when for when in server._last_ping.values()]
            return {"open": len(server._active_envs), "ran": RAN, "silent": max(silent, default=0), "headers": headers}

        @server.app.middleware("http")
        async def remember(request: Request, go_on: Any) -> Any:
            if request.url.path == "/create":
                headers.update(request.headers)
            return await go_on(request)

        return server.app

    return make


if __name__ == "__main__":
    nursery({name: world(name) for name in WORLDS})
