"""A model behind `/v1/chat/completions`, which takes and says messages and no token ids: for evaluation.

The engine keeps conversations as ids, so here ids stand for messages. A span begins with the number of what was said
and is filled up to the tokens that the server counted for a turn: limits and costs are those of sampled tokens. What
prompts and results are in tokens only the server knows; each counts as one. Nothing can be trained on such rows: the
logprobs are NaN.

The server applies its own chat template and reads calls itself. It gets its own messages back as it said them, without
reasoning, which servers refuse. Images go along as `data:` URLs. The protocol has no place for them in results of
tools: a message of the user after the results shows them.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from agentrl.chat.calls.values import arguments_from_json
from agentrl.chat.continuation import Continuation
from agentrl.chat.messages import clean_messages
from agentrl.chat.parsing import ParsedTurn
from agentrl.chat.pictures import image_block, is_image_block
from agentrl.chat.prefix import call_id
from agentrl.errors import GenerationError
from agentrl.generation.base import UNBOUNDED_TURN, SamplingParams
from agentrl.generation.openai_http import OpenAIServer
from agentrl.types import Encoded, FinishReason, ImageSpan, Message, Prompt, Sample, ToolCall

END, MORE = 0, 1
"""Ids that end a turn, and that fill it."""
_FIRST = 2


class _Said(NamedTuple):
    """What an id stands for: messages as they are sent, and the tools if they are a prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class ChatServer(OpenAIServer):
    """Takes the place of a generator and of its renderer, see `Generator` and `Renderer`; the arguments are its base's.

    It has no `max_context`: the server counts its context itself, and says so when a conversation is too long. Whether
    its model sees images it says too, by refusing them.
    """

    stop_ids = frozenset({END})
    never_sampled = None
    sees_images = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._longest, self.max_context = self.max_context, None
        self._numbers = itertools.count(_FIRST)
        self._said: dict[int, _Said] = {}
        self._rows: dict[str, Sequence[int]] = {}

    async def sample(
        self, session: str, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Sample:
        """Ask for one turn; see `Generator.sample`.

        Raises:
            ContextFull: The conversation is too long for the server.
            GenerationError: The server refuses it otherwise, or its answer has no message.
        """
        self._rows[session] = ids  # the row itself, which grows
        said = [self._said[number] for number in ids if number >= _FIRST]
        messages = [message for one in said for message in one.messages]
        if self._longest is not None and params.max_tokens != UNBOUNDED_TURN:  # vLLM refuses to be asked for more
            params = replace(params, max_tokens=min(params.max_tokens, self._longest))
        reply = await self.ask("chat/completions", turn_request(self.model, messages, said[0].tools, params))
        message, finish, tokens = read_turn(reply)
        self.stats.decoded_tokens += tokens
        self.stats.forward_passes += 1
        drawn = [self._number(_Said([message], [])), *[MORE] * (tokens - 1)]
        if finish is FinishReason.STOP:
            drawn = [*drawn[: max(1, tokens - 1)], END]
        return Sample(drawn, [math.nan] * len(drawn), finish)

    def release(self, session: str) -> None:
        """Forget what was said in an episode; the server keeps nothing."""
        for number in self._rows.pop(session, ()):
            self._said.pop(number, None)

    # As a renderer ----------------------------------------------------------------------------------------------

    def encode_prompt(self, prompt: Prompt, tools: list[dict[str, Any]] | None) -> Encoded:
        """Give a prompt its number; text is said by the user."""
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Encoded([self._number(_Said(_outgoing(messages), tools or []))])

    def continuation(
        self, prompt: Prompt, completion: list[Message], results: list[Message], sampled: list[int], tools: Any
    ) -> Continuation:
        """Give the answers to a turn's calls their number; see `Renderer.continuation`."""
        return Continuation([self._number(_Said(_outgoing(results), []))], 1)

    def parse(self, ids: list[int], tools: Any, *, first_call: int = 0) -> ParsedTurn:
        """Read a turn as the server said it; calls that cannot be run have their `error`."""
        [said] = self._said[ids[0]].messages
        message: Message = {"role": "assistant", "content": said.get("content") or ""}
        calls = [read_call(written, first_call + k) for k, written in enumerate(said.get("tool_calls", ()))]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return ParsedTurn(message, calls)

    def text(self, ids: list[int]) -> str:
        """The text of a turn."""
        return str(self.parse(ids, None).message["content"])

    def locate_images(self, messages: Sequence[Message], ids: Sequence[int]) -> tuple[ImageSpan, ...]:
        """They have no places among the ids; see `Renderer.locate_images`."""
        return ()

    def _number(self, said: _Said) -> int:
        number = next(self._numbers)
        self._said[number] = said
        return number


def turn_request(
    model: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
) -> dict[str, Any]:
    """The body that asks for one turn. Settings beyond OpenAI's protocol are sent only where they do something."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed % 2**31,
    }
    if tools:
        body["tools"] = [_plain_schema(tool) for tool in tools]
    if params.max_tokens != UNBOUNDED_TURN:
        body["max_tokens"] = params.max_tokens
    beyond = {"top_k": params.top_k or None, "min_p": params.min_p, "repetition_penalty": params.repetition_penalty}
    if params.repetition_penalty == 1.0:
        del beyond["repetition_penalty"]
    return body | {name: value for name, value in beyond.items() if value is not None}


def read_turn(reply: Any) -> tuple[Message, FinishReason, int]:
    """Read a turn from an answer: the message to send back, how it ended, and its tokens.

    Raises:
        GenerationError: There is no message in it, or no count of tokens.
    """
    try:
        choice, tokens = reply["choices"][0], reply["usage"]["completion_tokens"]
        content, written = choice["message"].get("content"), choice["message"].get("tool_calls") or []
        message: Message = {"role": "assistant", "content": content if written else content or ""}
        if written:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {name: call["function"][name] for name in ("name", "arguments")},
                }
                for call in written
            ]
        finish = FinishReason.LENGTH if choice["finish_reason"] == "length" else FinishReason.STOP
        return message, finish, max(1, int(tokens))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise GenerationError(
            f"the server's answer is no chat completion ({type(error).__name__}: {error}): {reprlib.repr(reply)}"
        ) from error


def read_call(written: Mapping[str, Any], number: int) -> ToolCall:
    """Read a call as OpenAI's protocol writes it, its arguments as a JSON string."""
    identity, name = written["id"] or call_id(number), str(written["function"]["name"] or "")
    arguments = arguments_from_json(written["function"]["arguments"] or "{}")
    if arguments is None:
        return ToolCall(identity, name, error=f"the arguments of {name!r} are not a JSON object")
    return ToolCall(identity, name, arguments)


def _outgoing(messages: list[Message]) -> list[Message]:
    """Messages as they are sent: the arguments of calls are text, images are URLs, those of results come after them."""
    outgoing: list[Message] = []
    for answers, run in itertools.groupby(clean_messages(messages), lambda message: message["role"] == "tool"):
        shown: list[dict[str, Any]] = []
        for message in run:
            outgoing.append(_answer(message) if answers else _sent(message))
            if answers and (images := [block for block in _blocks(message) if is_image_block(block)]):
                shown += [
                    {"type": "text", "text": f"Shown by {message.get('name', 'the tool')}:"},
                    *map(_url, images),
                ]
        if shown:
            outgoing.append({"role": "user", "content": shown})
    return outgoing


def _answer(message: Message) -> Message:
    """The text of a tool's result, without the tool's name, which the call has."""
    text = "".join(block["text"] for block in _blocks(message) if isinstance(block.get("text"), str))
    return {"role": "tool", "tool_call_id": message["tool_call_id"], "content": text}


def _sent(message: Message) -> Message:
    if isinstance(message.get("content"), list):
        content = [_url(block) if is_image_block(block) else block for block in message["content"]]
        message = {**message, "content": content}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _blocks(message: Message) -> list[dict[str, Any]]:
    content = message.get("content") or ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _url(block: dict[str, Any]) -> dict[str, Any]:
    """The block of an image as the protocol has it: its pixels in RGB, as every model sees them, unchanged."""
    file = io.BytesIO()
    image_block(block)["image"].convert("RGB").save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def _plain_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema with what the protocol knows; what a tool returns is not part of it."""
    function = tool["function"]
    known = {name: function[name] for name in ("name", "description", "parameters") if name in function}
    return {"type": "function", "function": known}
