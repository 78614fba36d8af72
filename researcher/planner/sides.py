"""Which of a topic's levels are treatments, and which are baselines.

Works on tokens and levels that are already known; refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.planner.levels import Level
from researcher.planner.wording import BETTER, LESS, MORE, WORSE, Token, words

COPULAS = words("is are be was were get become becoming becomes goe go stay remain end")
AGAINST = words(
    "than beat beating outperform outperforms outperforming exceed exceeding surpass surpassing overtake dominate instead rather over > < >= <="
)
BESIDE = words("against vs versus compared compare relative")
_BEATING = AGAINST - words("instead rather over")
_AHEAD = words("compared relative instead rather against")
"""Before the first level, with a comma behind it: `compared to 8, is 16 better?`"""
_CHANGES = words(
    "from change changing switch switching go going move moving replace replacing raise raising increase increasing lower "
    "lowering reduce reducing decrease decreasing drop dropping"
)
_SUFFICING = words("suffice enough sufficient adequate")


@dataclass(frozen=True, slots=True)
class Opposition:
    """Which levels are treatments and which are baselines, in the order of the topic."""

    treatments: tuple[Level, ...]
    baselines: tuple[Level, ...]


def oppose(found: Sequence[Token], levels: Sequence[Level], default: object) -> Opposition:
    """Set levels against each other.

    What follows `than`, `beat`, `instead of` is the baseline; `from A to B` makes A the baseline; of two levels without such
    a word the second is the baseline, but for `does A do, or is B better`; of more the default is, else the first.
    """
    first, last = levels[0].at, levels[-1].at
    marked = _marked_baseline(found, levels)
    if marked is not None:
        return Opposition(tuple(level for level in levels if level is not marked), (marked,))
    if len(levels) == 2 and (_is_change(found, first, last) or _is_arrow(found, first, last)):
        return Opposition((levels[1],), (levels[0],))
    for markers, repeatable in ((AGAINST, False), (BESIDE, len(levels) > 2)):
        cuts = [i for i in range(first, last) if found[i].key in markers]
        if cuts and not (repeatable and len(cuts) > 1):
            before = tuple(level for level in levels if level.at < cuts[-1])
            return Opposition(before, tuple(level for level in levels if level.at > cuts[-1]))
    ahead = {token.key for token in found[max(0, first - 8) : first]}
    if ahead & _AHEAD and _comma_between(found, levels):
        return Opposition(tuple(levels[1:]), (levels[0],))
    if len(levels) == 2:
        asked_last = _asks_of_last(found, first, last)
        return Opposition((levels[asked_last],), (levels[not asked_last],))
    baseline = next((level for level in levels if level.value == default), levels[0])
    return Opposition(tuple(level for level in levels if level is not baseline), (baseline,))


def speaks_of_baseline(found: Sequence[Token], opposition: Opposition) -> bool:
    """`is the baseline of 8 worse than 16?`: what is claimed is claimed of the baseline."""
    if len(opposition.treatments) != 1 or len(opposition.baselines) != 1:
        return False
    treatment, baseline = opposition.treatments[0], opposition.baselines[0]
    between = {token.key for token in found[max(0, baseline.at) : max(0, treatment.at)]}
    return _marked_baseline(found, [baseline]) is not None and bool(between & _BEATING)


def _asks_of_last(found: Sequence[Token], first: int, last: int) -> bool:
    """`do 15 steps suffice, or are 25 better?`, `is 8 enough, or does 16 learn faster?`: the claim is the second level's."""
    compares = BETTER | WORSE | MORE | LESS
    if key_at(found, last - 1) in COPULAS and key_at(found, last + 1) in compares:
        return True
    sufficing = any(token.key in _SUFFICING for token in found[first:last])
    return sufficing and any(key_at(found, i) in compares for i in range(last + 1, last + 6))


def is_set_against(found: Sequence[Token], first: int, last: int, *, listed: bool = True) -> bool:
    """Whether a word of comparing stands between two tokens, or one of listing."""
    between = {token.key for token in found[first:last]}
    lists = {"and", "or", "/", ",", "to", "be", "->", "=>", "equal", "match", "as"} if listed else set()
    return bool(between & (AGAINST | BESIDE | lists))


def _marked_baseline(found: Sequence[Token], levels: Sequence[Level]) -> Level | None:
    for level in levels:
        near = [key_at(found, level.at + step) for step in (-3, -2, -1, 1)]
        if any(key in ("baseline", "control", "reference") for key in near):
            return level
    return None


def _is_change(found: Sequence[Token], first: int, last: int) -> bool:
    """`from 4 to 8`, `raise the group size 4 to 8`, `replace 4 by 8`."""
    between = [token.key for token in found[first:last]]
    if not set(between) & {"to", "by", "with"} or set(between) & (AGAINST | BESIDE | {"and", "or"}):
        return False
    return any(token.key in _CHANGES for token in found[:first])


def _is_arrow(found: Sequence[Token], first: int, last: int) -> bool:
    """`4 -> 8`."""
    return any(token.key in ("->", "=>") for token in found[first:last])


def _comma_between(found: Sequence[Token], levels: Sequence[Level]) -> bool:
    return any(found[i].key == "," for i in range(levels[0].at, levels[1].at))


def key_at(found: Sequence[Token], i: int) -> str:
    """A token's key; nothing beyond either end."""
    return found[i].key if 0 <= i < len(found) else ""
