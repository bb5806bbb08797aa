"""Tools described by JSON schemas: written by hand, or as an MCP server lists them."""

import asyncio
import json

import pytest

import agentrl
from agentrl.errors import ToolDefinitionError
from agentrl.rollout.threads import Threads
from agentrl.rollout.tools import Tool, ToolRunner, make_tools
from agentrl.types import ToolCall

ORDER = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["sku"],
            },
        },
        "address": {"$ref": "#/$defs/address"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["items"],
    "$defs": {"address": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
FUNCTION = {"name": "order", "description": "Order things.", "parameters": ORDER}


async def order(items, address=None, note=None):
    return {"ordered": len(items), "city": (address or {}).get("city"), "note": note}


@pytest.mark.parametrize(
    "description",
    [
        {"type": "function", "function": FUNCTION},
        FUNCTION,
        {"name": "order", "description": "Order things.", "inputSchema": ORDER},
        {"name": "order", "title": "Order things.", "inputSchema": ORDER, "annotations": {"readOnlyHint": False}},
    ],
    ids=["openai", "function", "mcp", "mcp with a title"],
)
def test_every_form_gives_the_same_schema(description):
    before = json.dumps(description)
    tool = Tool.from_schema(description, order)
    assert tool.schema == {"type": "function", "function": FUNCTION}
    tool.schema["function"]["parameters"]["properties"].clear()
    assert json.dumps(description) == before  # the caller's description is not shared


def test_such_a_tool_runs_beside_functions():
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    tools = make_tools([add, Tool.from_schema(FUNCTION, order)])
    assert [*tools] == ["add", "order"]
    calls = [
        ToolCall("1", "order", {"items": [{"sku": "x"}], "address": {"city": "Zürich"}}),
        ToolCall("2", "order", {"items": "x"}),
        ToolCall("3", "order", {}),
        ToolCall("4", "add", {"a": 1, "b": 2}),
    ]
    threads = Threads()
    try:
        results = asyncio.run(ToolRunner(threads).run(calls, tools))
    finally:
        threads.close()
    assert [result.failed for result in results] == [False, True, True, False]
    assert json.loads(results[0].content) == {"ordered": 1, "city": "Zürich", "note": None}
    assert "'items' must be array" in results[1].content
    assert "'items' is missing" in results[2].content


def test_a_callable_for_any_arguments_serves_an_mcp_session():
    """The usual bridge: one callable that passes on what it is given."""
    sent = []

    async def call_tool(**arguments):
        sent.append(arguments)
        return "done"

    tool = Tool.from_schema({"name": "fs.read-file", "description": "Read.", "inputSchema": ORDER}, call_tool)
    threads = Threads()
    try:
        call = ToolCall("1", "fs.read-file", {"items": []})
        (result,) = asyncio.run(ToolRunner(threads).run([call], make_tools([tool])))
    finally:
        threads.close()
    assert (result.content, sent) == ("done", [{"items": []}])


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({}, "needs a `name`"),
        ({"name": "a b", "description": "x"}, "needs a `name`"),
        ({"type": "function", "function": "f"}, "needs a `name`"),
        ({"name": "f"}, "needs a `description`"),
        ({"name": "f", "description": "x", "parameters": {"type": "string"}}, "type object"),
        ({"name": "f", "description": "x", "parameters": {"properties": []}}, "type object"),
        ({"name": "f", "description": "x", "inputSchema": [1]}, "inputSchema"),
        ({"name": "f", "description": "x", "parameters": {"required": ["items"]}}, "requires 'items'"),
        ({**FUNCTION, "parameters": {"properties": {"a": {"enum": [{1}]}}}}, "as JSON"),
        ({**FUNCTION, "parameters": {"properties": {"items": {}, "zip": {}}}}, "describes 'zip'"),
        ({**FUNCTION, "parameters": {"properties": {"items": {}}}}, "cannot be called without 'items'"),
    ],
)
def test_a_description_that_does_not_fit_is_refused_by_name(description, message):
    with pytest.raises(ToolDefinitionError, match=message):
        Tool.from_schema(description, order)


def test_names_must_differ_and_reserved_ones_are_refused():
    tool = Tool.from_schema(FUNCTION, order)
    with pytest.raises(ToolDefinitionError, match="two tools are called 'order'"):
        make_tools([tool, tool])
    with pytest.raises(ToolDefinitionError, match="reset"):
        make_tools([Tool.from_schema({"name": "reset", "description": "x"}, lambda: None)])


def test_the_class_is_public():
    assert agentrl.Tool is Tool
