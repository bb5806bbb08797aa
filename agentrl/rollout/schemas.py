"""From a Python callable to the tool schema that the model reads, or a clear word on what is missing.

The schema is transformers' (`get_json_schema`): name, type hints and the Google-style docstring. Partials and
callable objects have no hints or docstring of their own, so they are described through what they call;
arguments that a partial fixes are hidden from the model.
"""

from __future__ import annotations

import functools
import inspect
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
