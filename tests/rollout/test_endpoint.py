"""Agents that own their loop, through the real HTTP endpoint and OpenAI's own client; every row is asserted."""

import asyncio
import json
import math
import sys

import httpx
import openai
import pytest

from agentrl import Agent, Command
from agentrl.errors import GenerationError
from agentrl.rollout.endpoint.messages import normalise, same
from agentrl.rollout.endpoint.recording import Recording
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import FinishReason, Limit, Outcome, Sample
from tests.rollout.helpers import EOS, QUESTION, call, encode, renderer, tasks, turn
from tests.waiting import LONG, eventually, skip

TOOLS = [{"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}]


def play(program, script, *, limits=None, template="t0", count=1, retries=0, reasoning="keep", **options):
    """Run a program against scripted turns; `script` is a list of turns in the order asked for, or a policy."""
    turns = None if callable(script) else list(script)
    generator = ScriptedGenerator(script if turns is None else lambda session, ids, params: turns.pop(0))
    engine = RolloutEngine(
        generator,
        renderer(template),
        limits=limits or Limits(),
        failures=FailurePolicy(retries=retries, delay=0, max_rate=1.0),
        agent=Agent(program, **options),
    )
    try:
        trajectories = engine.run(tasks(count))
    finally:
        engine.close()
    for trajectory in trajectories:
        assert_row_invariants(trajectory, calls_of(trajectory, generator))
    assert sorted(generator.released) == sorted(set(generator.released)), "a session is released once"
    assert set(generator.sessions()) <= set(generator.released)
    return trajectories, generator


def calls_of(trajectory, generator):
    """The sample calls of a trajectory's turns, found by the ids that the turn was sampled from."""
    left, found = list(generator.calls), []
    for one in trajectory.turns:
        row = trajectory.rows[one.row]
        given, ids = row.prompt_ids + row.completion_ids[: one.start], row.completion_ids[one.start : one.stop]
        match = [c for c in left if c.ids == given and c.sample.ids == ids]
        assert match, f"the turn {one} was not sampled from its row"
        left.remove(match[0])
        found.append(match[0])
    return found


def client(base_url, api_key, **options):
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **options)


async def tool_loop(base_url, api_key, task):
    """A usual agent: it sends back what it got as the client's library dumps it."""
    async with client(base_url, api_key) as api:
        messages = list(task.prompt)
        while True:
            answer = await api.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                return float(message.content or 0)
            for one in message.tool_calls:
                text = json.loads(one.function.arguments)["text"]
                messages.append({"role": "tool", "tool_call_id": one.id, "content": text})


def test_a_tool_loop_is_one_row_with_its_sampled_ids_A01():
    """ "ab" sampled as two ids stays two ids, although the program sends it back as text."""
    words = call("echo", '{"text": "5"}')
    first = Sample([197, 198, *encode(words), EOS], [-0.5] * (3 + len(encode(words))), FinishReason.STOP)
    [trajectory], generator = play(tool_loop, [first, turn("7")])
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.reward == 7.0
    assert not trajectory.forks
    assert trajectory.completion_ids[:2] == [197, 198]
    text = renderer().text(generator.calls[1].ids[len(generator.calls[0].ids) + len(first.ids) :])
    assert "tool\n5" in text
    assert trajectory.completion[0]["tool_calls"][0]["function"]["arguments"] == {"text": "5"}
    assert trajectory.logprobs[0] == -0.5


def test_streamed_answers_are_those_of_a_whole():
    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            assert [m.id async for m in api.models.list()] == ["policy"]
            text, reason, usage, names = "", None, None, []
            options = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await api.chat.completions.create(model="m", messages=task.prompt, tools=TOOLS, **options)
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    names += [c.function.name for c in choice.delta.tool_calls or []]
                    reason = choice.finish_reason or reason
            return {"got": (text, reason, names, usage.completion_tokens)}

    words = "hi" + call("echo")
    [trajectory], _ = play(program, [turn(words)])
    assert trajectory.extra["got"] == ("hi", "tool_calls", ["echo"], len(encode(words)) + 1)


def test_a_rewritten_history_forks():
    """A summary in place of earlier turns begins a row; the turns before it stay in theirs."""

    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            ask = lambda messages: api.chat.completions.create(model="m", messages=messages)  # noqa: E731
            messages = list(task.prompt)
            for _ in range(2):
                answer = (await ask(messages)).choices[0].message.content
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
            await ask([{"role": "user", "content": "summary"}])

    [trajectory], generator = play(program, [turn("a"), turn("b"), turn("c")])
    assert [one.row for one in trajectory.turns] == [0, 0, 1]
    assert trajectory.sampled_length == 6
    assert renderer().text(trajectory.forks[0].prompt_ids) == renderer().text(
        renderer().prompt_ids([{"role": "user", "content": "summary"}], [])
    )
    assert generator.sessions() != [generator.sessions()[0]], "a row of its own has a session of its own"


def test_an_assistant_message_that_was_changed_forks():
    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            await api.chat.completions.create(model="m", messages=task.prompt)
            changed = [*task.prompt, {"role": "assistant", "content": "other"}, {"role": "user", "content": "go"}]
            await api.chat.completions.create(model="m", messages=changed)

    [trajectory], _ = play(program, [turn("a"), turn("b")])
    assert [one.row for one in trajectory.turns] == [0, 1]
    assert "other" in renderer().text(trajectory.forks[0].prompt_ids)


def test_parallel_requests_are_rows_with_the_common_turns_as_prompt():
    """Sub-agents that go on from one turn: the ids before are context in one row and trained in the other."""

    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            first = await api.chat.completions.create(model="m", messages=task.prompt)
            base = [*task.prompt, {"role": "assistant", "content": first.choices[0].message.content}]
            asks = [[*base, {"role": "user", "content": text}] for text in ("x", "y")]
            await asyncio.gather(*(api.chat.completions.create(model="m", messages=ask) for ask in asks))

    class Meeting(ScriptedGenerator):
        """Answers the two that follow the first one when both are there."""

        asked = 0

        async def sample(self, session, ids, params):
            self.asked += 1
            if self.asked > 1:
                await eventually(lambda: self.asked == 3)
            return await super().sample(session, ids, params)

    first = [197, 198, EOS]
    generator = Meeting(lambda session, ids, params: turn("done") if first[1] in ids else first)
    engine = RolloutEngine(generator, renderer(), limits=Limits(), agent=Agent(program))
    try:
        [trajectory] = engine.run(tasks(1))
    finally:
        engine.close()
    assert_row_invariants(trajectory, calls_of(trajectory, generator))
    assert [one.row for one in trajectory.turns] == [0, 0, 1]
    start = len(trajectory.prompt_ids)
    assert trajectory.forks[0].prompt_ids[: start + 3] == [*trajectory.prompt_ids, *first]
    assert trajectory.sampled_length == 3 + 2 * 5


def test_a_request_whose_client_leaves_leaves_no_trace():
    asked = asyncio.Event()

    class Hanging(ScriptedGenerator):
        cancelled = 0

        async def sample(self, session, ids, params):
            if not asked.is_set():
                asked.set()
                try:
                    await asyncio.sleep(600)
                finally:
                    self.cancelled += 1
            return await super().sample(session, ids, params)

    async def program(base_url, api_key, task):
        async with httpx.AsyncClient(timeout=LONG) as http:
            body = {"messages": task.prompt}
            asking = asyncio.create_task(http.post(f"{base_url}/chat/completions", json=body))
            await asked.wait()
            asking.cancel()
            await asyncio.wait([asking])
            await http.post(f"{base_url}/chat/completions", json=body)
            await eventually(lambda: generator.cancelled)

    generator = Hanging(lambda session, ids, params: turn("ok"))
    engine = RolloutEngine(generator, renderer(), limits=Limits(), agent=Agent(program))
    try:
        [trajectory] = engine.run(tasks(1))
    finally:
        engine.close()
    assert generator.cancelled == 1
    assert len(trajectory.turns) == 1
    assert_row_invariants(trajectory, calls_of(trajectory, generator))


REFUSED = {
    "temperature": 0.3,
    "seed": 1,
    "n": 2,
    "stop": ["x"],
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "logprobs": True,
    "max_tokens": 0,
    "surprise": 1,
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
}


def test_what_cannot_be_served_is_refused_in_openais_form():
    async def program(base_url, api_key, task):
        errors = {}
        async with httpx.AsyncClient() as http:
            for name, value in REFUSED.items():
                body = {"messages": task.prompt, "tools": TOOLS, name: value}
                reply = await http.post(f"{base_url}/chat/completions", json=body)
                errors[name] = (reply.status_code, reply.json()["error"])
            stranger = await http.post(base_url.replace(api_key, "guess") + "/chat/completions", json={})
            fine = {"temperature": 1.0, "top_p": 1, "n": 1, "stop": None, "user": "me", "frequency_penalty": 0}
            reply = await http.post(f"{base_url}/chat/completions", json={"messages": task.prompt, **fine})
            assert reply.status_code == 200, reply.text
        return {"errors": errors, "stranger": stranger.status_code}

    [trajectory], _ = play(program, [turn("ok")])
    for name, (status, error) in trajectory.extra["errors"].items():
        assert status == 400, name
        assert error["type"] == "invalid_request_error"
        assert error["param"] == name
    assert "this run samples with temperature=1.0" in trajectory.extra["errors"]["temperature"][1]["message"]
    assert trajectory.extra["stranger"] == 404


def test_sampling_that_is_not_followed_is_named():
    async def program(base_url, api_key, task):
        async with httpx.AsyncClient() as http:
            body = {"messages": task.prompt, "temperature": 0, "seed": 3}
            reply = await http.post(f"{base_url}/chat/completions", json=body)
        return {"ignored": reply.headers["x-agentrl-ignored"]}

    [trajectory], generator = play(program, [turn("ok")], accept_sampling=True)
    assert trajectory.extra["ignored"] == "seed, temperature"
    assert generator.calls[0].params.temperature == 1.0


def test_length_limits_are_openais_error_and_a_program_that_dies_of_them_is_truncated():
    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            messages = list(task.prompt)
            while True:
                answer = await api.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "x" * 30}]

    async def careful(base_url, api_key, task):
        try:
            await program(base_url, api_key, task)
        except openai.BadRequestError as error:
            return {"code": error.code}

    [died], generator = play(program, [turn("a"), turn("b")], limits=Limits(max_context=60))
    [ended], _ = play(careful, [turn("a"), turn("b")], limits=Limits(max_completion_length=50))
    assert (died.outcome, died.limit) == (Outcome.TRUNCATED, Limit.CONTEXT)
    assert (ended.outcome, ended.limit) == (Outcome.TRUNCATED, Limit.COMPLETION)
    assert ended.extra["code"] == "context_length_exceeded"
    assert generator.calls[0].params.max_tokens == 60 - len(generator.calls[0].ids)


def test_a_cut_turn_is_text_and_the_next_request_is_a_row_of_its_own():
    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            first = await api.chat.completions.create(model="m", messages=task.prompt, tools=TOOLS, max_tokens=50)
            choice = first.choices[0]
            assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
            messages = [*task.prompt, choice.message.model_dump(), {"role": "user", "content": "go on"}]
            await api.chat.completions.create(model="m", messages=messages, tools=TOOLS)

    [trajectory], _ = play(program, [encode(call("echo")), turn("ok")])
    assert [one.row for one in trajectory.turns] == [0, 1]
    assert trajectory.outcome is Outcome.FINISHED


def test_a_program_that_breaks_is_tried_again_and_is_no_signal_J():
    attempts = []

    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            await api.chat.completions.create(model="m", messages=task.prompt)
        attempts.append(1)
        if len(attempts) == 1 or task.member:
            raise ValueError("broken")

    first, second = play(program, lambda *_: turn("ok"), count=2, retries=1)[0]
    assert sorted([first.outcome, second.outcome]) == sorted([Outcome.FINISHED, Outcome.ENV_FAILURE])
    assert "broken" in second.failure.error
    [silent], _ = play(lambda base_url, api_key, task: None, [])
    assert silent.outcome is Outcome.ENV_FAILURE
    assert "without a turn" in silent.failure.error


def test_a_broken_generator_ends_the_run():
    def broken(session, ids, params):
        raise GenerationError("no memory")

    with pytest.raises(GenerationError, match="no memory"):
        play(tool_loop, broken)


def test_time_ends_a_program_that_hangs():
    async def program(base_url, api_key, task):
        async with client(base_url, api_key) as api:
            await api.chat.completions.create(model="m", messages=task.prompt)
        skip(asyncio.get_running_loop(), 600)
        await asyncio.sleep(1000)

    [trajectory], _ = play(program, [turn("a")], limits=Limits(rollout_timeout=60))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TIMEOUT, Limit.ROLLOUT_TIME)
    assert trajectory.sampled_length == 2


SCRIPT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"messages": task["prompt"]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body)))
print(reply["choices"][0]["message"]["content"])
sys.exit(int(task["columns"].get("status", 0)))
"""


def test_a_command_is_a_program():
    command = Command([sys.executable, "-c", SCRIPT], reward=lambda result: float(result.output))
    [trajectory], _ = play(command, [turn("3")])
    assert trajectory.reward == 3.0
    failing = Command([sys.executable, "-c", SCRIPT.replace("columns", "x")])
    [trajectory], _ = play(failing, [turn("3")])
    assert trajectory.outcome is Outcome.ENV_FAILURE
    assert "KeyError" in trajectory.failure.error


@pytest.mark.parametrize(
    ("sent", "equal"),
    [
        ({"content": None}, True),
        ({"content": [{"type": "text", "text": ""}], "refusal": None, "annotations": []}, True),
        ({"arguments": '{ "b":2, "a":1}'}, True),
        ({"arguments": '{"a": 1, "b": 3}'}, False),
        ({"content": "x"}, False),
        ({"reasoning_content": "thought"}, True),
        ({"reasoning_content": "other"}, False),
    ],
)
def test_what_is_the_same_message(sent, equal):
    def message(arguments='{"a": 1, "b": 2}', **fields):
        one = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [one], **fields}

    [recorded] = normalise([message(reasoning_content="thought")])
    [other] = normalise([message(**sent)])
    assert same(recorded, other) is equal


def test_rewriting_templates_fork_as_in_the_engine():
    """`reasoning="fork"`: the program leaves reasoning out, and the model reads what the template makes of it."""
    from agentrl.chat.renderer import Renderer
    from agentrl.testing.tokenizers import fix_tokenizer

    recording = Recording(Renderer(fix_tokenizer("think"), tools=True, reasoning="fork"), "s")
    place = recording.place(normalise(QUESTION), TOOLS)
    text = "<think>t</think>a"
    ids = [*encode(text), EOS]
    answer = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    recording.commit(place, Sample(ids, [math.nan] * len(ids), FinishReason.STOP), answer)
    sent = [*QUESTION, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    following = recording.place(normalise(sent), TOOLS)
    assert following.row is None
    assert "<think>" not in fix_tokenizer().decode(following.ids)
