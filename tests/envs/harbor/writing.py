"""Harbor tasks written by tests: the eighteen whose official verdicts are recorded, and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agentrl.envs.harbor import Fault

DOCKERFILE = "FROM agentrl-base:1\nWORKDIR /app\n"
HELLO = "echo hello > /app/out.txt"
GREP = "grep -q hello /app/out.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


def says(text: str, file: str = "reward.txt") -> str:
    """A test that writes this as the reward."""
    return f"printf '%s\\n' '{text}' > /logs/verifier/{file}"


def write_task(
    folder: Path,
    toml: str = "",
    test: str = GREP,
    *,
    dockerfile: str | None = DOCKERFILE,
    instruction: str = "<!-- harbor-canary GUID 1 -->\n\nWrite hello to out.txt.\n",
    steps: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a task: its test, or one for each of its steps."""
    content = {"task.toml": f'schema_version = "1.4"\n{toml}\n', **(files or {})}
    if dockerfile is not None:
        content["environment/Dockerfile"] = dockerfile
    if steps is None:
        content |= {"instruction.md": instruction, "tests/test.sh": f"#!/bin/bash\n{test}\n"}
    for name, step in (steps or {}).items():
        content[f"steps/{name}/instruction.md"] = f"Do {name}."
        content[f"steps/{name}/tests/test.sh"] = f"#!/bin/bash\n{step}\n"
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Known(NamedTuple):
    """A task whose official verdict (harbor 0.26.0 with its oracle agent) is known.

    Attributes:
        toml: Its `task.toml`.
        test: The test, or one for each of the steps `s1` and `s2`.
        acts: What the agent runs, in each step.
        rewards: The official rewards.
        error: The official exception.
        fault: What that is here.
        dockerfile: Its Dockerfile.
    """

    toml: str
    test: str | Sequence[str]
    acts: Sequence[str] = (HELLO,)
    rewards: Mapping[str, float] | None = None
    error: str | None = None
    fault: Fault | None = None
    dockerfile: str = DOCKERFILE

    def write(self, folder: Path) -> Path:
        if isinstance(self.test, str):
            return write_task(folder, self.toml, self.test, dockerfile=self.dockerfile)
        steps = {f"s{number}": test for number, test in enumerate(self.test, 1)}
        return write_task(folder, self.toml, dockerfile=self.dockerfile, steps=steps)


ONE = {"reward": 1.0}
STEPS = '\n[[steps]]\nname = "s1"\nmin_reward = 0.5\n[[steps]]\nname = "s2"'
HEALTH = '[environment.healthcheck]\ncommand = "test -f /ready"\ninterval_sec = 0.2\ntimeout_sec = 2\nretries = 2'
LIMITS = '[environment]\nmemory_mb = 256\ncpus = 0.5\nnetwork_mode = "no-network"\n[metadata]\ndifficulty = "easy"'
UNREADABLE = ("VerifierOutputParseError", Fault.REWARD_UNREADABLE)

KNOWN = {
    "ok": Known(LIMITS, GREP, rewards=ONE),
    "json": Known(
        "",
        says('{"reward": 0.5, "style": 1, "flag": true}', "reward.json") + f"; {says('1')}; exit 7",
        rewards={"reward": 0.5, "style": 1, "flag": 1.0},
    ),
    "json-noreward-key": Known(
        "", says('{"accuracy": 0.25, "style": 1}', "reward.json"), rewards={"accuracy": 0.25, "style": 1}
    ),
    "json-list": Known("", says("[1]", "reward.json"), (HELLO,), None, *UNREADABLE),
    "json-scalar": Known("", says("1", "reward.json"), (HELLO,), None, "ValidationError", Fault.REWARD_UNREADABLE),
    "noreward": Known("", "exit 1", (HELLO,), None, "RewardFileNotFoundError", Fault.REWARD_MISSING),
    "empty": Known("", ": > /logs/verifier/reward.txt", (HELLO,), None, "RewardFileEmptyError", Fault.REWARD_EMPTY),
    "nan": Known("", says("nan"), (HELLO,), None, *UNREADABLE),
    "garbage": Known("", says("pass"), (HELLO,), None, *UNREADABLE),
    "vtimeout": Known(
        "[verifier]\ntimeout_sec = 2",
        f"sleep 600; {says('1')}",
        (HELLO,),
        None,
        "VerifierTimeoutError",
        Fault.VERIFIER_TIMEOUT,
    ),
    "atimeout": Known("[agent]\ntimeout_sec = 5", GREP, (f"{HELLO}; sleep 600",), ONE, "AgentTimeoutError"),
    "stale": Known(
        "",
        "exit 0",
        (f"mkdir -p /logs/verifier; {says('1')}",),
        None,
        "RewardFileNotFoundError",
        Fault.REWARD_MISSING,
    ),
    "oom": Known(
        "[environment]\nmemory_mb = 64", GREP, ("python3 -c 'x = bytearray(300 << 20)'; exit $?",), {"reward": 0.0}
    ),
    "health": Known(HEALTH, GREP, (HELLO,), None, "HealthcheckError", Fault.HEALTHCHECK),
    "badbuild": Known(
        "", GREP, (HELLO,), None, "BuildError", Fault.BUILD, dockerfile="FROM agentrl-base:1\nRUN exit 3\n"
    ),
    "separate": Known(
        '[[artifacts]]\nsource = "/app/out.txt"\n[verifier]\nenvironment_mode = "separate"', GREP, rewards=ONE
    ),
    "multi": Known(
        f'multi_step_reward_strategy = "mean"{STEPS}', (GREP, says("0")), (HELLO, "true"), rewards={"reward": 0.5}
    ),
    "multi-gate": Known(
        f'multi_step_reward_strategy = "final"{STEPS}', (says("0.25"), GREP), ("true", "true"), rewards={"reward": 0.25}
    ),
}
