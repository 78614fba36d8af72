"""Which of a topic's levels are treatments, and which are baselines.

Works on tokens and levels that are already known; refuses nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from researcher.planner.levels import Level
from researcher.planner.wording import (
    ARTICLES,
    ASKING,
    BETTER,
    COPULAS,
    LESS,
    MORE,
    SENTENCE_ENDS,
    SO_FAR,
    SWITCHED_OFF,
    WORSE,
    Token,
    before_articles,
    is_question,
    key_at,
    key_behind_comma,
    phrase,
    sentences,
    words,
)

AGAINST = words(
    "than beat beating outperform outperforms outperforming exceed exceeding surpass surpassing underperform underperforming overtake dominate instead rather over > < >= <="
)
BESIDE = words("against vs versus compared compare relative")
_BEATING = AGAINST - words("instead rather over")
_AHEAD = words("compared relative instead rather against")
_OPENING = words("unlike versus vs")
"""As the first word of a topic or sentence these do the same."""
_MARKS = words("baseline control reference")
"""What a level is called that the others are set against."""
_TO_MARK = words("( [ , as for is be was")
_APART = words("( [ ,")
_NAMING = words(": =")
"""Between a mark and the level behind it."""
_CLOSED = words(". ? ! ; ) ]")
_ENDS = words(". ;")
_IN_USE = words("use using have now currently today moment default usual usually normally train")
"""In a sentence of its own these say what is done so far: `we use RLOO. Would GRPO learn faster?`"""
_MODELS = words("model policy")
_FURTHEST_MARK = 8
"""Before the first level, with a comma behind it: `compared to 8, is 16 better?`"""
_CHANGES = words(
    "from change changing switch switching go going move moving replace replacing raise raising increase increasing lower "
    "lowering reduce reducing decrease decreasing drop dropping"
)
_AGAIN = BETTER | WORSE | MORE | LESS | words("and , also with")
_NEAR = 4
"""Between `than` and the level that it makes a baseline: `than at a rate of 1e-5`."""
_IT = words("it penalty bonus term")
"""A switch behind its heading: `KL 0 vs 0.1: does the penalty hurt?`"""
_BEYOND = words("beyond above past below")
"""Before the first level these do as `than` does: `is it worth going beyond 4, e.g. to 16?`"""
_SUFFICING = words("suffice enough sufficient adequate")
CLAIMING = BETTER | WORSE | MORE | LESS | AGAINST | words("lose lost beaten outperformed surpassed exceeded")
_JOINING = CLAIMING | BESIDE | words("and or to with by")
_HEADING = words("up down large big high low small most least over")
"""Of these a heading may hold some, and claims nothing by them: `over at most 30 steps`."""
_HEADED = words(": ; . ? ( , -") | ASKING | {"whether"}
"""With these the claim behind a heading begins."""


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
    ahead_of = _named_first(found, levels)
    if ahead_of:
        return Opposition(tuple(levels[ahead_of:]), tuple(levels[:ahead_of]))
    if len(levels) == 2 and _is_in_use(found, first, last):
        return Opposition((levels[1],), (levels[0],))
    if len(levels) == 2 and (_is_change(found, first, last) or _is_arrow(found, first, last)):
        return Opposition((levels[1],), (levels[0],))
    for markers, repeatable in ((AGAINST, False), (BESIDE, len(levels) > 2)):
        cuts = [i for i in range(first, last) if found[i].key in markers]
        if cuts and not (repeatable and len(cuts) > 1):
            cut = cuts[0] if _says_again(found, cuts, levels) else cuts[-1]
            before = [level for level in levels if level.at < cut or _is_asked_too(found, level)]
            return Opposition(tuple(before), tuple(level for level in levels if level not in before))
    ahead = {token.key for token in found[max(0, first - 8) : first]}
    if (ahead & _AHEAD or _opens(found, first)) and _comma_between(found, levels):
        return Opposition(tuple(levels[1:]), (levels[0],))
    if len(levels) == 2:
        asked_last = _asks_of_last(found, first, last)
        return Opposition((levels[asked_last],), (levels[not asked_last],))
    baseline = next((level for level in levels if level.value == default), levels[0])
    return Opposition(tuple(level for level in levels if level is not baseline), (baseline,))


def set_together(found: Sequence[Token], levels: Sequence[Level], own: Sequence[Level]) -> Sequence[Level]:
    """Where the sentence that compares names them: `GRPO is the standard. Does RLOO learn faster than GRPO?`

    levels: with those that are repeated. own: where each stands first; so too where no one sentence compares them all.
    """
    values = [level.value for level in own]
    comparing = []
    for sentence in sentences(found, SENTENCE_ENDS):
        inside = [level for level in levels if level.at in sentence]
        first = [next((level for level in inside if level.value == value), None) for value in values]
        there = sorted((level for level in first if level is not None), key=lambda level: level.at)
        if len(there) == len(values) and is_set_against(found, there[0].at, there[-1].at, listed=False):
            comparing.append((not is_question(found, sentence), there))
    return min(comparing, key=lambda each: each[0])[1] if comparing else own


def opposed_behind(
    found: Sequence[Token], pair: Sequence[Level], levels: Sequence[Level], named: Sequence[int], off: object
) -> Opposition | None:
    """Two levels as the claim behind their heading sets them: `lr 1e-5 vs 4e-5: is 4e-5 faster?`, `KL 0 vs 0.1: does it hurt?`

    levels: with those that are repeated. named: where the factor stands by its name. off: its level that does nothing.
    Returns: None where nothing stands behind, or the heading itself claims something.
    """
    begins, behind = _begins(found, pair[0].at), pair[1].at + 1
    head = next((i for i in range(behind, len(found)) if found[i].key in _HEADED), len(found))
    if pair[0].at < 0 or any(found[i].key in CLAIMING - _HEADING for i in range(begins, head)):
        return None
    claims = [
        i
        for sentence in sentences(found, SENTENCE_ENDS)
        if any(i > head and found[i].key in CLAIMING for i in sentence)
        for i in sentence
        if i > head
    ]
    first = {level.value: level for level in reversed(levels) if level.at in claims}
    again = sorted(first.values(), key=lambda level: level.at)
    if len(again) == 2:
        return oppose(found, again, None)
    if again:
        other = next(level for level in pair if level.value != again[0].value)
        is_baseline = _marked_baseline(found, again) is not None or _follows_against(found, again[0].at)
        return Opposition((other,), (again[0],)) if is_baseline else Opposition((again[0],), (other,))
    said = next((i for i in claims if i in named or found[i].key in _IT), None)
    if said is None or off not in [level.value for level in pair]:
        return None
    is_off = any(key_at(found, i) in SWITCHED_OFF for i in range(max(head, said - 3), said))
    treatment, baseline = sorted(pair, key=lambda level: (level.value == off) != is_off)
    return Opposition((treatment,), (baseline,))


def _follows_against(found: Sequence[Token], at: int) -> bool:
    """`is it better than 4?`; not `over 20 steps, is 4 better?`"""
    near = [token.key for token in found[max(0, at - _NEAR) : at]]
    cuts = [i for i, key in enumerate(near) if key in AGAINST | BESIDE]
    return bool(cuts) and not set(near[cuts[-1] :]) & (_CLOSED | ASKING | COPULAS | {","})


def _named_first(found: Sequence[Token], levels: Sequence[Level]) -> int:
    """How many baselines stand before all treatments: `higher than with A, and higher than with B, when using C` has two."""
    first = levels[0].at
    near = list(found[max(0, first - _NEAR) : max(0, first)])
    cut = next((i for i, token in enumerate(near) if token.key in _BEYOND | {"than"}), None)
    if cut is None or any(token.kind == "number" or token.key in _CLOSED | {","} for token in near[cut:]):
        return 0
    many = 1
    while many < len(levels) and _is_joined(found, levels[many - 1], levels[many]):
        many += 1
    return many if many < len(levels) else 0


def _is_joined(found: Sequence[Token], one: Level, other: Level) -> bool:
    """`A or B`, `than with A, and higher than with B`."""
    between = {token.key for token in found[_end(one) : other.at]}
    return bool(between & {"or", "and", ",", "/"}) and between <= _AGAIN | words("or / than with at")


def _says_again(found: Sequence[Token], cuts: Sequence[int], levels: Sequence[Level]) -> bool:
    """`better than A and better than B`: what was said of A is said of B; not `16 beats 8 and 8 beats 4`."""
    between = [level for level in levels if cuts[0] < level.at < cuts[-1]]
    if len(cuts) != 2 or len(between) != 1:
        return False
    return all(token.key in _AGAIN for token in found[_end(between[0]) : cuts[1]])


def _is_asked_too(found: Sequence[Token], level: Level) -> bool:
    """`does DAPO beat GRPO, and does GSPO?`: what was asked of the first is asked of it."""
    verb = before_articles(found, level.at)
    return (
        key_at(found, verb) in ASKING and key_at(found, verb - 1) in ("and", "or") and key_at(found, _end(level)) == "?"
    )


def _end(level: Level) -> int:
    """The token behind a level."""
    return level.at + (len(phrase(level.value)) if isinstance(level.value, str) else 1)


def is_named(found: Sequence[Token], levels: Sequence[Level]) -> bool:
    """Whether the topic says which of these is the baseline."""
    between = {token.key for token in found[max(0, levels[0].at) : levels[-1].at]}
    return (
        min(level.at for level in levels) < 0
        or bool(between & (AGAINST | BESIDE))
        or _marked_baseline(found, levels) is not None
    )


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
    """`4, 8 (baseline) and 16`, `with GRPO as the baseline`, `our baseline uses 8`: the level nearest to the mark."""
    places = {level.at for level in levels}
    marked = [
        (distance, level)
        for level in levels
        if level.at >= 0 and (distance := _to_mark(found, level, places)) is not None
    ]
    return min(marked, key=lambda each: each[0])[1] if marked else None


def _to_mark(found: Sequence[Token], level: Level, places: Container[int]) -> int | None:
    """How far a mark stands from its level: behind it over little words, before it within its sentence and no other level."""
    end = j = _end(level)
    while key_at(found, j) in _TO_MARK | ARTICLES | {"my"} and j not in places:
        j += 1
    if _is_mark(found, j) and j not in places and not _marks_next(found, end, j, places):
        return j - end
    for i in range(level.at - 1, max(-1, level.at - 1 - _FURTHEST_MARK), -1):
        if i in places or key_at(found, i) in _CLOSED:
            return None
        if _is_mark(found, i):
            return level.at - i
    return None


def _marks_next(found: Sequence[Token], end: int, mark: int, places: Container[int]) -> bool:
    """`16 (baseline 4)`, `16, the baseline is group size 4`; not `4 (baseline) and 16`, `4, our baseline, against 16`."""
    if not any(token.key in _APART for token in found[end:mark]):
        return False
    following = next((i for i in range(mark + 1, mark + 1 + _NEAR) if i in places), mark)
    between = found[mark + 1 : following]
    return following > mark and all(
        token.key in _NAMING or (token.kind == "word" and token.key not in _JOINING) for token in between
    )


def is_marked(found: Sequence[Token], at: int) -> bool:
    """Whether a name is called the baseline before it: `Baseline: no KL`."""
    i = at - 1
    while key_at(found, i) in SWITCHED_OFF | COPULAS | ARTICLES | _NAMING:
        i -= 1
    return _is_mark(found, i)


def _is_mark(found: Sequence[Token], i: int) -> bool:
    """`the baseline`; not `the reference model`, to which a KL penalty keeps."""
    return key_at(found, i) in _MARKS and key_at(found, i + 1) not in _MODELS


def _is_in_use(found: Sequence[Token], first: int, last: int) -> bool:
    """`right now lr is 1e-5. Should I raise it to 1e-4?`: a sentence that says what is done, and asks for nothing."""
    end = next((i for i in range(first, last) if _ends(found, i)), None)
    start = _begins(found, first)
    if end is None or (key_at(found, end) == "," and key_at(found, start) in ASKING):
        return False
    keys = {token.key for token in found[start:end]}
    stops = next((found[i].key for i in range(last, len(found)) if found[i].key in SENTENCE_ENDS), "")
    told = found[end].key in _ENDS and stops == "?"  # `4 is popular. Does 16 help?`
    asks = {token.key for token in found[end:]} & (BETTER | WORSE | MORE | LESS | {"?"})
    taken_up = {token.key for token in found[end:last]} & AGAINST  # `we have 8; is it better than 4?`
    return bool((told or keys & _IN_USE) and asks) and not taken_up and not keys & (BETTER | WORSE | AGAINST | BESIDE)


def _ends(found: Sequence[Token], i: int) -> bool:
    """A full stop or semicolon; a comma before a question, `our lr is 1e-5 at the moment, (but) would 5e-5 …`, or behind
    what is only told."""
    stops = found[i].key in _ENDS and key_at(found, i - 1) != "vs"
    told = key_at(found, _begins(found, i)) == SO_FAR.key
    return stops or (found[i].key == "," and (told or key_behind_comma(found, i) in ASKING))


def _opens(found: Sequence[Token], first: int) -> bool:
    """`unlike with lr 1e-5, does …`, `versus GRPO, how …`."""
    return first >= 0 and key_at(found, _begins(found, first)) in _OPENING


def _begins(found: Sequence[Token], at: int) -> int:
    """Where the sentence, or what stands in its brackets, begins."""
    return max((i + 1 for i in range(at) if found[i].key in _CLOSED), default=0)


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
