"""A calculator: arithmetic on numbers, read as Python writes it, and nothing else of Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1000
MAX_BITS = 4096
"""Size of the largest whole number, on the way too."""

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (math.sqrt, math.exp, math.log, math.log2, math.log10, math.hypot, math.gcd)},
    **{f.__name__: f for f in (math.sin, math.cos, math.tan, math.asin, math.acos, math.atan, math.atan2)},
    **{f.__name__: f for f in (math.floor, math.ceil, math.degrees, math.radians, abs, round, min, max)},
}


def calculate(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses; pi and e; sqrt, exp, log, log2, log10, hypot, gcd, sin,
            cos, tan, asin, acos, atan, atan2, floor, ceil, degrees, radians, abs, round, min and max.

    Returns:
        The result.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARACTERS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return str(_value(tree.body))
    except SyntaxError as error:
        raise ValueError(f"this is no expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _bounded(_UNARY[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic that this calculator knows")


def _power(base: Number, exponent: Number) -> Number:
    """A power, whose size is known before it is calculated."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and int(base).bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError(f"{base} ** {exponent} has more than {MAX_BITS} bits")
    return base**exponent


def _bounded(number: Any) -> Number:
    if isinstance(number, complex):
        raise ValueError("the result is not a real number")
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise ValueError(f"a number has more than {MAX_BITS} bits")
    return number
