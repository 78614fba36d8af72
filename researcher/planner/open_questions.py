"""Topics that ask and claim nothing: which of the levels, or what in a range.

Works on tokens and on where levels stand; what a topic claims, `claims` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from researcher.planner.sides import AGAINST, BESIDE
from researcher.planner.wording import ASKING, BETTER, LESS, MORE, SENTENCE_ENDS, WORSE, Token, sentences, words

_CHOICES_BETWEEN = words("difference differ gap choose choice compare comparison distinguish")
"""`difference between A and B` names two levels; `between A and B` alone may mean a range."""


def favours_none(found: Sequence[Token]) -> bool:
    """`which reaches a higher reward, 8 or 16?`"""
    keys = [token.key for token in found]
    heads = [i for i, key in enumerate(keys) if key == "which" and (i == 0 or found[i - 1].kind == "mark")]
    return bool(heads) and not set(keys[heads[0] :]) & (AGAINST | BESIDE)


def is_range(found: Sequence[Token], levels: Sequence[int]) -> bool:
    """`between 4 and 16`, `in the range 4 to 16`, `4 up to 16`; not `the difference between 4 and 16`, `from 4 (up) to 16`.

    levels: tokens that are levels, in order.
    """
    first = levels[0] if levels else 0
    ahead = {token.key for token in found[max(0, first - 5) : max(0, first)]}
    if ahead & _CHOICES_BETWEEN:
        return False
    between = [token.key for token in found[first : levels[1]] if token.kind == "word"] if len(levels) == 2 else []
    up_to = between == ["up", "to"] and "from" not in ahead
    return "between" in ahead or up_to or (between == ["to"] and "range" in ahead)


def asks_which(found: Sequence[Token], levels: Sequence[int]) -> bool:
    """`do 3 or 5 numbers make it harder?`, with nothing claimed before; not `is it harder with 3 or 5 than with 1?`.

    levels: tokens that are the two levels, in order.
    """
    if len(levels) != 2 or levels[0] < 0:
        return False
    own = next(each for each in sentences(found, SENTENCE_ENDS) if levels[0] in each)
    ahead = {found[i].key for i in range(own.start, min(levels[1], own.stop))}
    between = {token.key for token in found[levels[0] : levels[1]]}
    opens = found[own.start].key in ASKING and levels[1] in own and "or" in between
    compares = ahead & (BETTER | WORSE | MORE | LESS) or between & (ASKING | {",", "not"})
    return opens and not compares and not {found[i].key for i in own} & (AGAINST | BESIDE)
