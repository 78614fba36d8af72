"""The numbers of a report. Each is a claim: a name, an expression, its value, and its printed text.

All formatting happens here: templates and drawings never format numbers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum

from researcher.analysis.power import MOST_SEEDS
from researcher.instruments.instrument import Metric
from researcher.models import Claim
from researcher.report.expressions import Evaluator
from researcher.report.records import Records
from researcher.report.vocabulary import Value

ABSENT = "not measured"


class Style(StrEnum):
    """How to print a value. VALUE and DIFF use the number of decimals that suits the metric (`decimals_of`)."""

    WORD = "word"
    COUNT = "count"
    SEEDS = "seeds"
    VALUE = "value"
    DIFF = "diff"
    PLAIN = "plain"
    PERCENT = "percent"
    LEVEL = "level"
    P = "p"
    SECONDS = "seconds"
    SHORT = "short"


class Ledger:
    """Collects the claims of one report in the order in which they are added."""

    def __init__(self, records: Records) -> None:
        self._evaluator = Evaluator(records)
        self._claims: dict[str, Claim] = {}

    @property
    def claims(self) -> list[Claim]:
        return list(self._claims.values())

    def claim(self, name: str, expression: str, style: Style, decimals: int = 0) -> Claim:
        """Evaluate an expression and add it as a claim.

        Raises: ValueError when the name already belongs to another claim; also whatever `Evaluator.value` raises.
        """
        value = self._evaluator.value(expression)
        made = Claim(name=name, expression=expression, value=value, text=printed(value, style, decimals))
        known = self._claims.setdefault(name, made)
        if known != made:
            raise ValueError(f"claim {name!r} is already {known.expression}; give {expression} a different name")
        return known

    def claims_of(self, prefix: str, asked: Mapping[str, tuple[str, Style]], decimals: int = 0) -> dict[str, Claim]:
        """Add a claim for each entry of `asked`, which maps names to (expression, style). Claims are called `PREFIX.NAME`; returned by
        NAME.
        """
        return {name: self.claim(f"{prefix}.{name}", text, style, decimals) for name, (text, style) in asked.items()}

    def fields(self, prefix: str, expression: str, styles: Mapping[str, Style], decimals: int = 0) -> dict[str, Claim]:
        """Add a claim for each of these named fields of an expression's value. `styles` maps fields to how to print them."""
        asked = {name: (f"{expression}.{name}", style) for name, style in styles.items()}
        return self.claims_of(prefix, asked, decimals)


def decimals_of(metric: Metric) -> int:
    """Return the number of decimals needed to show a fiftieth of the metric's margin."""
    return max(0, math.ceil(-math.log10(metric.margin / 50))) if metric.margin > 0 else 3


def printed(value: Value, style: Style, decimals: int = 0) -> str:
    """Format `value` for the report; `ABSENT` for None."""
    if value is None:
        return ABSENT
    if isinstance(value, str):
        return value[:12] if style is Style.SHORT else value
    if style in (Style.VALUE, Style.DIFF):
        return _fixed(value, decimals, signed=style is Style.DIFF)
    return _PRINTERS[style](value)


def _fixed(value: float, decimals: int, *, signed: bool = False) -> str:
    rounded = round(value, decimals) + 0.0  # no negative zero
    sign = "−" if rounded < 0 else "+" if signed and rounded > 0 else ""
    return f"{sign}{abs(rounded):,.{decimals}f}"


def _count(value: float) -> str:
    return _fixed(value, 0)


def _seeds(value: float) -> str:
    return f"{_count(MOST_SEEDS)} or more" if value >= MOST_SEEDS else _count(value)


def _plain(value: float) -> str:
    """Format three significant digits; small and large numbers get a power of ten."""
    if value == int(value) and abs(value) < 1e6:
        return _count(value)
    return f"{value:.3g}".replace("-", "−", 1) if value < 0 else f"{value:.3g}"


def _percent(value: float) -> str:
    share = 100 * value
    if 99.95 <= share < 100:
        return "above 99.9 %"
    return f"{share:.0f} %" if math.isclose(share, round(share), abs_tol=1e-9) else f"{share:.1f} %"


def _level(value: float) -> str:
    """Format the confidence level of an interval. A level close to 100 % keeps the digits that distinguish it from 100 %."""
    share = 100 * value
    if share < 99.95:
        return _percent(value)
    text = f"{share:.8g}"
    return "above 99.99999 %" if text == "100" else f"{text} %"


def _p(value: float) -> str:
    return "below 0.001" if value < 0.001 else f"{value:.3f}"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


_PRINTERS: dict[Style, Callable[[float], str]] = {
    Style.WORD: _plain,
    Style.COUNT: _count,
    Style.SEEDS: _seeds,
    Style.PLAIN: _plain,
    Style.PERCENT: _percent,
    Style.LEVEL: _level,
    Style.P: _p,
    Style.SECONDS: _seconds,
    Style.SHORT: _plain,
}
