"""Which words of comparing belong to which name of a topic: `higher` in `a higher learning rate`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from researcher.instruments.instrument import Metric
from researcher.planner.mentions import Mention
from researcher.planner.sides import AGAINST, CLAIMING
from researcher.planner.wording import (
    ARTICLES,
    COPULAS,
    LESS,
    MORE,
    QUALITIES,
    SCALES,
    SENTENCE_ENDS,
    Token,
    before_articles,
    is_question,
    key_at,
    sentences,
    words,
)

_TO_SCALES = words("that which by a factor of as many much long high large")
"""Between a factor's name and what it is multiplied by, or the other way round."""

_MOVED = words("limit cap value setting one level")
"""What a factor may be called behind its name: `32 vs 64 tokens: does a longer limit help?`"""

TASKS = words("sum task problem question one example puzzle")
_STRONGER = words("more longer stronger harder larger bigger greater up")
_WEAKER = words("less fewer shorter weaker easier smaller down")
_EFFECTS = words("improvement gain benefit boost harm damage degradation increase decrease reduction effect difference")
_CHANGING = words("change affect matter vary depend influence")
_CONNECTING = words("and or than in on with at of to for if when as likely")
"""Behind a word of comparing these say that it stands by itself."""


def modifiers(found: Sequence[Token], mention: Mention) -> list[int]:
    """Tokens of comparing that belong to this name: `higher` in "a higher learning rate", "the rate is higher".

    Not `fall` in "does accuracy fall as the temperature rises". Never a step from one name to the next: "higher lr, lower accuracy" has one each.
    """
    result = []
    for i in range(mention.start - 1, max(-1, mention.start - 6), -1):
        key = found[i].key
        scales = key in SCALES or found[i].kind == "times"
        if found[i].kind != "mark" and (scales or (key in MORE | LESS and found[i + 1].key != "as")):
            result.append(i)
        elif key not in ARTICLES | {"of", "time", "fold", "as", "many", "much", "number", "amount", "count"}:
            break
    scaled = _scaled_behind(found, mention.end)
    if scaled:
        return [*result, *scaled]
    end = mention.end  # `rollouts are more accurate` describes: how they fare, and not how many
    while end < len(found) and found[end].key in COPULAS:
        end += 1
    if end < len(found) and (goes(found, mention) or end > mention.end or _ends_there(found, end)):
        key = found[end].key
        describes = key in ("more", "less") and not _ends_there(found, end) and key_at(found, end + 1) != "than"
        if (key in MORE | LESS or key in SCALES) and not describes:
            result.append(end)
    return result


def moved_unnamed(found: Sequence[Token]) -> list[int]:
    """The same of a factor that was named before: `does lowering it help?`, `does a longer limit help?`"""
    return [
        i
        for i, token in enumerate(found)
        if token.key in MORE | LESS
        and (
            (token.key.endswith("ing") and key_at(found, i + 1) == "it")
            or (key_at(found, i - 1) == "a" and key_at(found, i + 1) in _MOVED)
        )
    ]


def led_by(found: Sequence[Token], named: Sequence[Mention], levels: Collection[int]) -> dict[int, str]:
    """Where a question says how the factor moves that the next sentence compares, and which way: `does more training help? 6
    vs 12 steps`, `do harder tasks slow learning? One or two digits`.

    levels: where those stand that are compared. Of what is measured, and beside no other claim, such words are the claim.
    """
    first = min(levels, default=-1)
    question = next((each for each in sentences(found, SENTENCE_ENDS) if each.stop <= first), None)
    if question is None or not is_question(found, question):
        return {}
    measured = {i for m in named if isinstance(m.what, Metric) for i in range(m.start, m.end)}
    said = [i for i in question if i not in measured and i + 1 not in measured and _leads(found, i)]
    beside = any(found[i].key in CLAIMING | _CHANGING and i not in said for i in question)
    opposed = len(said) == 2 and any(found[i].key in AGAINST for i in range(*said))
    if not beside or not (len(said) == 1 or opposed):
        return {}
    return {i: "more" if found[i].key in _STRONGER else "less" for i in said[:1]}


def _leads(found: Sequence[Token], i: int) -> bool:
    """`more training`, `longer runs`, `training longer`, `scaling up`; not `more stable`, `a larger gain`, `more and more`."""
    key, following = found[i].key, found[i + 1] if i + 1 < len(found) else None
    if key in ("up", "down"):
        return key_at(found, i - 1) == "scaling"
    if key not in _STRONGER | _WEAKER or following is None:
        return False
    if key in ("harder", "easier"):
        return following.key in TASKS
    trained = key in ("longer", "shorter") and key_at(found, i - 1) in ("train", "training")
    return trained or (following.kind == "word" and following.key not in QUALITIES | _EFFECTS | _CONNECTING)


def goes(found: Sequence[Token], mention: Mention) -> bool:
    """`as the temperature rises`, whatever follows."""
    return key_at(found, before_articles(found, mention.start)) in ("as", "when")


def _ends_there(found: Sequence[Token], i: int) -> bool:
    """`with the learning rate raised`: a participle behind the name, with nothing that it could describe."""
    following = found[i + 1].key if i + 1 < len(found) else "?"
    return found[i].key.endswith("ed") or following in {"?", ".", ",", "when", "if"}


def _scaled_behind(found: Sequence[Token], end: int) -> list[int]:
    """`learning rate ten times larger`, `the group size by a factor of 2`: the multiplier behind a name, and its direction."""
    i = end
    while i < len(found) and found[i].key in COPULAS | _TO_SCALES:
        i += 1
    if i >= len(found) or not (found[i].kind == "times" or (found[i].key in SCALES and i > end)):
        return []
    result = [i]
    for j in range(i + 1, min(i + 4, len(found))):
        if found[j].key in MORE | LESS:
            return [*result, j]
        if found[j].key not in ("time", "fold", "as"):
            break
    return result
