"""What the model may call, from what a server says that it understands; and back from a call to an action.

An environment has either an action model of its own, or tools of an MCP server. The fields of an action model are the
arguments of one tool, `step`; a union of several models is as many tools, named by the value that tells them apart
(`{"kind": "move"}` is the tool `move`), else by their titles. MCP tools are listed by the environment itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentrl.envs.openenv.protocol import ProtocolError

LIST_TOOLS = {"type": "list_tools"}
"""The action that an environment with MCP tools answers with their list."""

HIDDEN = "metadata"
"""A field of every action that is for bookkeeping and not for the model."""


class Style(StrEnum):
    """How an environment is spoken to."""

    TYPED = "typed"
    """Actions are an action model of the environment's own."""
    MCP = "mcp"
    """Actions call tools that the environment lists."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One thing that the model may do.

    Attributes:
        description: Name, description and arguments, as `tool_schemas` takes them.
        fixed: The fields that each of its actions has besides the arguments.
        mcp: Whether the arguments go into a call of an MCP tool, by this name.
    """

    description: dict[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    mcp: str | None = None

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.description["name"])

    def action(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The action that a call stands for."""
        if self.mcp is not None:
            return {"type": "call_tool", "tool_name": self.mcp, "arguments": dict(arguments)}
        return {**arguments, **self.fixed}


def style_of(action: Mapping[str, Any]) -> Style:
    """Tell from the schema of its actions how an environment is spoken to."""
    fields = set(_properties(action)) - {HIDDEN}
    calls_tools = {"tool_name", "arguments"} <= fields
    # The base class of all actions has no fields of its own: an MCP server stands behind it.
    anything = not fields and not _options(action)
    return Style.MCP if calls_tools or anything else Style.TYPED


def typed_tools(action: Mapping[str, Any]) -> list[Tool]:
    """The tools of an action model.

    Args:
        action: Its JSON schema.

    Raises:
        ProtocolError: The schema names a definition that it does not have.
    """
    definitions = action.get("$defs", {})
    if not (options := _options(action)):
        return [_typed("step", action, definitions, {})]
    key = action.get("discriminator", {}).get("propertyName")
    tools = []
    for option in options:
        model = _resolved(option, definitions)
        value = _properties(model).get(key, {}).get("const") if key else None
        name = value if isinstance(value, str) else _class_words(model.get("title", "step"))
        tools.append(_typed(_identifier(name), model, definitions, {} if value is None else {key: value}))
    return tools


def mcp_tools(listed: Any) -> list[Tool]:
    """The tools that an environment listed.

    Raises:
        ProtocolError: The list is not one.
    """
    if not isinstance(listed, list):
        raise ProtocolError("the answer to `list_tools` has no list of `tools`")
    return [_mcp(entry) for entry in listed]


def _mcp(entry: Any) -> Tool:
    known = (
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("input_schema"), dict)
    )
    if not known or not isinstance(entry.get("description"), str):
        raise ProtocolError(f"the answer to `list_tools` has {entry!r}, which describes no tool")
    name, schema = entry["name"], entry["input_schema"]
    description = entry["description"].strip() or f"Call {name}."
    return Tool({"name": _identifier(name), "description": description, "parameters": schema}, mcp=name)


def _typed(name: str, model: Mapping[str, Any], definitions: Mapping[str, Any], fixed: Mapping[str, Any]) -> Tool:
    hidden = {HIDDEN, *fixed}
    properties = {key: value for key, value in _properties(model).items() if key not in hidden}
    required = [key for key in model.get("required", []) if key not in hidden]
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if '"$ref"' in json.dumps(properties):
        parameters["$defs"] = dict(definitions)
    description = model.get("description") or f"Take the action {model.get('title', name)}."
    return Tool({"name": name, "description": description, "parameters": parameters}, fixed)


def _options(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema.get("oneOf") or schema.get("anyOf") or [])


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    model = schema if reference is None else definitions.get(str(reference).removeprefix("#/$defs/"))
    if not isinstance(model, Mapping):
        raise ProtocolError(f"the schema of the actions has an option {schema!r} that it does not define")
    return model


def _class_words(name: str) -> str:
    """The name of a class as that of a tool: `TakeLamp` becomes `take_lamp`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _identifier(name: str) -> str:
    """A name without anything that a name of a tool may not have."""
    return re.sub(r"[^\w.-]+", "_", name)
