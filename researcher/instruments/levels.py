"""Levels of factors: how people write them, which ones a factor can take, and at which level it is off."""

from __future__ import annotations

import math
import re

from foundation.nearest import MOST_NAMES, a_few
from researcher.instruments.instrument import Factor, Scalar
from swarm.protocol.algorithms import own_function

_ON, _OFF = ("on", "true", "yes"), ("off", "false", "no")


def level_text(level: Scalar) -> str:
    """Format a level as people write it: `on`, `grpo`, `4e-5`, `16`."""
    if isinstance(level, bool):
        return "on" if level else "off"
    return level if isinstance(level, str) else number_text(level)


def number_text(value: float) -> str:
    """Format a number as people write it: 4e-5, 0.7, 16."""
    text = f"{value:.10g}"
    if 0 < abs(value) < 1e-3 and "e" not in text:
        mantissa, _, exponent = f"{value:.9e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"
    return re.sub(r"e([+-]?)0*(\d)", lambda m: f"e{m.group(1).replace('+', '')}{m.group(2)}", text)


def as_level(factor: Factor, given: Scalar) -> Scalar:
    """Convert a value to the factor's type: `16.0` to 16, `"4e-5"` to a number, `"on"` to a switch.

    A value that cannot be converted is returned unchanged, and `level_problem` reports it.
    """
    if factor.type == "bool":
        word = str(given).casefold()
        return True if given == 1 or word in _ON else False if given == 0 or word in _OFF else given
    if factor.type not in ("int", "float"):
        return next((choice for choice in factor.choices if str(choice) == str(given)), given)
    if isinstance(given, str):
        try:
            given = float(given)
        except ValueError:
            return given
    if isinstance(given, bool) or not _is_finite(given):
        return given
    return int(given) if factor.type == "int" and given == int(given) else float(given)


def level_problem(factor: Factor, level: Scalar) -> str | None:
    """Explain why a factor cannot take this level; None when it can."""
    if factor.type in ("choice", "bool"):
        if level in (factor.choices or (False, True)) or (factor.takes_functions and own_function(level)):
            return None
        allowed = [*map(str, factor.choices)] if factor.type == "choice" else ["on", "off"]
        shown = allowed if len(allowed) <= MOST_NAMES else a_few(str(level), allowed)
        more = f" and {len(allowed) - len(shown)} more" if len(allowed) > len(shown) else ""
        return f"{factor.name} must be one of {', '.join(shown)}{more}, not {level}"
    if factor.type in ("text", "data"):
        return f"{factor.name} must be a text, not {level}" if not isinstance(level, str) else None
    if isinstance(level, bool | str) or not _is_finite(level):
        too_large = isinstance(level, int) and not isinstance(level, bool)
        return f"{factor.name} takes {'no number as large as this' if too_large else f'numbers, not {level}'}"
    if factor.type == "int" and level != int(level):
        return f"{factor.name} takes whole numbers, not {level:g}"
    if factor.share and not 0 < level < 1:
        return f"{factor.name} is a share and must be between 0 and 1, not {level:g}"
    if (factor.low is not None and level < factor.low) or (factor.high is not None and level > factor.high):
        low, high = ("anything" if bound is None else f"{bound:g}" for bound in (factor.low, factor.high))
        return f"{factor.name} goes from {low} to {high}; {level:g} lies outside"
    return None


def _is_finite(number: float) -> bool:
    """Return whether a float can hold the number, which may be an integer of any length."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def off_level(factor: Factor) -> Scalar | None:
    """Return the level at which the factor does nothing; None when there is none."""
    if factor.type == "bool":
        return False
    if factor.off is not None:
        return factor.off
    if factor.type in ("int", "float") and level_problem(factor, 0) is None:
        return as_level(factor, 0)
    return None


def on_level(factor: Factor) -> Scalar:
    """Return a level at which the factor has an effect: the declared `on`, the default if it has one, another choice, or 1 or 0.1."""
    if factor.on is not None or factor.default != off_level(factor):
        return factor.default if factor.on is None else factor.on
    if factor.type in ("choice", "bool"):
        return next((each for each in factor.choices if each != factor.off), True)
    return as_level(factor, 1 if factor.type == "int" else 0.1)


def moved_level(factor: Factor, way: int) -> Scalar | None:
    """Return a level clearly above (way 1) or below (way -1) the default; None if the bounds leave no room, or for unordered factors.

    Upwards, this is the declared `on` level, if any. Else the default is multiplied or divided: by 2 for integers, by 4 on a log scale
    or below 0.01, otherwise by 1.5.
    """
    if factor.type not in ("int", "float") or isinstance(factor.default, str):
        return None
    if not factor.default or (factor.on is not None and way > 0):
        return on_level(factor) if way > 0 else None
    ratio = 2.0 if factor.type == "int" else 4.0 if factor.scale == "log" or factor.default < 0.01 else 1.5
    level = factor.default * ratio**way
    level = min(level, level if factor.high is None else factor.high)
    level = max(level, level if factor.low is None else factor.low)
    moved = as_level(factor, max(1, round(level)) if factor.type == "int" else float(f"{level:.2g}"))
    return None if moved == factor.default else moved
