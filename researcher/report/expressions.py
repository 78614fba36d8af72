"""A small expression language over a study's records: the words of `vocabulary.py`, their fields, and + - * /.

    effect("H1").diff      mean("auc_reward", arm="lr=1e-05")      count_trials(status="done") / count_trials()

Expressions are parsed by `ast` and evaluated node by node; unknown nodes are refused. `eval` is never used.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping

from researcher.report.records import Records
from researcher.report.vocabulary import WORDS, Answer, Value, Vocabulary

LONGEST = 500
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class BadExpression(ValueError):
    """Raised for an expression outside the language. The message names the part that is wrong."""


class Evaluator:
    """Evaluates expressions over the records of one study."""

    def __init__(self, records: Records) -> None:
        self._vocabulary = Vocabulary(records)

    def value(self, expression: str) -> Value:
        """Evaluate the expression; None if the records lack its value.

        Raises: BadExpression; UnknownName; RecordsDisagree when a stored number differs from its series.
        """
        if len(expression) > LONGEST:
            raise BadExpression(f"an expression may have at most {LONGEST} characters; this one has {len(expression)}")
        try:
            tree = ast.parse(expression, mode="eval")
        except (SyntaxError, ValueError) as error:
            raise BadExpression(f"{expression!r} is not a valid expression: {error}") from error
        try:
            found = self._answer(tree.body)
        except RecursionError as error:
            raise BadExpression(f"{expression!r} is nested too deeply") from error
        if isinstance(found, Mapping):
            raise BadExpression(f"{expression!r} has several fields; name one of {sorted(found)}")
        if isinstance(found, int):
            _refuse_huge(found)
        return None if isinstance(found, float) and not math.isfinite(found) else found

    def _answer(self, node: ast.expr) -> Answer:
        match node:
            case ast.Constant(value=bool()):
                raise BadExpression("this language has no true and false")
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self._number(operand)
                return None if number is None else -number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._compute(_OPERATORS[type(op)], left, right)
            case ast.Attribute(value=owner, attr=field):
                return self._field(owner, field)
            case ast.Call(func=ast.Name(id=word), args=args, keywords=keywords):
                return self._ask(word, args, keywords)
        raise BadExpression(f"{ast.unparse(node)!r} is not part of the language")

    def _compute(self, how: Callable[[float, float], float], left: ast.expr, right: ast.expr) -> Value:
        a, b = self._number(left), self._number(right)
        if a is None or b is None or (how is operator.truediv and b == 0):
            return None
        return how(a, b)

    def _number(self, node: ast.expr) -> float | int | None:
        found = self._answer(node)
        if found is None or isinstance(found, float):
            return found
        if isinstance(found, int):
            return _refuse_huge(found)
        raise BadExpression(f"{ast.unparse(node)!r} is not a number")

    def _field(self, owner: ast.expr, field: str) -> Value:
        found = self._answer(owner)
        if found is None:
            return None
        if not isinstance(found, Mapping) or field not in found:
            raise BadExpression(f"{ast.unparse(owner)!r} has no field {field!r}")
        return found[field]

    def _ask(self, word: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Answer:
        if word not in WORDS:
            raise BadExpression(f"{word!r} is not a word of the language; known words: {', '.join(sorted(WORDS))}")
        named = {keyword.arg: _literal(keyword.value) for keyword in keywords if keyword.arg is not None}
        if len(named) != len(keywords):
            raise BadExpression(f"{word}(**…) is not part of the language")
        ask: Callable[..., Answer] = getattr(self._vocabulary, word)
        try:
            return ask(*map(_literal, args), **named)
        except TypeError as error:
            raise BadExpression(f"{word}: {error}") from error


def call(word: str, *args: str | int, **named: str | int) -> str:
    """Format a call as text: `call("final", "auc", arm="a", seed=0)` gives `final("auc", arm="a", seed=0)`."""
    parts = [_quoted(arg) for arg in args] + [f"{name}={_quoted(value)}" for name, value in named.items()]
    return f"{word}({', '.join(parts)})"


def _quoted(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse_huge(number: int) -> int:
    """Return the number. Raises: BadExpression if it is too large for a float, because nothing could be compared with it."""
    try:
        float(number)
    except OverflowError as error:
        raise BadExpression(f"a number of {len(str(abs(number)))} digits is too large") from error
    return number


def _literal(node: ast.expr) -> str | int | float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str | int | float)
        and not isinstance(node.value, bool)
    ):
        return node.value
    raise BadExpression(f"an argument must be a text or a number, not {ast.unparse(node)!r}")
