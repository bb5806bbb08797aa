"""The tool schema that the model reads, from a Python callable or as written by hand, or a word on what is missing.

From a callable the schema is transformers' (`get_json_schema`): name, type hints and the Google-style
docstring. Partials and callable objects have no hints or docstring of their own, so they are described
through what they call; arguments that a partial fixes are hidden from the model.

A schema written by hand, or given by an MCP server, is brought into the same (OpenAI) form and checked
against the callable that stands behind it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import parse_google_format_docstring

from agentrl.errors import ToolDefinitionError

EXAMPLE = '''
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """'''


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, of what a partial calls, or of a callable object's class."""
    named = getattr(function, "__name__", None)
    if isinstance(named, str):
        return named
    if isinstance(function, functools.partial):
        return function_name(function.func)
    return type(function).__name__


def tool_schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """The JSON schema of a tool in OpenAI form.

    Args:
        function: Function, partial, callable object or bound method.
        where: How error messages name it.

    Raises:
        ToolDefinitionError: It has no usable name, docstring, hints or argument descriptions.
    """
    name = function_name(function)
    if not name.isidentifier():
        raise ToolDefinitionError(f"{where} needs a name: define it with `def`, or set its `__name__`")
    source = _source(function)
    if inspect.isgeneratorfunction(source) or inspect.isasyncgenfunction(source):
        raise ToolDefinitionError(f"{where} yields its results; a tool must return one result")
    doc = inspect.getdoc(source) or _class_doc(function)
    if not doc:
        raise ToolDefinitionError(f"{where} has no docstring. Write one in Google style, such as:\n{EXAMPLE}")
    parameters = _parameters(function, source, where)
    described = parse_google_format_docstring(doc.strip())[1] or {}
    if undescribed := [argument for argument in parameters if argument not in described]:
        raise ToolDefinitionError(
            f"{where} does not describe the argument(s) {_names(undescribed)} in its docstring. Add a line "
            f"for each to the `Args:` section, such as:\n{EXAMPLE}"
        )
    try:
        return get_json_schema(_described(name, doc, parameters, source))
    except Exception as error:  # its kinds of error have no common base
        raise ToolDefinitionError(f"{where} cannot be described to the model: {error}") from error


def _source(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that holds hints and docstring."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _class_doc(function: Callable[..., Any]) -> str | None:
    while isinstance(function, functools.partial):
        function = function.func
    return None if inspect.isroutine(function) else inspect.cleandoc(type(function).__doc__ or "")


def _parameters(function: Callable[..., Any], source: Callable[..., Any], where: str) -> dict[str, inspect.Parameter]:
    """The arguments that the model gives, with resolved hints."""
    try:
        signature, hints = inspect.signature(function), get_type_hints(source)
    except (NameError, TypeError, ValueError) as error:
        raise ToolDefinitionError(f"the signature of {where} cannot be read: {error}") from error
    fixed: Mapping[str, Any] = function.keywords if isinstance(function, functools.partial) else {}
    parameters = {name: p for name, p in signature.parameters.items() if name not in fixed}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolDefinitionError(
                f"{where} takes `{parameter}`, which cannot be described to the model; name each argument"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolDefinitionError(f"{where} takes {name!r} by position only; tools are called by keyword")
    if untyped := [name for name in parameters if name not in hints]:
        raise ToolDefinitionError(
            f"{where} has no type hint for the argument(s) {_names(untyped)}. Add them, such as:\n{EXAMPLE}"
        )
    return {name: parameter.replace(annotation=hints[name]) for name, parameter in parameters.items()}


def _described(
    name: str, doc: str, parameters: Mapping[str, inspect.Parameter], source: Callable[..., Any]
) -> Callable[..., Any]:
    """A plain function that carries exactly what `get_json_schema` reads."""

    def described() -> None: ...

    described.__name__ = name
    described.__doc__ = doc
    described.__annotations__ = {argument: parameter.annotation for argument, parameter in parameters.items()}
    if "return" in (hints := get_type_hints(source)):
        described.__annotations__["return"] = hints["return"]
    described.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()]
    )
    return described


def _names(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)


def explicit_schema(description: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Bring the description of a tool into OpenAI form.

    Args:
        description: `{"type": "function", "function": {...}}`, that function object itself (`name`,
            `description`, `parameters`), or a tool as MCP lists it (`name`, `description`, `inputSchema`). The
            schema of the arguments may be nested as JSON Schema allows; it may be absent for a tool without any.
        function: What runs.

    Returns:
        A new schema; `parameters` has at least `type` and `properties`.

    Raises:
        ToolDefinitionError: It has no name or description, its arguments are not described as an object, it
            cannot be written as JSON, or the function does not take what it describes.
    """
    given = description.get("function", description)
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not name or name.split() != [name]:
        raise ToolDefinitionError(f"the tool description {dict(description)!r} needs a `name` without spaces")
    where = f"the tool {name!r}"
    text = given.get("description") or given.get("title")
    if not isinstance(text, str):
        raise ToolDefinitionError(f"{where} needs a `description`, which tells the model what it does")
    parameters = given.get("parameters", given.get("inputSchema"))
    parameters = {} if parameters is None else parameters
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or parameters.get("type", "object") != "object":
        raise ToolDefinitionError(
            f"{where} must describe its arguments as a JSON schema of the type object with `properties` "
            f"(under `parameters`, or `inputSchema` as MCP has it), not {parameters!r}"
        )
    required = parameters.get("required", [])
    if unknown := [argument for argument in required if argument not in properties]:
        raise ToolDefinitionError(f"{where} requires {_names(unknown)}, which its `properties` do not describe")
    try:
        json.dumps(parameters)
    except (TypeError, ValueError) as error:
        raise ToolDefinitionError(f"the arguments of {where} cannot be written as JSON: {error}") from error
    _check_signature(function, properties, required, where)
    parameters = {"type": "object", "properties": {}, **copy.deepcopy(dict(parameters))}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def _check_signature(
    function: Callable[..., Any], properties: Mapping[str, Any], required: list[str], where: str
) -> None:
    """Refuse a function that cannot be called with what its description promises."""
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin, say
        return
    by_keyword = {name for name, p in taken.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    if not open_ended and (missing := [name for name in properties if name not in by_keyword]):
        raise ToolDefinitionError(f"{where} describes {_names(missing)}, but {function!r} takes no such argument")
    needed = [name for name in by_keyword if taken[name].default is inspect.Parameter.empty]
    if forgotten := sorted(name for name in needed if name not in required):
        raise ToolDefinitionError(
            f"{function!r} cannot be called without {_names(forgotten)}, but the description of {where} does not "
            "require that: add it to `required`, or give it a default"
        )
