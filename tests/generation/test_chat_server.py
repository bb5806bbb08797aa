"""Rollouts against a server that speaks messages, as OpenAI's protocol has them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from agentrl.errors import ContextFull, GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.generation.chat_server import END, ChatServer, read_call, read_turn, turn_request
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.testing.invariants import assert_row_invariants
from agentrl.types import FinishReason, Limit, Outcome, Task
from tests.generation.openai_stub import FULL, Server, says, serving


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


def test_no_more_is_asked_for_than_the_server_says_it_can_give(server):
    """vLLM says its context, and refuses a larger `max_tokens` for every prompt."""
    server.models = [{"id": "clever", "max_model_len": 512}]
    play(server, says("Done."), max_completion_length=1024)
    play(server, says("Done."), max_completion_length=100)
    play(server, says("Done."))
    assert [body.get("max_tokens") for body in server.bodies] == [512, 100, None]


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


def test_images_go_along_and_those_of_results_are_shown_after_them(server):
    """The protocol has no place for images in messages of tools; pixels arrive as they were."""

    class Sees(Shop):
        def reset(self, **columns: Any) -> Any:
            super().reset()
            return [{"type": "text", "text": "Look."}, {"type": "image", "image": Image.new("L", (8, 4), 7)}]

        def pay(self, amount: int) -> Any:
            """Pay.

            Args:
                amount: How much.
            """
            super().pay(amount)
            return [{"type": "text", "text": "paid"}, Image.new("RGB", (2, 2), (amount, 0, 0))]

    calls = says(None, ("pay", '{"amount": 3}'), ("pay", '{"amount": 4}'))
    trajectory = play(server, calls, says("Done."), environments=Sees)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert_row_invariants(trajectory)
    asked, _, *answers, shown = server.bodies[1]["messages"]
    text, picture = asked["content"]
    assert text == {"type": "text", "text": "Look."}
    assert picture.keys() == {"type", "image_url"}
    assert seen(picture) == ((8, 4), (7, 7, 7))
    assert [(answer["role"], answer["content"]) for answer in answers] == [("tool", "paid"), ("tool", "paid")]
    assert shown["role"] == "user"
    first, red, second, redder = shown["content"]
    assert first == second == {"type": "text", "text": "Shown by pay:"}
    assert [seen(red), seen(redder)] == [((2, 2), (3, 0, 0)), ((2, 2), (4, 0, 0))]


def seen(block: dict[str, Any]) -> Any:
    """Size and first pixel of what stands in a URL."""
    header, _, data = block["image_url"]["url"].partition(",")
    assert header == "data:image/png;base64"
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    return picture.size, picture.getpixel((0, 0))


@pytest.mark.parametrize("turns", [0, 1])
def test_a_conversation_that_outgrows_the_server_is_cut_as_at_any_other_limit(server, turns):
    """The run goes on: before, the refusal of one long episode ended it."""
    told = [says(None, ("pay", '{"amount": 7}'), tokens=9)][:turns]
    trajectory = play(server, *told, {"error": FULL})
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TRUNCATED, Limit.CONTEXT)
    assert (len(trajectory.turns), trajectory.reward) == (turns, float(turns))
    assert_row_invariants(trajectory)


def test_a_limit_that_the_server_refuses_ends_the_run(server):
    """What helps is another `--max-completion-length`, so every episode would end so."""
    refusal = "'max_tokens' is too large: 512. This model's maximum context length is 512 tokens"
    with pytest.raises(GenerationError, match="is too large") as raised:
        play(server, {"error": {"message": refusal}})
    assert not isinstance(raised.value, ContextFull)


def test_what_was_said_in_an_episode_is_forgotten_with_it(server):
    """Pictures are large, and an evaluation has many."""
    server.answers += [says(None, ("pay", '{"amount": 7}')), says("Done.")]
    chat: Any = ChatServer(server.url, model="clever")
    engine = RolloutEngine(chat, chat, environments=Shop)
    try:
        engine.run([Task("g", 0, 3, None)])
    finally:
        engine.close()
        chat.close()
    assert not chat._said


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
