"""The frames of OpenEnv's `/ws`: one JSON object a message, one answer a request, no request ids.

Read strictly. Whatever is not exactly what the protocol says, were it a reward that is written as text, means that the
two sides no longer agree on what they are talking about, and nothing that follows can be believed.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn


class ProtocolError(ValueError):
    """The other side does not speak the protocol; the text says what it said instead."""


class ErrorCode(StrEnum):
    """What a server says of a request that it could not answer."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    """The action does not fit the schema."""
    EXECUTION_ERROR = "EXECUTION_ERROR"
    """The environment raised; the session goes on."""
    CAPACITY_REACHED = "CAPACITY_REACHED"
    """No free session; the server closes the connection."""
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to a reset or a step.

    Attributes:
        fields: What the environment shows.
        reward: A finite number, None where it gives none. (A server writes NaN as null, which cannot be told from it.)
        done: Whether the episode is over.
    """

    fields: dict[str, Any]
    reward: float | None
    done: bool


@dataclass(frozen=True, slots=True)
class ServerError:
    """The answer to a request that failed.

    Attributes:
        code: Its kind.
        message: Its text.
        mistakes: What is wrong with the fields of an action, as pydantic lists it.
    """

    code: ErrorCode
    message: str
    mistakes: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        """The text, with what is wrong with which field."""
        return "; ".join([self.message, *map(_mistake, self.mistakes)])


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    """The answer to an `mcp` request: JSON-RPC.

    Attributes:
        id: The id of the request that it answers.
        result: What came of it.
        code: The code of the error, None when there was none.
    """

    id: Any
    result: Any
    code: int | None


Answer = Observation | ServerError | RpcAnswer


def request(kind: str, data: Mapping[str, Any]) -> str:
    """Write a request.

    Raises:
        ValueError: The data cannot be written as JSON.
    """
    return json.dumps({"type": kind, "data": data}, allow_nan=False)


def rpc(method: str, number: int, **params: Any) -> dict[str, Any]:
    """A JSON-RPC call, as `mcp` requests and `POST /mcp` carry it."""
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def parse(frame: str | bytes) -> Answer:
    """Read an answer.

    Raises:
        ProtocolError: It is not one.
    """
    message = _object(_load(frame), "a frame")
    kind, data = message.get("type"), _object(message.get("data"), f"the data of a frame of the type {_short(message)}")
    if kind == "observation":
        return _observation(data)
    if kind == "error":
        return _error(data)
    if kind == "mcp":
        return parse_rpc(data)
    raise ProtocolError(f"a frame has the unknown type {reprlib.repr(kind)}")


def parse_rpc(data: Any) -> RpcAnswer:
    """Read a JSON-RPC answer.

    Raises:
        ProtocolError: It is not one.
    """
    answer = _object(data, "a JSON-RPC answer")
    if answer.get("jsonrpc") != "2.0" or ("result" in answer) == ("error" in answer):
        raise ProtocolError(f"a JSON-RPC answer reads {reprlib.repr(answer)}")
    if "result" in answer:
        return RpcAnswer(answer.get("id"), answer["result"], None)
    code = _object(answer["error"], "a JSON-RPC error").get("code")
    if not isinstance(code, int):
        raise ProtocolError(f"the code of a JSON-RPC error is {reprlib.repr(code)}, not a number")
    return RpcAnswer(answer.get("id"), None, code)


def _observation(data: dict[str, Any]) -> Observation:
    if missing := [name for name in ("observation", "reward", "done") if name not in data]:
        raise ProtocolError(f"an observation lacks {missing}")
    if not isinstance(data["done"], bool):
        raise ProtocolError(f"`done` is {reprlib.repr(data['done'])}, not true or false")
    return Observation(_object(data["observation"], "an observation"), _reward(data["reward"]), data["done"])


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float):  # bool is an int, and the protocol allows it
        raise ProtocolError(f"`reward` is {reprlib.repr(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolError(f"`reward` is {reprlib.repr(value)}, not a finite number")
    return number


def _error(data: dict[str, Any]) -> ServerError:
    code, message, mistakes = data.get("code"), data.get("message"), data.get("errors", [])
    known = [one.value for one in ErrorCode]
    if code not in known or not isinstance(message, str) or not isinstance(mistakes, list):
        raise ProtocolError(f"an error reads {reprlib.repr(data)}")
    return ServerError(ErrorCode(code), message, mistakes)


def _mistake(entry: Any) -> str:
    """One of pydantic's errors as text."""
    if not isinstance(entry, dict):
        return str(entry)
    where = ".".join(map(str, entry.get("loc", ()))) if isinstance(entry.get("loc"), list) else ""
    return f"{where}: {entry.get('msg')}" if where else str(entry.get("msg"))


def _load(frame: str | bytes) -> Any:
    if not isinstance(frame, str):
        raise ProtocolError(f"a binary frame of {len(frame)} bytes")
    try:
        return json.loads(frame, parse_constant=_no_number, object_pairs_hook=_each_key_once)
    except ProtocolError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is no JSON ({error}): {reprlib.repr(frame)}") from error


def _no_number(name: str) -> NoReturn:
    raise ProtocolError(f"a frame has {name}, which is no JSON")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ProtocolError(f"a frame has a key twice: {reprlib.repr(pairs)}")
    return fields


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is {reprlib.repr(value)}, not an object")
    return value


def _short(message: dict[str, Any]) -> str:
    return reprlib.repr(message.get("type"))
