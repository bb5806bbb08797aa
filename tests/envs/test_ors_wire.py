"""What a server says is read strictly: a wrong type is a protocol error and never becomes a value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envs.ors.wire import Output, ProtocolError, Refusal, Terminal, read_blocks, read_result, read_tools
from agentrl.errors import EnvironmentFailure

TEXT = {"type": "text", "text": "ok"}


def result(**changes: Any) -> str:
    output = {"blocks": [TEXT], "metadata": None, "reward": 1.5, "finished": False} | changes
    return json.dumps({"ok": True, "output": {name: value for name, value in output.items() if value != "absent"}})


def test_a_result_is_read() -> None:
    assert read_result(result()) == Output("ok", 1.5, False)
    assert read_result(result(reward=None, finished=True)) == Output("ok", None, True)
    assert read_result(result(reward=2)) == Output("ok", 2.0, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": "1"},
        {"reward": True},
        {"reward": "absent"},
        {"reward": [1]},
        {"reward": 10**400},
        {"finished": "no"},
        {"finished": 0},
        {"finished": None},
        {"finished": "absent"},
        {"blocks": None},
        {"blocks": "text"},
        {"blocks": ["text"]},
        {"blocks": [{"text": "without a type"}]},
        {"blocks": [{"type": "text", "text": None}]},
        {"blocks": [TEXT, {"type": "audio", "data": ""}]},
        {"blocks": [{"type": "image", "data": "no base64!"}]},
        {"blocks": [{"type": "image", "data": "aGVsbG8="}]},
    ],
)
def test_wrong_types_in_a_result_are_protocol_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the result of a call"):
        read_result(result(**changes))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "<html>",
        '{"ok": true}',
        '{"ok": "true", "output": {}}',
        '{"ok": true, "output": []}',
        '{"ok": false}',
        '{"ok": false, "error": "no", "reason": 7}',
        '{"ok": true, "output": {"blocks": [], "reward": NaN, "finished": false}}',
        '{"ok": true, "output": {"blocks": [], "reward": Infinity, "finished": false}}',
        '{"ok": true, "output": {"blocks": [], "reward": 1e999, "finished": false}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_result_is_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError):
        read_result(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ok", "output", "x"]), inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("blocks", "reward", "finished", "metadata"), JSON)), JSON)
def test_no_answer_whatever_raises_anything_else(output: Any, other: Any) -> None:
    for value in ({"ok": True, "output": output}, other):
        try:
            read = read_result(json.dumps(value))
        except EnvironmentFailure:
            continue
        assert isinstance(read, Refusal) or (isinstance(read.finished, bool) and isinstance(read.content, str | list))


def test_a_refusal_is_read_with_and_without_a_reason() -> None:
    assert read_result('{"ok": false, "error": "no", "reason": "not_found"}') == Refusal("no", "not_found")
    assert read_result('{"ok": false, "error": "no"}') == Refusal("no", None)


def test_text_blocks_are_one_text() -> None:
    assert read_blocks([TEXT, {"type": "text", "text": " then", "detail": {"x": 1}}], "it") == "ok then"
    assert read_blocks([], "it") == ""


def test_nested_schemas_stay_whole() -> None:
    schema = {
        "type": "object",
        "$defs": {"Item": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
        "required": ["items"],
    }
    listed = read_tools({"tools": [{"name": "order", "description": "", "input_schema": schema}]}, "them")
    assert listed.schemas[0]["function"] == {"name": "order", "description": "order", "parameters": schema}
    assert listed.terminal is None


def test_the_terminal_tool_is_no_tool_of_the_models() -> None:
    spec = {"name": "submit", "arg": None, "description": ""}
    listed = read_tools({"tools": [], "terminal_tool": spec}, "them")
    assert listed.schemas == []
    assert listed.terminal == Terminal("submit", None)


@pytest.mark.parametrize(
    "tools",
    [
        None,
        {},
        {"tools": {}},
        {"tools": [{"name": "two words", "description": "x", "input_schema": None}]},
        {"tools": [{"name": "a", "description": "x", "input_schema": {"type": "array"}}]},
        {"tools": [{"name": "a", "description": "x", "input_schema": None}] * 2},
        {"tools": [], "terminal_tool": {"arg": "x"}},
        {"tools": [], "terminal_tool": {"name": "submit", "arg": 3}},
    ],
)
def test_wrong_lists_of_tools_are_protocol_errors(tools: Any) -> None:
    with pytest.raises(ProtocolError):
        read_tools(tools, "them")
