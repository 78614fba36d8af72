"""Parsers for JSON from people and clients, and for JSON that other programs must also be able to read.

A lone surrogate (`\\ud83d`) becomes U+FFFD. While these parsers read a large text, other threads can run between two objects
or numbers; a parser written entirely in C would not allow that.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SHORT = 80
"""Maximum number of characters of a value that an error shows."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class RepeatedName(ValueError):
    """An object has the same name twice. The attribute `name` is that name, shortened if it is long."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name[:_SHORT]!r} appears twice in one object")
        self.name = name[:_SHORT]


def loads(text: str | bytes) -> Any:
    """Parse JSON, and refuse objects that repeat a name. Accepts NaN and numbers of any size: later validation can name the field.

    Raises: RepeatedName; ValueError if the text is not JSON.
    """
    return _read(text, json.JSONDecoder(object_pairs_hook=_unique))


def loads_plain(text: str | bytes) -> Any:
    """Parse only JSON that all parsers read alike: 64-bit integers, no NaN, no infinity. Of repeated names, the last one counts.

    Raises: ValueError.
    """
    decoder = json.JSONDecoder(
        object_pairs_hook=_object, parse_int=_integer, parse_float=finite, parse_constant=_refused
    )
    return _read(text, decoder)


def _read(text: str | bytes, decoder: json.JSONDecoder) -> Any:
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = decoder.decode(text)
        if "\\ud" in text or "\\uD" in text:
            value = json.loads(_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects are nested deeper than `levels`."""
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in layer)
        layer = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(layer)


def finite(digits: str) -> float:
    """Parse a number with a point or an exponent. Raises: ValueError if it is too large for a float."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:_SHORT]} is too large for a number")
    return number


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(f"{digits[:_SHORT]} does not fit in a 64-bit integer")
    return number


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedName(next(name for index, name in enumerate(names) if name in names[:index]))
    return found
