"""Levels that a topic points at: `the larger one`, `the latter`, `is 16 the best of 4, 8 and 16?`.

What is claimed is claimed of that level, against the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from researcher.instruments.instrument import STUDY_MODEL, Factor
from researcher.planner.levels import Level, level_text
from researcher.planner.sides import AGAINST, BESIDE, Opposition
from researcher.planner.subject import distinct
from researcher.planner.wording import ARTICLES, ASKING, COPULAS, MORE, SENTENCE_ENDS, Token, key_at, sentences, words
from researcher.refusals import PlanningRefused

_BY_ORDER = {"former": 0, "latter": 1, "first": 0, "second": 1}
_BY_SIZE = words(
    "larger smaller higher lower bigger greater longer shorter lesser largest smallest highest lowest biggest"
)
_SUPERLATIVES = words("largest smallest highest lowest biggest")
_KINDS = words("new newer old older former previous current proposed alternative")
"""What a level may be called where it is named, and pointed at by afterwards."""
_FORMER = words("old older former previous current")
"""What is called so is the baseline, where nothing is pointed at; what is called otherwise is the treatment."""
_ANYTHING = words("one level value setting choice option")
_FARING = words(
    "better worse faster slower best enough or win beat learn reach give perform train help hurt need take outperform"
)
_BEHIND = ASKING | COPULAS | _ANYTHING | _FARING | SENTENCE_ENDS | words(": ) may might must ,") | {""}
"""Behind `the larger` these say that it stands for a level, and describes nothing."""
_SAID_OF = _BEHIND - SENTENCE_ENDS - words(": ) , or") - {""}
"""The same behind `the largest`, which else may be said of what is measured: `which rate makes accuracy the highest?`"""
_ALL = (["of", "the", "two"], ["of", "both"], ["of", "them"], ["of", "these"], ["of", "those"])
_LABELS = words("b c")
_LABELLED = words("arm option variant setting config condition case setup")
_COMPARATIVES = {
    "best": "better", "worst": "worse", "highest": "higher", "lowest": "lower", "fastest": "faster", "slowest": "slower",
    "quickest": "quicker", "easiest": "easier", "greatest": "greater", "largest": "larger", "smallest": "smaller",
    "fewest": "fewer", "least": "less", "most": "more",
}  # fmt: skip
_OUT_OF = words("of among amongst out from")


def pointed(found: Sequence[Token], factor: Factor, levels: Sequence[Level]) -> tuple[list[Token], Opposition | None]:
    """The level that is pointed at against the others, and the tokens with `it` in its pointer's place; None where none is.

    levels: of `factor`, repeated as in the topic.
    Raises: PlanningRefused where it cannot be told which level is meant.
    """
    _refuse_labels(found, factor)
    own = distinct(found, levels)
    described = _described(found, own) if len(own) == 2 else {}
    if described and (opposition := _opposed_as_described(found, factor, own, described)) is not None:
        return list(found), opposition
    former = {i if key in _FORMER else 1 - i for key, i in described.items()}
    if len(former) == 1 and len(levels) == 2:
        was = former.pop()
        return list(found), Opposition((own[1 - was],), (own[was],))
    at = [i for i in range(len(found)) if _points(found, i) and not (described and i < own[1].at)]
    if not at:
        return _outstanding(found, levels, own)
    first = at[0]
    written = f"the {found[first].text}"
    in_place = any(found[j].key in AGAINST | BESIDE for j in range(max(0, first - 3), first))
    either = len(at) > 1 and any(found[j].key == "or" for j in range(first, at[1]))
    place = _BY_ORDER.get(found[first].key)
    if place is None and len(own) == 2:
        ranks = [_rank(factor, level) for level in own]
        if ranks[0] is not None and ranks[1] is not None and ranks[0] != ranks[1]:
            place = int((ranks[1] > ranks[0]) == (found[first].key in MORE))
    if len(own) != 2 or place is None or in_place or either:
        shown = f" ({' or '.join(level_text(level.value) for level in own)})" if own else ""
        raise PlanningRefused(
            f"{written!r} may be any level of {factor.name}; name the level itself{shown}", [factor.name]
        )
    plain = [replace(token, text="it", key="it", value=None) if i in at else token for i, token in enumerate(found)]
    return plain, Opposition((own[place],), (own[1 - place],))


def _described(found: Sequence[Token], own: Sequence[Level]) -> dict[str, int]:
    """`the former default was 1e-5, the new one is 4e-5`: which of two levels is called so."""
    result: dict[str, int] = {}
    for place, level in enumerate(own):
        start = own[place - 1].at if place else -1
        verb = next((i for i in range(level.at - 1, start, -1) if found[i].key in COPULAS | {"use"}), start)
        kind = next((i for i in range(verb - 1, max(start, verb - 4), -1) if found[i].key in _KINDS), None)
        if kind is not None and key_at(found, kind - 1) in ARTICLES:
            result[found[kind].key] = place
    return result


def _opposed_as_described(
    found: Sequence[Token], factor: Factor, own: Sequence[Level], described: Mapping[str, int]
) -> Opposition | None:
    """`is the new one better?`, `does the new one beat the old one?`; None where none is pointed at so.

    Raises: PlanningRefused where both are, and neither against the other.
    """
    said = [i for i in range(own[1].at + 1, len(found)) if found[i].key in described and key_at(found, i - 1) == "the"]
    if not said:
        return None
    first, last = said[0], said[-1]
    place = described[found[first].key]
    between = any(found[i].key in AGAINST | BESIDE for i in range(first, last))
    if any(described[found[i].key] != place for i in said) and not (len(said) == 2 and between):
        raise PlanningRefused(
            f"'the {found[first].text}' and 'the {found[last].text}' leave open which is claimed to be so; name the level itself "
            f"({' or '.join(level_text(level.value) for level in own)})",
            [factor.name],
        )
    if any(found[i].key in AGAINST | BESIDE for i in range(max(0, first - 3), first)):
        place = 1 - place
    return Opposition((own[place],), (own[1 - place],))


def _points(found: Sequence[Token], i: int) -> bool:
    """`the latter`, `the second does`, `the larger one`; not `the larger group`, `the first step`, `the larger, the better`."""
    key = found[i].key
    if key_at(found, i - 1) != "the" or key not in _BY_ORDER.keys() | _BY_SIZE:
        return False
    behind = [token.key for token in found[i + 1 : i + 4]]
    if behind[:2] == [",", "the"]:
        return False
    after = _SAID_OF if key in _SUPERLATIVES else _BEHIND
    return key in ("former", "latter") or key_at(found, i + 1) in after or any(behind[: len(a)] == a for a in _ALL)


def _rank(factor: Factor, level: Level) -> float | None:
    """Where a level stands from small to large; None where levels have no size."""
    if factor.target == STUDY_MODEL:
        return factor.choices.index(level.value)
    return None if isinstance(level.value, str | bool) else float(level.value)


def _refuse_labels(found: Sequence[Token], factor: Factor) -> None:
    """Raises: PlanningRefused for `arm A uses 4, arm B uses 8: is B better?`"""
    for i, token in enumerate(found):
        alone = token.key in _LABELS and key_at(found, i - 1) != "/" and (i == 0 or found[i - 1].kind != "number")
        if alone and token.kind == "word" and (key_at(found, i - 1) in _LABELLED or _labels_before(found, i)):
            raise PlanningRefused(
                f"{token.text.upper()!r} stands for a level of {factor.name}: name the level itself wherever it is meant",
                [factor.name],
            )


def _labels_before(found: Sequence[Token], i: int) -> bool:
    """An `a` that is said of nothing: `A: 4, B: 8`, `A is 4 and B is 8`, `A uses 4`."""
    return any(
        found[j].key == "a" and key_at(found, j + 1) in COPULAS | {":", "=", ")", "use", "with"} for j in range(i)
    )


def _outstanding(
    found: Sequence[Token], levels: Sequence[Level], own: Sequence[Level]
) -> tuple[list[Token], Opposition | None]:
    """`is 16 the best of 4, 8 and 16?`: it is better than each of the others."""
    for sentence in sentences(found, SENTENCE_ENDS):
        best = next((i for i in sentence if found[i].key in _COMPARATIVES), None)
        if best is None or len(own) < 3:
            continue
        before = [level for level in levels if level.at in sentence and level.at < best]
        behind = [level for level in levels if level.at in sentence and level.at > best]
        named = {level.value for level in behind}
        if len(before) != 1 or before[0].value not in named or len(named) < len(own):
            continue
        if not any(found[j].key in _OUT_OF for j in range(best, behind[0].at)):
            continue
        key = _COMPARATIVES[found[best].key]
        plain = [replace(token, text=key, key=key) if i == best else token for i, token in enumerate(found)]
        return plain, Opposition((before[0],), tuple(level for level in own if level.value != before[0].value))
    return list(found), None
