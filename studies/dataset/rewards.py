"""Rewards by name: how an answer is compared with what the data set expects. Right 1.0, wrong 0.1, empty 0.0."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from .mathematics import value_of

RIGHT, WRONG, EMPTY = 1.0, 0.1, 0.0
LONGEST = 4000
"""Characters of an answer that are looked at."""
_NUMBER = re.compile(r"-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?")
_EQUALS = re.compile(r"(?<![<>!])=")
"""What stands before an answer; no part of another relation."""
_BARE = r"\\boxed\s*(?P<bare>-?\d[\d.,/]*+(?:\\?%)?+)(?!\w|[ \t]*(?:[\^*+]|-(?![ \t]+[^\W\d_]{2})))"
"""A number that is boxed without braces, and no arithmetic that goes on behind it; a dash before a word is none."""
_BRACES = re.compile(rf"(?P<box>\\boxed\s*\{{)|{_BARE}|\\\\|\\[{{}}]|(?P<open>\{{)|(?P<close>\}})")
"""`\\{` and `\\}` are signs and group nothing."""
_NOT_BEFORE, _NOT_BEHIND = r"(?<!\d[.,])(?<![^\w.]\.)(?<!\A\.)(?<!\d[eE][-+])(?<!(?<!\w)[-−–])", r"(?![.,]\d)"
"""What makes a number part of another, or negative: a hyphen behind a letter or digit (`COVID-19`, `2-3`) is no sign."""


@dataclass(frozen=True, slots=True)
class Reward:
    """right(answer, expected): whether it counts. problem(expected): why nothing could ever be compared with it; None if it can."""

    right: Callable[[str, str], bool]
    problem: Callable[[str], str | None]


def score(name: str, answer: str, expected: str) -> float:
    """What an answer is worth by the reward of this name."""
    answer = answer[:LONGEST].strip()
    if not answer:
        return EMPTY
    return RIGHT if REWARDS[name].right(answer, expected) else WRONG


def _exact(answer: str, expected: str) -> bool:
    """The same text, but for white space around it."""
    return answer == expected.strip()


def _contains(answer: str, expected: str) -> bool:
    """The expected text stands in the answer as words and numbers of its own, in whatever case: 3 does not stand in 3.14 or -3."""
    wanted = expected.strip()
    before = _NOT_BEFORE if wanted[:1].isdigit() else ""
    behind = _NOT_BEHIND if wanted[-1:].isdigit() else ""
    return re.search(rf"(?<!\w){before}{re.escape(wanted)}(?!\w){behind}", answer, re.IGNORECASE) is not None


def _regex(answer: str, expected: str) -> bool:
    """The expected text is a pattern, which is found in the answer."""
    return re.search(expected, answer) is not None


def _number(answer: str, expected: str) -> bool:
    """The last number in the answer is the last number in what is expected (`#### 42` in GSM8K's solutions)."""
    said, wanted = last_number(answer), last_number(expected)
    return said is not None and said == wanted


def _math(answer: str, expected: str) -> bool:
    """Mathematically equal: 1/2, 0.5, 50%, \\frac{1}{2} and \\boxed{2^{-1}} are; what is no arithmetic has to be the same text."""
    said, wanted = _final(answer), _final(expected)
    one, other = value_of(said), value_of(wanted)
    if one is not None and other is not None:
        return one == other
    return _plain(said) == _plain(wanted)


def last_number(text: str) -> Fraction | None:
    """Exactly; thousands may be set off by commas."""
    found = _NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None


def _final(text: str) -> str:
    """What counts of a solution: the last \\boxed{}, else what follows the last equals sign of the last line."""
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return _EQUALS.split(lines[-1])[-1] if lines else ""


def _boxed(text: str) -> str | None:
    """What stands in the last \\boxed{} that is closed, however deep its braces nest; a number needs none."""
    found: str | None = None
    begun: list[int | None] = []
    for brace in _BRACES.finditer(text):
        if brace["box"]:
            begun.append(brace.end())
        elif brace["bare"]:
            found = brace["bare"].rstrip(".,")
        elif brace["open"]:
            begun.append(None)
        elif brace["close"] and begun and (start := begun.pop()) is not None:
            found = text[start : brace.start()]
    return found


def _plain(text: str) -> str:
    return re.sub(r"\s|\\?\$", "", text).rstrip(".").lower()


def _no_text(expected: str) -> str | None:
    return None if expected.strip() else "is empty"


def _no_pattern(expected: str) -> str | None:
    try:
        re.compile(expected)
    except re.error as error:
        return f"is no pattern ({error})"
    return _no_text(expected)


def _nothing(expected: str) -> str | None:
    """A text of which `_final` leaves nothing would be equal to every answer that ends so."""
    return _no_text(expected) or (None if _plain(_final(expected)) else "holds nothing to compare with")


def _no_number(expected: str) -> str | None:
    try:
        return None if last_number(expected) is not None else "holds no number"
    except ValueError:  # Python's own bound on the digits of an integer
        return "holds a number that is too long"


REWARDS: dict[str, Reward] = {
    "exact": Reward(_exact, _no_text),
    "contains": Reward(_contains, _no_text),
    "regex": Reward(_regex, _no_pattern),
    "number": Reward(_number, _no_number),
    "math": Reward(_math, _nothing),
}
