"""Numbers of a topic that are no levels: seeds, time, thresholds, sizes of effects, changes of a factor, and counts of what is unknown."""

from __future__ import annotations

import re

from foundation.durations import duration_s
from researcher.instruments.instrument import Factor, Metric
from researcher.planner.levels import Placed
from researcher.planner.numerals import BRIDGES, LISTING, PLAIN, Numerals, factor_of
from researcher.planner.wording import BETTER, LESS, MORE, SENTENCE_ENDS, WORSE, words
from researcher.refusals import PlanningRefused

_SECONDS = {
    "second": 1.0,
    "sec": 1.0,
    "minute": 60.0,
    "min": 60.0,
    "hour": 3600.0,
    "hr": 3600.0,
    "h": 3600.0,
    "day": 86_400.0,
}
_BOUNDS = {"minimum": "min_seeds", "maximum": "max_seeds"}
_GLUED = re.compile(r"\d+(?!(?:st|nd|rd|th)$)[^\W\d_]+$")
"""A number with a unit that is not known: `40u`; not `2nd`, `4x4`."""
_WITHIN = words("in within under budget for spend spending have max maximum limit most")
_ENDING = words("stop stopping end ending finish finishing halt abort")
"""Before `after 3 hours` or `at 3 hours` in a sentence, they speak of the whole study."""
_PER = words("per each every")
_SIZES = words("at least most about around roughly more less than over up to another")
"""Between `by` and the size of a change."""
_REPLACED = words("replace replaced replacing beaten outperformed surpassed exceeded followed")
_POINTS = words("point percentage pp")
_REACHED = words("reach reaching reached hit hitting attain attaining threshold exceed surpass")
_SURPASSING = words("exceed surpass")
VERBS = (
    BETTER
    | WORSE
    | words(
        "give beat need doe learn get help hurt yield take lead make reach train work win improve increase raise reduce lower "
        "perform score end matter result outperform cost use require speed slow accelerate boost harm degrade impair produce provide cause bring leave keep change affect alter move this"
    )
)
"""What may follow a level and ends in s."""
_COUNTED = words("number digit")
"""Of what an instrument is about these are counted: `3 numbers`, and not `4 vs 8 sums`."""


def settle_seeds_and_time(n: Numerals, placed: Placed) -> None:
    for i in [*n.numbers, *n.spelled]:
        value, following = n.found[i].value or 0.0, n.key(i + 1)
        if following == "random" and n.key(i + 2) == "seed":
            following = "seed"
        behind = n.key(i - 2) if n.key(i - 1) in ("=", ":") else n.key(i - 1)
        if following == "seed" or (behind == "seed" and i in n.numbers and not _is_per(n, i)):
            bound = _BOUNDS.get(n.key(i - 1), "seeds")
            setattr(placed, bound, int(value))
        elif following in _SECONDS and i + 1 not in n.owner and n.factor_at(n.back(i, BRIDGES)) is None:
            _refuse_other_times(n, i, i + 1)
            placed.budget_s = value * _SECONDS[following]
        else:
            continue
        (n.numbers if i in n.numbers else n.spelled).remove(i)
    for i, token in enumerate(n.found):
        if _limits(n, i, i) and (budget_s := duration_s(token.text)) is not None:
            placed.budget_s = budget_s
        elif token.kind == "word" and _GLUED.match(token.text) and i not in n.owner:
            placed.unplaced.append(token)


def _limits(n: Numerals, i: int, end: int) -> bool:
    """Whether the time of tokens `i` to `end` is how long the study may take."""
    sentence = max((j for j in range(i) if n.key(j) in SENTENCE_ENDS), default=-1) + 1
    ends = any(n.key(j) in _ENDING for j in range(sentence, i))
    return ends or n.key(end + 1) == "budget" or any(n.key(j) in _WITHIN for j in range(max(sentence, i - 3), i))


def _refuse_other_times(n: Numerals, i: int, end: int) -> None:
    """Raises: PlanningRefused for a time of each trial, and one of which it is not said that it is the study's."""
    shown = " ".join(token.text for token in n.found[i : end + 1])
    if n.key(end + 1) in _PER:
        raise PlanningRefused(
            f"{shown!r} is a time for each trial, which no study sets: give the steps of a trial, or the whole study's time by "
            "--budget",
            ["steps"],
        )
    if not (_limits(n, i, end) or _is_last(n, i)):
        raise PlanningRefused(
            f"{shown!r} is a time, and the topic does not say of what; say 'within {shown}', or --budget, for the whole study"
        )


def _is_last(n: Numerals, i: int) -> bool:
    """`RLOO v GRPO, 4 seeds, 1 hour`: a time that stands by itself."""
    return n.key(i - 1) in ("", ",", ";", ".", "?", "(") and n.key(i + 2) in ("", ".", ",", ";", ")")


def _is_per(n: Numerals, i: int) -> bool:
    """`per seed 4 trials`."""
    j = n.back(i, frozenset({"seed", "random", "=", ":"}))
    return n.key(j) in ("per", "each", "every")


def settle_sizes(n: Numerals, placed: Placed) -> None:
    """Numbers that are no levels: thresholds, sizes of effects, changes of a factor."""
    for i in list(n.numbers):
        if _is_threshold(n, i):
            placed.threshold = n.found[i].value
        elif (factor := _shifted(n, i)) is not None:
            placed.shifts.append((n.found[i], factor))
        elif _is_effect(n, i):
            placed.effects.append(n.found[i])
        elif _counts_unknown(n, i):
            placed.unplaced.append(n.found[i])
        else:
            continue
        n.numbers.remove(i)


def _is_threshold(n: Numerals, i: int) -> bool:
    j = n.back(i, BRIDGES - {":"})
    metric = isinstance(mention.what, Metric) if (mention := n.owner.get(j)) else n.key(j) in _REACHED
    if n.key(j) in _SURPASSING and n.number_at(j - 1):
        return False  # `does a group size of 8 surpass 4?`
    return metric and any(n.key(k) in _REACHED for k in range(max(0, i - 7), i))


def _shifted(n: Numerals, i: int) -> Factor | None:
    """The factor that is moved `by` this number."""
    j = n.back(i, _SIZES)
    if n.key(j) != "by" or n.key(i + 1) in _POINTS:
        return None
    named = [k for k in range(max(0, j - 6), j) if k in n.owner]
    mention = n.factor_at(named[-1]) if named else None
    if mention is None or any(n.key(k) in _REPLACED for k in range(j)):
        return None
    moved = {n.key(k) for k in range(max(0, mention.start - 3), j)} & (MORE | LESS | {"change", "changing"})
    return factor_of(mention) if moved else None


def _is_effect(n: Numerals, i: int) -> bool:
    if n.key(i + 1) in _POINTS:
        return True
    j = n.back(i, _SIZES)
    return n.key(j) == "by" and not any(n.key(k) in _REPLACED for k in range(j)) and _shifted(n, i) is None


def _counts_unknown(n: Numerals, i: int) -> bool:
    """`2 layers`, `32 heads`: the level of something that is no factor here."""
    following = n.found[i + 1] if i + 1 < len(n.found) else None
    if following is None or following.kind != "word" or i + 1 in n.owner or following.key in VERBS | PLAIN | {"step"}:
        return False
    if following.key in n.about - _COUNTED and n.key(i + 2) not in ("per", "each", "in", "a"):
        j = n.back(i, BRIDGES | LISTING, numbers=True)
        return n.factor_at(j) is None  # `lr 4e-5 vs 1e-5 sums`
    plural = following.key != following.text.removesuffix("'s") and following.key not in ("time", "fold", *_SECONDS)
    return plural and following.key != "seed" and n.factor_at(n.back(i, BRIDGES)) is None
