"""Arithmetic expressions in an answer: found, read, worked out exactly. Nothing is ever executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 120
"""Characters of an expression that is still read."""
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_MARKUP = re.compile(r"\\[()\[\]]|[$`]|(?<![\d)])\*\*|\*\*(?![\d(])|^[ \t]*[-+*][ \t]+(?=\S)", re.MULTILINE)
"""What sets an expression off: LaTeX's and Markdown's signs, bold print (no power), the sign of an item in a list."""
_RUN = re.compile(r"[\d+\-*/() ]+")
_AFTER = re.compile(r"(?: -+ | \()\s*$")
"""A dash or a parenthesis with which the sentence goes on."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Numbers joined by + - * / and parentheses. numbers: in their order. value: exact."""

    numbers: tuple[int, ...]
    value: Fraction


def numbers_in(answer: str) -> list[int]:
    return [int(digits[:18]) for digits in re.findall(r"\d+", answer)]


def last_expression(answer: str) -> Expression | None:
    """The last expression of two numbers or more; of `3 + 5 = 8` what stands before the equals sign. None without any."""
    for part in reversed(_RUN.findall(_MARKUP.sub("\n", answer).translate(_SIGNS))):
        expression = read(_trimmed(part))
        if expression is not None and len(expression.numbers) > 1:
            return expression
    return None


def _trimmed(part: str) -> str:
    """Without what belongs to the sentence around it: a dash or a parenthesis after it, those of its own that nothing closes."""
    part = _AFTER.sub("", part).strip()
    surplus = part.count("(") - part.count(")")
    before, after = len(part) - len(part.lstrip("(")), len(part) - len(part.rstrip(")"))
    return part[min(max(surplus, 0), before) : len(part) - min(max(-surplus, 0), after)]


def read(text: str) -> Expression | None:
    """The expression that the text is; None when it is none, or divides by zero."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        return None
    try:
        body = ast.parse(text, mode="eval").body
        numbers: list[int] = []
        return Expression(value=_worked_out(body, numbers), numbers=tuple(numbers))
    except (SyntaxError, ValueError, ZeroDivisionError):  # ValueError is also what anything but arithmetic raises here
        return None


def _worked_out(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left = _worked_out(node.left, numbers)
        return _OPERATIONS[type(node.op)](left, _worked_out(node.right, numbers))
    raise ValueError(f"{ast.dump(node)} is no arithmetic of whole numbers")
