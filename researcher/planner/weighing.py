"""Which of the metrics that a topic names counts: `wall time is not a concern`, `primary metric: accuracy`.

Works on tokens and mentions that are already known; refuses nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from researcher.instruments.instrument import Metric
from researcher.planner.mentions import Mention
from researcher.planner.wording import (
    ARTICLES,
    ASKING,
    COPULAS,
    SENTENCE_ENDS,
    Token,
    before_articles,
    is_question,
    key_at,
    sentences,
    words,
)

_IGNORING = words("ignore ignoring disregard disregarding neglect neglecting regardless irrespective")
_MINDING = words("care caring interested mind worry worried worrying concerned bother bothered")
"""Where these are denied, what follows does not count."""
_MATTERING = words(
    "matter concern issue problem important relevant interesting interest priority count object goal point decisive"
)
"""Where these are denied, what stands before them does not count."""
_OF_NO_WEIGHT = words("irrelevant unimportant")
_DENIALS = words("not no never nor")
_LITTLE = ARTICLES | COPULAS | words("of much really at all about that here such particularly especially")
_CLAUSE_ENDS = SENTENCE_ENDS | words(", : but only just")
_JOINING = words("and or nor")
_FURTHEST_CUE = 4
"""Tokens between what denies an interest and what it is denied in: `care much about the final`."""
_PRIMARY = words("primary main principal chief primarily mainly deciding")
_SECONDARY = words("secondary secondarily")
_TO_RANK = ARTICLES | COPULAS | words(": = metric metrics outcome measure endpoint criterion on be")
"""Between a metric and its rank: `primary metric: accuracy`, `accuracy is the main outcome`."""
_ORDERED_BEHIND = SENTENCE_ENDS | words(", : and so but please instead then") | {""}
"""Behind these a verb is an order: `so use held-out accuracy`; not `we use the final reward`."""
_ORDERING = words("use measure take")


def denied(found: Sequence[Token], named: Sequence[Mention]) -> list[range]:
    """What the topic says of metrics that do not count, in its order; the tokens that name them are within."""
    spans: list[range] = []
    metrics = [m for m in named if isinstance(m.what, Metric)]
    for i, mention in enumerate(metrics):
        last = metrics[i - 1] if i else None
        if last is not None and spans and last.end == spans[-1].stop and _is_joined(found, last.end, mention.start):
            spans[-1] = range(spans[-1].start, mention.end)
        elif (start := _denied_before(found, mention.start)) is not None:
            spans.append(range(start, mention.end))
        elif (end := _denied_behind(found, mention.end)) is not None:
            first = mention
            for other in reversed(metrics[:i]):
                first = other if _is_joined(found, other.end, first.start) else first
            spans.append(range(first.start, end))
    return spans


def rank(found: Sequence[Token], mention: Mention, asked: Container[int]) -> tuple[bool, bool, bool, bool, int]:
    """Lower decides before higher: the primary metric, one that is named, one of the sentence that asks, by position."""
    said = _rank_said(found, mention)
    return bool(said & _SECONDARY), not said & _PRIMARY, mention.weak, mention.start not in asked, mention.start


def asked_in(found: Sequence[Token], levels: Container[int]) -> set[int]:
    """The tokens of questions, or, where there are none, of sentences that hold levels. levels: where they stand."""
    every = list(sentences(found, SENTENCE_ENDS))
    asking = [each for each in every if is_question(found, each)]
    return {i for each in asking or every if asking or any(j in levels for j in each) for i in each}


def _is_joined(found: Sequence[Token], end: int, start: int) -> bool:
    """`wall time or tokens`."""
    between = [token.key for token in found[end:start]]
    return bool(set(between) & _JOINING) and set(between) <= _JOINING | ARTICLES


def _denied_before(found: Sequence[Token], start: int) -> int | None:
    """`ignore X`, `we do not care about X`: where that begins."""
    for cue in range(start - 1, max(-1, start - 2 - _FURTHEST_CUE), -1):
        if found[cue].key in _CLAUSE_ENDS:
            return None
        if found[cue].key in _IGNORING:
            return cue
        if found[cue].key in _MINDING:
            return next((j for j in range(cue - 1, max(-1, cue - 4), -1) if _is_denial(found, j)), None)
    return None


def _denied_behind(found: Sequence[Token], end: int) -> int | None:
    """`X does not matter`, `X is no concern`, `X is irrelevant`: where that ends."""
    i = end
    while key_at(found, i) in COPULAS | ASKING | {"being"}:
        i += 1
    if i > end and key_at(found, i) in _OF_NO_WEIGHT:
        return i + 1
    if not _is_denial(found, i):
        return None
    i += 1
    while key_at(found, i) in _LITTLE:
        i += 1
    return i + 1 if key_at(found, i) in _MATTERING else None


def _is_denial(found: Sequence[Token], i: int) -> bool:
    key = key_at(found, i)
    return key in _DENIALS or key.endswith("n't")


def _rank_said(found: Sequence[Token], mention: Mention) -> set[str]:
    """The words that say which place it has: `primary` before it or behind; an order to use it is the same."""
    before, behind = mention.start - 1, mention.end
    while key_at(found, before) in _TO_RANK:
        before -= 1
    while key_at(found, behind) in _TO_RANK:
        behind += 1
    said = {key_at(found, before)}
    if key_at(found, before) not in _PRIMARY | _SECONDARY and set(_keys(found, mention.end, behind)) & COPULAS:
        said.add(key_at(found, behind))
    return said | ({"primary"} if is_ordered(found, mention) else set())


def is_ordered(found: Sequence[Token], mention: Mention) -> bool:
    """`it is noisy, so use held-out accuracy`."""
    verb = before_articles(found, mention.start)
    return key_at(found, verb) in _ORDERING and key_at(found, verb - 1) in _ORDERED_BEHIND


def _keys(found: Sequence[Token], start: int, end: int) -> list[str]:
    return [token.key for token in found[start:end]]
