"""OpenEnv servers of openenv itself, with environments of ours; run by the interpreter of `make servers`.

Each answers `GET /sessions` with how many sessions it holds and how many environments were made and closed.
`POST /release` ends every step that hangs.
"""

import os
import random
import threading
import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
from pydantic import Field, RootModel, field_validator
from serving import nursery


class Counted:
    """Knows how many of its kind there are, and that it was closed."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    made = 0
    ended = 0

    def count(self) -> None:
        type(self).made += 1
        self.closed = False
        self._state = State()

    def begin(self, episode_id: str | None) -> None:
        self._state = State(episode_id=episode_id)

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        if not self.closed:
            type(self).ended += 1
        self.closed = True


class Guess(Action):
    """Guess the number."""

    number: int = Field(description="The guess.", ge=0)


class Hint(Observation):
    text: str = ""


class GuessNumber(Counted, Environment):
    """The number is drawn from the seed; the reward is 1 for the right guess, which ends the episode."""

    highest = 9

    def __init__(self) -> None:
        super().__init__()
        self.count()

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int | None = None) -> Hint:
        self.begin(episode_id)
        self.number = random.Random(seed).randint(0, highest or self.highest)
        return Hint(text=f"Guess my number between 0 and {highest or self.highest}.")

    def step(self, action: Guess) -> Hint:
        self._state.step_count += 1
        if action.number == self.number:
            return Hint(text="correct", done=True, reward=1.0)
        return Hint(text="higher" if self.number > action.number else "lower", reward=0.0)


class Digit(GuessNumber):
    """Which digit is right does not depend on the seed: something that can be learnt without reading."""

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Hint:
        hint = super().reset(seed, episode_id)
        self.number = 3
        return hint


class Move(Action):
    """Walk a step."""

    kind: Literal["move"] = "move"
    direction: Literal["left", "right"] = Field(description="Where to.")


class Take(Action):
    """Take what lies here."""

    kind: Literal["take"] = "take"


class MoveOrTake(RootModel[Annotated[Move | Take, Field(discriminator="kind")]]):
    pass


class Place(Observation):
    position: int
    items: list[str]


class Corridor(Counted, Environment):
    """A lamp lies one step to the right; each step costs 0.1, the lamp is worth 1."""

    def __init__(self) -> None:
        super().__init__()
        self.count()

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Place:
        self.begin(episode_id)
        self.position = 0
        return self.place()

    def place(self, **ending: Any) -> Place:
        return Place(position=self.position, items=["lamp"] if self.position == 1 else [], **ending)

    def step(self, action: MoveOrTake) -> Place:
        if isinstance(action.root, Move):
            self.position += 1 if action.root.direction == "right" else -1
            return self.place(reward=-0.1)
        return self.place(reward=1.0, done=True) if self.position == 1 else self.place(reward=0)


class Shelf(Counted, MCPEnvironment):
    """Tools of an MCP server; the reward is 1 for the right book, which ends the episode."""

    def __init__(self) -> None:
        tools = FastMCP("shelf")

        @tools.tool
        def look_up(title: str, shelf: int = 1) -> str:
            """Look a book up."""
            if title == "?":
                raise ValueError("a title has more than one letter")
            return f"{title} stands on shelf {shelf}"

        @tools.tool
        def borrow(title: str) -> dict[str, str]:
            """Borrow a book."""
            return {"borrowed": title}

        super().__init__(tools)
        self.count()

    def reset(self, seed: int | None = None, episode_id: str | None = None, wanted: str = "Emma") -> Observation:
        self.begin(episode_id)
        self.wanted = wanted
        return Observation(metadata={"shelves": 3})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise TypeError(f"no such action: {action}")

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.tool_name == "borrow" and observation.error is None:
            observation.done = True
            observation.reward = float(action.arguments.get("title") == self.wanted)
        return observation

    def close(self) -> None:
        Counted.close(self)
        MCPEnvironment.close(self)


class Trouble(Action):
    """Do something that goes wrong."""

    what: Literal["sleep", "wait", "raise", "exit", "big", "nan", "add"]
    amount: float = Field(default=1.0, ge=0)

    @field_validator("amount")
    @classmethod
    def not_unlucky(cls, amount: float) -> float:
        if amount == 13:
            raise ValueError("unlucky")
        return amount


class Report(Observation):
    closed: bool
    text: str = ""


RELEASED = threading.Event()
"""Ends what hangs: `POST /release` sets it."""


class Troubled(Counted, Environment):
    """Does what it is told: sleeps, hangs, raises, dies, answers at length; tells whether it was closed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.count()

    def reset(self, seed: int | None = None, episode_id: str | None = None, trouble: str = "") -> Report:
        if trouble == "raise":
            raise RuntimeError("reset is broken")
        self.begin(episode_id)
        return Report(closed=self.closed, text="What is the trouble?")

    def step(self, action: Trouble) -> Report:
        match action.what:
            case "sleep":
                time.sleep(action.amount)
            case "wait":
                RELEASED.wait()
            case "raise":
                raise RuntimeError("the environment raised")
            case "exit":
                os._exit(3)
            case "big":
                return Report(closed=self.closed, text="x" * int(action.amount))
            case "nan":
                return Report(closed=self.closed, reward=float("nan"))
        return Report(closed=self.closed, reward=action.amount)


WORLDS = {
    "guess": (GuessNumber, Guess, Hint),
    "digit": (Digit, Guess, Hint),
    "corridor": (Corridor, MoveOrTake, Place),
    "shelf": (Shelf, CallToolAction, CallToolObservation),
    "trouble": (Troubled, Trouble, Report),
}


def world(name: str):
    """A function that makes the application of a world."""
    environment, action, observation = WORLDS[name]

    def make(sessions: int = 4, session_timeout: float | None = None, broken: bool = False) -> FastAPI:
        def factory() -> Environment:
            if broken:
                raise RuntimeError("cannot be made")
            return environment()

        concurrency = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=session_timeout)
        factory.SUPPORTS_CONCURRENT_SESSIONS = True
        chosen = factory if broken else environment
        if broken:
            concurrency = ConcurrencyConfig(max_concurrent_envs=1)
        server = HTTPEnvServer(chosen, action, observation, concurrency_config=concurrency, env_name=name)
        app = FastAPI()
        server.register_routes(app, mode="simulation")

        @app.get("/sessions")
        def sessions_now() -> dict[str, int]:
            return {"open": server.active_sessions, "made": environment.made, "closed": environment.ended}

        @app.post("/release")
        def release() -> None:
            RELEASED.set()

        @app.post("/reap")
        async def reap() -> None:
            """End all sessions as the reaper of idle ones does, which looks for them every 5 s at most."""
            for session in list(server._sessions):
                await server._destroy_session(session)

        return app

    return make


if __name__ == "__main__":
    nursery({name: world(name) for name in WORLDS})
