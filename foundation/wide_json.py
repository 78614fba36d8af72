"""JSON as Python has it, with integers of any size, as fast as orjson wherever there are none over 64 bits.

Halves of characters (`\\ud83d` alone), which neither UTF-8 nor other readers take, become U+FFFD.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_WIDE = b"0" * 19
"""Digits of the smallest integer that orjson may not hold."""


def loads(raw: bytes) -> Any:
    """Raises: ValueError where it is no JSON, or too deep."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            return _read(raw.decode())
        except (ValueError, RecursionError):
            raise error from None
    try:
        return json.loads(raw) if _WIDE in raw.translate(_TO_ZEROS) else value
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def dumps(value: Any, *, sort_keys: bool = False) -> bytes:
    """Raises: TypeError or RecursionError for what is no JSON, or too deep."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except orjson.JSONEncodeError:
        return _written(value, sort_keys=sort_keys).encode()


def is_deeper(value: Any, levels: int) -> bool:
    """Whether more lists and objects than `levels` stand within each other."""
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in layer)
        layer = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(layer)


def finite(digits: str) -> float:
    """A number with a point or an exponent. Raises: ValueError where it is beyond what a computer holds."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is no number that a computer holds")
    return number


def _read(text: str) -> Any:
    value = json.loads(text, parse_constant=_refused, parse_float=finite)
    return json.loads(_written(value))


def _written(value: Any, *, sort_keys: bool = False) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
