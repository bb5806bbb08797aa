"""OpenAI's chat completions as they come over the wire: requests read, answers and errors written. Pure.

(https://platform.openai.com/docs/api-reference/chat.) What a request asks for is done or refused with status 400;
nothing is quietly left undone. Training has to know the distribution that tokens were drawn from, so sampling is the
run's: a request that asks for another one is refused, or, with `accept_sampling`, answered with the names of what was
not followed in the header `x-agentrl-ignored`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.generation.base import SamplingParams
from agentrl.rollout.endpoint.messages import MessageError, normalise
from agentrl.types import FinishReason, Message, Sample

_NO_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Bookkeeping of OpenAI's that changes no answer."""
_READ = frozenset(
    {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "logprobs": (False,),
    "modalities": (["text"],),
}
"""Parameters that may be given, with the values that they may have."""
_NEUTRAL: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
"""Sampling that the run never does, with the value that means so."""
_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", *_NEUTRAL})


class ApiError(Exception):
    """An error as OpenAI's clients understand it.

    Args:
        message: What was wrong and what to change.
        status: The HTTP status.
        code: OpenAI's code, None for none.
        param: The parameter at fault, None for none.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request that can be served.

    Attributes:
        model: As the program calls it; whatever that is, the policy answers.
        messages: In normal form, ending with another role than the assistant's.
        tools: Tool schemas; empty with `tool_choice="none"`.
        max_tokens: Most tokens to sample, None for as many as the run's limits leave.
        stream: Whether the answer is sent as events.
        usage: Whether a stream ends with the usage.
        ignored: Sampling parameters that were not followed.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None = None
    stream: bool = False
    usage: bool = False
    ignored: tuple[str, ...] = ()


def read_request(body: Any, sampling: SamplingParams, *, accept_sampling: bool = False) -> ChatRequest:
    """Read a request.

    Args:
        body: The decoded JSON.
        sampling: What the run draws with.
        accept_sampling: Serve requests that ask for other sampling, with the run's.

    Raises:
        ApiError: It asks for what cannot be done.
    """
    if not isinstance(body, dict):
        raise ApiError("The body must be a JSON object.")
    given = {name: value for name, value in body.items() if value is not None}
    ignored = _check(given, sampling, accept_sampling)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list with at least one message.", param="messages")
    try:
        normal = normalise(messages)
    except MessageError as error:
        raise ApiError(f"{error}.", param="messages") from None
    if normal[-1]["role"] == "assistant":
        raise ApiError("The last message is the assistant's; there is nothing to answer.", param="messages")
    options = given.get("stream_options") or {}
    return ChatRequest(
        model=str(given.get("model", "policy")),
        messages=normal,
        tools=_tools(given),
        max_tokens=_max_tokens(given),
        stream=bool(given.get("stream", False)),
        usage=bool(options.get("include_usage", False)),
        ignored=ignored,
    )


def _check(given: dict[str, Any], sampling: SamplingParams, accept_sampling: bool) -> tuple[str, ...]:
    """Refuse what is not served; gives back the names of sampling parameters that are not followed."""
    ignored = []
    for name, value in given.items():
        if name in _SAMPLING:
            ours = _NEUTRAL.get(name, None if name == "seed" else getattr(sampling, name, None))
            if value == ours:
                continue
            if not accept_sampling:
                what = "every turn has a seed of its own" if name == "seed" else f"this run samples with {name}={ours}"
                raise ApiError(
                    f"{name}={value!r}: {what}, and the training has to know what tokens were drawn from. Leave it "
                    "out of the request, or set accept_sampling=True to have it answered with the run's sampling.",
                    param=name,
                )
            ignored.append(name)
        elif name in _ONLY:
            if value not in _ONLY[name]:
                raise ApiError(f"{name}={value!r} is not served; only {_ONLY[name][0]!r} is.", param=name)
        elif name not in _READ and name not in _NO_EFFECT:
            raise ApiError(f"The parameter {name!r} is not served; leave it out.", param=name)
    return tuple(sorted(ignored))


def _tools(given: dict[str, Any]) -> list[dict[str, Any]]:
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(
            f"tool_choice={choice!r} is not served: a call that is forced is not sampled from the policy. Use 'auto' "
            "or 'none'.",
            param="tool_choice",
        )
    named = isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and "name" in (tool.get("function") or {})
        for tool in tools
    )
    if not named:
        raise ApiError("tools must be a list of tools of type 'function', each with a name.", param="tools")
    return tools if choice == "auto" else []


def _max_tokens(given: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := given.get(name)) is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApiError(f"{name}={value!r}: expected a whole number, at least 1.", param=name)
            return value
    return None


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled turn and what the program is told of it.

    Attributes:
        request: What it answers.
        message: The assistant's message, in OpenAI's form.
        sample: The turn.
        read: Tokens that the model read.
    """

    request: ChatRequest
    message: Message
    sample: Sample
    read: int

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        if self.sample.finish is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    def body(self) -> dict[str, Any]:
        """The answer in one piece."""
        choice = {"index": 0, "message": self.message, "logprobs": None, "finish_reason": self.finish_reason}
        return self._head("chat.completion") | {"choices": [choice], "usage": self._usage()}

    def events(self) -> Iterator[str]:
        """The answer as server-sent events. A turn is sampled whole, so its text comes in one event."""
        head = self._head("chat.completion.chunk")
        calls = [{"index": index, **call} for index, call in enumerate(self.message.get("tool_calls", ()))]
        delta = self.message | ({"tool_calls": calls} if calls else {})
        for part, reason in ((delta, None), ({}, self.finish_reason)):
            choice = {"index": 0, "delta": part, "logprobs": None, "finish_reason": reason}
            yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
        if self.request.usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': self._usage()})}\n\n"
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.request.model}

    def _usage(self) -> dict[str, int]:
        sampled = len(self.sample.ids)
        return {"prompt_tokens": self.read, "completion_tokens": sampled, "total_tokens": self.read + sampled}


def to_openai(message: Message) -> Message:
    """Write a parsed turn as OpenAI does: no content is null, arguments are JSON."""
    answer = message | {"content": message["content"] or None}
    if calls := message.get("tool_calls"):
        answer["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return answer
