"""`ORS` against openreward's own server: tasks, prompts, tools, rewards, endings, and the life of sessions."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import agentrl.envs
from agentrl.envs import ORS
from agentrl.envs.ors.environment import ORSEnvironment
from agentrl.errors import ConfigurationError, EnvironmentFailure, EpisodeDone
from agentrl.rollout.limits import Limits
from agentrl.types import Limit, Outcome
from tests.envs.ors_play import Stage, contents, play, state, use
from tests.envs.proxy import Proxy
from tests.waiting import eventually, skip, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def guess(ors_nursery):
    server = ors_nursery.start("guess", beside="digit")
    yield server
    server.kill()


def task_of(ors: ORS, index: int, split: str = "train") -> dict[str, Any]:
    return json.loads(ors.tasks(split, indices=[index])[0]["task"])


def test_the_package_offers_it_by_name() -> None:
    assert agentrl.envs.ORS is ORS
    assert "ORS" in dir(agentrl.envs)


# --- tasks ---


def test_tasks_come_as_a_dataset_by_split_index_and_range(guess) -> None:
    ors = ORS(url=guess.url, env="Guess", split="train")
    assert ors.tasks()["index"] == list(range(12))
    assert ors.tasks("train", indices=range(3, 6))["index"] == [3, 4, 5]
    some = ors.tasks("hard", indices=[2, 0])
    assert (some["split"], some["index"]) == (["hard"] * 2, [2, 0])
    assert [json.loads(task)["number"] for task in some["task"]] == [2, 0]


def test_a_task_survives_the_dataset_exactly(guess) -> None:
    """Arrow would give all structs the same keys and fill them with nulls."""
    tasks = ORS(url=guess.url, env="guess").tasks("train")
    assert json.loads(tasks[4]["task"]) == {"number": 4, "clues": {"clue 4": [4, None]}}


def test_many_tasks_are_asked_for_in_pages(guess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.envs.ors.tasks.PAGE", 5)
    tasks = ORS(url=guess.url, env="guess").tasks("train")
    assert [json.loads(task)["number"] for task in tasks["task"]] == [i % 10 for i in range(12)]


@pytest.mark.parametrize(
    ("env", "split", "indices", "message"),
    [
        (None, "train", None, r"env=None: the ORS server at .* has \['digit', 'guess'\]"),
        ("chess", "train", None, r"env='chess': .* has \['digit', 'guess'\]"),
        ("guess", "easy", None, r"split='easy': the environment has \['train', 'hard'\]"),
        ("guess", None, None, r"split=None: the environment has"),
        ("guess", "hard", [0, 3, -1], r"indices \[3, -1\] are not among the 3 tasks"),
    ],
)
def test_what_the_server_has_not_is_named(guess, env, split, indices, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ORS(url=guess.url, env=env).tasks(split, indices=indices)


def test_a_server_that_is_not_there_is_an_error_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.envs.ors.client.ATTEMPTS", 1)
    with pytest.raises(ConfigurationError, match="cannot be reached"):
        Stage(ORS(url="http://127.0.0.1:1"))


def test_a_dataset_without_tasks_is_an_error(guess) -> None:
    stage = Stage(ORS(url=guess.url, env="guess"))
    try:
        with pytest.raises(ConfigurationError, match=r"ORSEnvironment.reset needs \['task'\]"):
            stage.engine.environments.check_columns(["prompt"])
    finally:
        stage.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"name": "a/b", "url": "http://x"},
        {"name": "http://x"},
        {"name": "a/b/c"},
        {"name": "a/b", "api_key": "k", "api_key_hosts": ["x"]},
        {"url": "x.org"},
        {"url": "ftp://x.org"},
        {"url": "http://user:word@x.org"},
        {"url": "http://x", "reward": "mean"},
        {"url": "http://x", "call_timeout": float("nan")},
        {"url": "http://x", "ping_interval": 0},
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ORS(**arguments)


# --- episodes ---


def test_an_episode_from_the_prompt_to_finished(guess) -> None:
    """G14: `finished` ends the episode, and the reward is there."""
    ors = ORS(url=guess.url, env="guess")
    trajectory = play(ors, use("guess", number=5), use("guess", number=4), task=task_of(ors, 4))
    assert trajectory.prompt == [{"role": "user", "content": "Guess my number between 0 and 9."}]
    assert trajectory.outcome is Outcome.ENV_DONE
    assert contents(trajectory) == ["lower", "correct"]
    assert trajectory.reward == 1.25
    assert state(guess)["open"] == 0


@pytest.mark.parametrize(("how", "reward"), [("sum", 1.25), ("last", 1.0)])
def test_rewards_are_summed_or_the_last_one_counts(guess, how: str, reward: float) -> None:
    ors = ORS(url=guess.url, env="guess", reward=how)
    says = use("guess", number=9), use("guess", number=5), use("guess", number=4)  # none, 0.25, 1
    assert play(ors, *says, task=task_of(ors, 4)).reward == reward
    assert play(ors, "no idea", task=task_of(ors, 4)).reward == 0.0


def test_the_calls_of_a_turn_run_in_order_and_none_after_the_end(guess) -> None:
    ors = ORS(url=guess.url, env="guess")
    before = state(guess)["ran"]
    both = use("guess", number=4) + use("give_up")
    trajectory = play(ors, both, task=task_of(ors, 4))
    assert trajectory.outcome is Outcome.ENV_DONE
    assert contents(trajectory) == ["correct", "Error: ValueError: the episode is over; the call was not made"]
    assert trajectory.reward == 1.0
    assert state(guess)["ran"] == [*before, "guess"]


def test_what_the_model_got_wrong_is_told_to_the_model(guess) -> None:
    """Unknown tools and wrong arguments: the session goes on."""
    ors = ORS(url=guess.url, env="guess")
    says = use("guess", number=-1), use("chess"), use("guess"), use("guess", number=4)
    trajectory = play(ors, *says, task=task_of(ors, 4))
    first, second, third, last = (result for turn in trajectory.turns for result in turn.results)
    assert first.failed
    assert "greater than or equal to 0" in first.content
    assert second.failed
    assert "no tool named 'chess'" in second.content
    assert third.failed
    assert "'number' is missing" in third.content
    assert (last.failed, last.content, trajectory.reward) == (False, "correct", 1.0)


@pytest.mark.parametrize("number", ["NaN", "1e999", '"\\ud800"'])
def test_arguments_that_no_json_carries_are_the_models_mistake(guess, number: str) -> None:
    ors = ORS(url=guess.url, env="guess")
    environment = ors()

    async def episode() -> None:
        await environment.reset(json.dumps({"number": 4}))
        with pytest.raises(ValueError, match=r"(?i)json|surrogate"):
            await environment.call_tool("guess", {"number": json.loads(number)})
        with pytest.raises(EpisodeDone):
            await environment.call_tool("guess", {"number": 4})
        assert await environment.get_reward() == 1.0

    asyncio.run(episode())


def test_the_final_answer_goes_to_the_terminal_tool(ors_nursery) -> None:
    server = ors_nursery.start("quiz")
    try:
        ors = ORS(url=server.url)
        right = play(ors, use("look_up"), "4", task=task_of(ors, 2))
        assert (right.outcome, right.reward) == (Outcome.FINISHED, pytest.approx(0.9))
        assert [schema["function"]["name"] for schema in ors().tool_schemas] == ["look_up"]
        assert play(ors, "5", task=task_of(ors, 2)).reward == 0.0
        too_long = play(ors, use("look_up"), "4" * 50, task=task_of(ors, 2))
        assert (too_long.outcome, too_long.reward) == (Outcome.FINISHED, pytest.approx(-0.1))
        assert state(server)["ran"] == ["look_up", "submit 4", "submit 5", "look_up"]
        cut = play(ors, use("look_up"), "4", task=task_of(ors, 2), limits=Limits(max_tool_iterations=0))
        assert (cut.outcome, cut.limit, cut.reward) == (Outcome.TRUNCATED, Limit.TOOL_ITERATIONS, 0.0)
        assert len(state(server)["ran"]) == 4, "an episode that was cut has no final answer"
        assert state(server)["open"] == 0
    finally:
        server.kill()


def test_images_task_tools_and_nested_arguments(ors_nursery) -> None:
    """G06: a task's tools are those of its session."""
    server = ors_nursery.start("gallery")
    try:
        ors = ORS(url=server.url)
        asyncio.run(_visit_gallery(ors()))
        assert state(server)["open"] == 0
    finally:
        server.kill()


async def _visit_gallery(environment: ORSEnvironment) -> None:
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["look", "order"]
    prompt = await environment.reset('{"extra": "dig"}')
    assert prompt[0] == {"type": "text", "text": "What is this?"}
    assert isinstance(prompt[1]["image"], Image.Image)
    assert prompt[1]["image"].getpixel((0, 0)) == (255, 0, 0)
    schemas = {schema["function"]["name"]: schema["function"] for schema in environment.tool_schemas}
    assert set(schemas) == {"look", "order", "dig"}
    assert schemas["order"]["parameters"]["$defs"]["Item"]["required"] == ["name"]
    assert schemas["look"]["description"] == "look", "a tool without a docstring has its name for one"

    told = await environment.call_tool("order", {"items": [{"name": "lamp", "count": 2}, {"name": "rug"}]})
    assert told == "2xlamp 1xrug"
    here, image = await environment.call_tool("look", {})
    assert (here, image["image"].size) == ({"type": "text", "text": "here: "}, (4, 3))
    assert await environment.call_tool("dig", {}) == "a hole"
    assert await environment.get_reward() == 1.5

    await environment.reset('{"extra": "fly"}')
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["look", "order", "fly"]
    await environment.close()


# --- sessions ---


def test_a_session_is_kept_alive_while_the_model_thinks(start_ors) -> None:
    server = start_ors("guess")
    environment = ORS(url=server.url, ping_interval=0.1)()

    silent: list[float] = []

    def heard() -> bool:
        """Whether the server's time without a word from us has begun anew."""
        silent.append(state(server)["silent"])
        return any(after < before for before, after in itertools.pairwise(silent))

    async def think() -> None:
        await environment.reset('{"number": 4}')
        await eventually(heard)
        await environment.close()

    asyncio.run(think())
    assert state(server)["open"] == 0


def test_eight_rollouts_at_once_have_sessions_of_their_own(start_ors) -> None:
    server = start_ors("guess")
    stage = Stage(ORS(url=server.url))
    try:
        for _ in range(2):
            trajectories = stage.play(use("guess", number=5), use("guess", number=4), task={"number": 4}, count=8)
            assert [trajectory.reward for trajectory in trajectories] == [1.25] * 8
            assert state(server)["open"] == 0
    finally:
        stage.close()


def test_a_slow_setup_is_waited_for(start_ors) -> None:
    """The real server's 503 with `X-Backend-State: starting`, after 0.2 s here instead of 25."""
    server = start_ors("troubled", setup_wait=0.2)
    trajectory = play(ORS(url=server.url), use("do", what="add", amount=2), "done", task={"setup": 0.7})
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 2.0)
    assert state(server)["open"] == 0


@pytest.mark.parametrize("where", ["construct", "setup"])
def test_a_rollout_cancelled_while_its_session_opens_leaves_none(start_ors, where: str) -> None:
    """G09: the server makes the session even if nobody waits for it any more, so it is deleted after that."""
    server = start_ors("troubled")

    async def cancelled() -> None:
        environment = ORS(url=proxy.url)()
        opening = asyncio.create_task(environment.reset(json.dumps({where: 3})))
        await eventually(lambda: any(path.endswith("/create") for path in proxy.paths()))
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await environment.close()

    with Proxy(server.port) as proxy:
        asyncio.run(cancelled())
    assert state(server)["open"] == 0


def test_a_rollout_that_runs_out_of_time_in_a_call_keeps_what_it_earned(start_ors) -> None:
    server = start_ors("troubled")

    def let_time_run_out(loop: asyncio.AbstractEventLoop) -> None:
        wait_until(lambda: state(server)["ran"] == ["add", "sleep"])
        skip(loop, 600)

    def call_what_hangs() -> str:
        threading.Thread(target=let_time_run_out, args=[asyncio.get_running_loop()]).start()
        return use("do", what="sleep", amount=600)

    says = use("do", what="add", amount=2), call_what_hangs, "done"
    trajectory = play(ORS(url=server.url), *says, limits=Limits(rollout_timeout=60))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TIMEOUT, 2.0)
    assert state(server)["open"] == 0


def test_after_a_call_that_was_given_up_the_session_is_used_no_more(start_ors) -> None:
    """What the tool does meanwhile cannot be known: neither a further call nor a final answer counts."""
    server = start_ors("troubled")
    environment = ORS(url=server.url)()

    async def impatient() -> None:
        await environment.reset("{}")
        calling = asyncio.create_task(environment.call_tool("do", {"what": "sleep", "amount": 600}))
        await eventually(lambda: state(server)["ran"])
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        with pytest.raises(EnvironmentFailure, match="the call of 'do' was given up"):
            await environment.call_tool("do", {"what": "add"})
        with pytest.raises(EnvironmentFailure, match="the call of 'do' was given up"):
            await environment.get_reward(answer="done")
        await environment.close()

    asyncio.run(impatient())
    assert state(server) | {"headers": {}, "silent": 0} == {"open": 0, "ran": ["sleep"], "headers": {}, "silent": 0}


CHILD = """
import sys
from agentrl.envs import ORS
from tests.envs.ors_play import Stage, use

stage = Stage(ORS(url=sys.argv[1]))
try:
    print("ready", flush=True)
    stage.play(use("do", what="sleep", amount=60), "done", count=4)
finally:
    stage.close()
"""


def test_ctrl_c_leaves_no_session(start_ors) -> None:
    """G08: a real SIGINT to a process whose rollouts are in the midst of their calls."""
    server = start_ors("troubled")
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, server.url], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    while len(state(server)["ran"]) < 4:
        assert child.poll() is None
        time.sleep(0.05)
    assert state(server)["open"] == 4
    os.kill(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=300)
    assert child.returncode == -signal.SIGINT, said
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert state(server)["open"] == 0
