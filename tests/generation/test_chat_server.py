"""Rollouts against a server that speaks messages, as OpenAI's protocol has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from agentrl.errors import GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.generation.chat_server import END, ChatServer, read_call, read_turn, turn_request
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.types import FinishReason, Limit, Outcome, Task
from tests.generation.openai_stub import Server, says, serving


class Shop:
    """Sells at a price that is told once."""

    def reset(self, **columns: Any) -> str:
        self.paid = 0
        return "Buy it."

    def pay(self, amount: int) -> str:
        """Pay.

        Args:
            amount: How much.

        Returns:
            A receipt.
        """
        self.paid += amount
        return f"paid {self.paid}"

    def get_reward(self) -> float:
        return float(self.paid == 7)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def play(server: Server, *answers: Any, environments: Any = Shop, prompt: Any = None, **limits: Any) -> Any:
    server.answers += answers
    chat: Any = ChatServer(server.url, model="clever")
    failures = FailurePolicy(retries=0, max_rate=1.0)
    engine = RolloutEngine(chat, chat, environments=environments, limits=Limits(**limits), failures=failures)
    try:
        [trajectory] = engine.run([Task("g", 0, 3, prompt)])
    finally:
        engine.close()
        chat.close()
    return trajectory


def test_an_episode_is_played_and_the_server_gets_its_own_messages_back(server):
    first = says("Let me see.", ("pay", '{"amount": 3}'), ("pay", '{"amount": 4}'), tokens=9)
    trajectory = play(server, first, says("Done.", tokens=2))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    asked, answered = server.bodies
    assert (asked["model"], asked["messages"]) == ("clever", [{"role": "user", "content": "Buy it."}])
    [tool] = asked["tools"]
    assert tool["function"].keys() == {"name", "description", "parameters"}
    written = [
        {"id": f"call_{k}", "type": "function", "function": {"name": "pay", "arguments": f'{{"amount": {amount}}}'}}
        for k, amount in enumerate((3, 4))
    ]
    assert answered["messages"] == [
        *asked["messages"],
        {"role": "assistant", "content": "Let me see.", "tool_calls": written},
        {"role": "tool", "tool_call_id": "call_0", "content": "paid 3"},
        {"role": "tool", "tool_call_id": "call_1", "content": "paid 7"},
    ]
    assert [message["role"] for message in trajectory.completion] == ["assistant", "tool", "tool", "assistant"]
    assert trajectory.completion[-1]["content"] == "Done."


def test_what_was_sampled_has_as_many_ids_as_the_server_counted(server):
    trajectory = play(server, says(None, ("pay", '{"amount": 7}'), tokens=9), says("Done.", tokens=4))
    assert trajectory.sampled_length == 13
    assert [turn.stop - turn.start for turn in trajectory.turns] == [9, 4]


def test_the_budget_is_that_of_the_whole_episode(server):
    """The second turn is given what the first one and its answer left."""
    cut = says("Do", tokens=10, finish="length")
    trajectory = play(server, says(None, ("pay", '{"amount": 7}'), tokens=9), cut, max_completion_length=20)
    assert [body["max_tokens"] for body in server.bodies] == [20, 10]
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TRUNCATED, Limit.COMPLETION)


def test_calls_that_cannot_be_run_are_answered_and_the_episode_goes_on(server):
    calls = ("pay", '{"amount": '), ("pay", "[1]"), ("fly", "{}")
    trajectory = play(server, says(None, *calls), says("Sorry."))
    assert (trajectory.outcome, trajectory.tool_failures) == (Outcome.FINISHED, 3)
    told = [message["content"] for message in server.bodies[1]["messages"][2:]]
    assert ["not a JSON object" in text for text in told] == [True, True, False]
    assert "no tool named 'fly'" in told[2]
    assert server.bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"amount": '


def test_text_prompts_are_said_by_the_user_and_no_limit_is_sent_where_there_is_none(server):
    trajectory = play(server, says("Four."), environments=None, prompt="Two and two?")
    [body] = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Two and two?"}]
    assert body.keys() == {"model", "messages", "temperature", "top_p", "seed"}
    assert trajectory.completion == "Four."


def test_a_busy_server_is_asked_again_and_a_refusal_ends_the_run(server):
    assert play(server, 429, says("Done.")).outcome is Outcome.FINISHED
    assert len(server.bodies) == 2
    with pytest.raises(GenerationError, match="HTTP 400"):
        play(server, 400)


def test_an_image_ends_its_rollout_with_the_reason(server):
    class Sees(Shop):
        def reset(self, **columns: Any) -> Any:
            return [{"type": "image", "image": Image.new("RGB", (8, 8))}]

    trajectory = play(server, environments=Sees)
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "images are not passed on to a chat server" in trajectory.failure.error
    assert not server.bodies


def test_settings_beyond_the_protocol_are_sent_only_where_they_do_something():
    plain = turn_request("m", [], [], SamplingParams(5))
    assert {"top_k", "min_p", "repetition_penalty"}.isdisjoint(plain)
    shaped = turn_request("m", [], [], SamplingParams(5, top_k=3, min_p=0.1, repetition_penalty=1.2, seed=2**40 + 1))
    assert (shaped["top_k"], shaped["min_p"], shaped["repetition_penalty"], shaped["seed"]) == (3, 0.1, 1.2, 1)


@pytest.mark.parametrize("reply", ["<html>", {}, {"choices": []}, {"choices": [{"message": None}], "usage": {}}])
def test_an_answer_that_is_no_completion_says_so(reply):
    with pytest.raises(GenerationError, match="no chat completion"):
        read_turn(reply)


def test_a_turn_keeps_nothing_that_a_server_would_refuse():
    message, finish, tokens = read_turn(says(None, tokens=0))
    assert (message, finish, tokens) == ({"role": "assistant", "content": ""}, FinishReason.STOP, 1)


def test_arguments_may_be_left_out():
    call = read_call({"id": "a", "function": {"name": "look", "arguments": ""}}, 0)
    assert (call.arguments, call.error) == ({}, None)


def test_a_turn_of_a_single_token_ends_too(server):
    trajectory = play(server, says("4", tokens=1), environments=None, prompt="Two and two?")
    assert trajectory.rows[0].completion_ids[-1] == END
