"""A verifiers environment as a program that agentrl trains: used as its authors ship it, against the endpoint.

`verifiers_environment.py` starts it, with the interpreter that verifiers is installed for. It imports nothing of
agentrl. `rows ENVIRONMENT` writes the environment's data set, a line of JSON a row; `play ENVIRONMENT` plays the row
that comes on standard input, and writes its reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def correct(completion, answer) -> float:
    """1 if the last message says the answer."""
    return float(answer in (completion[-1].content or ""))


def sums() -> vf.Environment:
    """An environment to begin with: sums, and a tool for them."""
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in (17, 25) for b in (38, 46)]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[correct]), max_turns=4)


async def play(environment: vf.Environment, row: dict) -> float:
    """Play one rollout; the environment owns the loop, its rubric gives the reward."""
    endpoint = ClientConfig(
        api_base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        max_retries=0,  # a turn that was sampled is recorded; asking for it again would make another one
    )
    output = await environment.run_rollout(row, endpoint, "policy", {})
    if output.get("error"):
        raise RuntimeError(output["error"])
    return output["reward"]


def main() -> None:
    action, name = sys.argv[1:]
    environment = sums() if name == "sums" else vf.load_environment(name)
    if action == "rows":
        for row in environment.get_dataset():
            print(json.dumps(row))
    else:
        row = json.loads(json.load(sys.stdin)["columns"]["row"])
        print(asyncio.run(play(environment, row)))


if __name__ == "__main__":
    main()
