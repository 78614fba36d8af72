"""Defects of several kinds, put into a function's code. Pure: source in, source out."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator

KINDS = ("comparison", "operator", "constant", "name", "missing")
"""comparison: another one. operator: + for -, // for %, `and` for `or`, min for max. constant: a number one too large or too small.
name: another variable. missing: a statement is left out."""
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Div: ast.FloorDiv,
}
_CALLS = {"min": "max", "max": "min", "lower": "upper", "isalnum": "isalpha"}


def broken(source: str, kind: str, rng: random.Random) -> Iterator[str]:
    """The source with one defect of this kind, in each of its possible places, in an order that is drawn.

    It may be that some change nothing that can be seen. Raises: ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"defect must be one of {', '.join(KINDS)}, got {kind!r}")
    tree = ast.parse(source)
    count = sum(1 for _ in _changes(copy.deepcopy(tree), kind))
    for place in rng.sample(range(count), count):
        changed = copy.deepcopy(tree)
        for number, change in enumerate(_changes(changed, kind)):
            if number == place:
                change()
                break
        yield ast.unparse(ast.fix_missing_locations(changed)) + "\n"


class _Change:
    """One defect, not made yet: what `make` does to the tree."""

    def __init__(self, place: object, field: str, value: object) -> None:
        self._place, self._field, self._value = place, field, value

    def __call__(self) -> None:
        setattr(self._place, self._field, self._value)


def _changes(tree: ast.Module, kind: str) -> list[_Change]:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    body = [node for statement in function.body[1:] for node in ast.walk(statement)]  # its docstring stays
    if kind == "missing":
        return _left_out(function)
    if kind == "name":
        return _renamed(function, body)
    return [change for node in body for change in _of_node(node, kind)]


def _of_node(node: ast.AST, kind: str) -> list[_Change]:
    if kind == "comparison" and isinstance(node, ast.Compare):
        return [
            _Change(node, "ops", [*node.ops[:at], _COMPARISONS[type(op)](), *node.ops[at + 1 :]])
            for at, op in enumerate(node.ops)
            if type(op) in _COMPARISONS
        ]
    if kind == "constant" and isinstance(node, ast.Constant) and type(node.value) is int:
        return [_Change(node, "value", node.value + by) for by in (1, -1) if node.value + by >= 0]
    if kind != "operator":
        return []
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        return [_Change(node, "op", _OPERATORS[type(node.op)]())]
    if isinstance(node, ast.BoolOp):
        return [_Change(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())]
    if isinstance(node, ast.Name) and node.id in _CALLS:
        return [_Change(node, "id", _CALLS[node.id])]
    if isinstance(node, ast.Attribute) and node.attr in _CALLS:
        return [_Change(node, "attr", _CALLS[node.attr])]
    return []


def _renamed(function: ast.FunctionDef, body: list[ast.AST]) -> list[_Change]:
    """Another variable of the function where one is read."""
    own = [argument.arg for argument in function.args.args]
    own += sorted({node.id for node in body if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)})
    read = [node for node in body if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in own]
    return [_Change(node, "id", other) for node in read for other in own if other != node.id]


def _left_out(function: ast.FunctionDef) -> list[_Change]:
    """A statement becomes `pass`, or is gone where others stand beside it."""
    found: list[_Change] = []
    for block in ast.walk(function):
        for field in ("body", "orelse"):
            statements = getattr(block, field, None)
            if not isinstance(statements, list):
                continue
            first = 1 if block is function else 0
            for at in range(first, len(statements)):
                if isinstance(statements[at], ast.Return) and block is function and len(statements) == 2:
                    continue  # nothing would be left of it
                left = [*statements[:at], *statements[at + 1 :]]
                found.append(_Change(block, field, left if left or field == "orelse" else [ast.Pass()]))
    return found
