"""The value of a piece of arithmetic, as people and LaTeX write it. Exact, bounded, and nothing is ever executed."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

LONGEST = 200
LARGEST_EXPONENT = 64
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\d))"
"""Of a command: what stands in braces, or one digit without them."""
_FRACTION = re.compile(rf"\\[dt]?frac{_ARGUMENT}{_ARGUMENT}")
_POWER = re.compile(r"\^\s*\{([^{}]*)\}")
_REWRITTEN = (
    (re.compile(r"\\(?:left|right|,|!|;|\s)|\\?\$|\\text\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:times|cdot)|×|·"), "*"),
    (re.compile(r"\\div|÷"), "/"),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\?%"), "/100"),
    (re.compile(r"−|–"), "-"),
)


def value_of(text: str) -> Fraction | None:
    """None for what is no arithmetic of numbers, too large, or undefined."""
    text = text.strip().rstrip(".")
    for pattern, instead in _REWRITTEN:
        text = pattern.sub(instead, text)
    text = _without_braces(text).replace("^", "**").strip()
    if not text or len(text) > LONGEST:
        return None
    try:
        return _worked_out(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):  # ValueError is also what anything but arithmetic raises here
        return None


def _without_braces(text: str) -> str:
    """Powers and fractions written out with parentheses, from the innermost braces outwards."""
    while (written := _FRACTION.sub(r"((\1\2)/(\3\4))", _POWER.sub(r"^(\1)", text))) != text:
        text = written
    return text


def _worked_out(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _worked_out(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _joined(node.op, _worked_out(node.left), _worked_out(node.right))
    raise ValueError(f"{ast.dump(node)} is no arithmetic")


def _joined(operation: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operation:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow() if right.denominator == 1 and abs(right) <= LARGEST_EXPONENT and _is_short(left):
            return left ** int(right)
    raise ValueError(f"{operation!r} is no arithmetic that is worked out here")


def _is_short(value: Fraction) -> bool:
    """Powers of powers grow beyond all bounds."""
    return max(abs(value.numerator), value.denominator) < 10**6
