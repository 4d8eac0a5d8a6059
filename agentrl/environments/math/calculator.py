"""Arithmetic on text: exact, and bounded in time and size."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from math import isfinite

from agentrl.schemas.syntax import expression_tree

LONGEST = 200
"""Characters of an expression."""
LARGEST_BITS = 4096
"""Bits of a number on the way."""

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, ``+ - * / // % **`` and brackets.

    Raises ValueError that says what is wrong.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"{len(expression)} characters are too many; at most {LONGEST} are allowed")
    try:
        tree = expression_tree(expression.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is no arithmetic; write it as in (3+4)*5") from None
    return _value(tree.body)


def shown(value: Fraction) -> str:
    """A number as text: whole, or with up to ten places after the point."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10f}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and isfinite(number):
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first, second = _value(left), _value(right)
            if second == 0 and isinstance(sign, ast.Div | ast.FloorDiv | ast.Mod):
                raise ValueError("division by zero")
            return _bounded(Fraction(_OPERATORS[type(sign)](first, second)))
    raise ValueError("only numbers, + - * / // % ** and brackets are allowed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > 1000:
        raise ValueError("exponents are whole numbers from -1000 to 1000")
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(int(exponent))
    if size > LARGEST_BITS:
        raise ValueError("the result is too large")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise ValueError("the result is too large")
    return value
