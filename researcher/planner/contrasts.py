"""Topics that claim two things: one against the other, or one of two baselines each. A study tests one claim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from researcher.instruments.instrument import Metric
from researcher.planner.mentions import Mention
from researcher.planner.wording import ASKING, BETTER, LESS, MORE, SENTENCE_ENDS, WORSE, Token, words
from researcher.refusals import PlanningRefused

_DENIALS = words("no not never isn't doesn't")
_CONTRASTING = words("but yet though although albeit")
_ASKING = ASKING | words("what which if when only with at for how")
"""Right behind a `but` these begin something else than a second claim: `but does it learn faster?`, `but only with …`."""
_CLAIMS = BETTER | WORSE | MORE | LESS
_SIZED = words("least twice half equally speed")
"""`at least as accurate, but faster`, `half as fast`, `but not speed`."""
_BEFORE, _BEHIND = 12, 6
_OPPOSED, _DENIED = " that go opposite ways,", ", one of them with a 'no' or 'not',"


def refuse_two_claims(found: Sequence[Token], named: Sequence[Mention]) -> None:
    """Raises: PlanningRefused for `better than A but worse than B`, `faster, but not more accurate`: two claims, of which a
    study tests one."""
    keys = [token.key for token in found]
    if _are_opposed(keys):
        raise _refused(_OPPOSED)
    cuts = [i for i, key in enumerate(keys) if key == "than"]
    for one, other in itertools.pairwise(cuts):
        first, second = keys[max(0, one - 4) : one], keys[max(one, other - 3) : other]
        opposed = any(
            set(first) & a and set(second) & b
            for a, b in ((BETTER, WORSE), (WORSE, BETTER), (MORE, LESS), (LESS, MORE))
        )
        denied = [bool(_DENIALS & set(each)) for each in (first, second)]
        claims = [bool(_CLAIMS & set(each)) for each in (first, second)]
        if {"but", "and", "yet"} & set(keys[one:other]) and (
            opposed or "both" in keys[one:other] or (all(claims) and denied[0] != denied[1])
        ):
            raise _refused(_DENIED if any(denied) else _OPPOSED if opposed else ",")
    for i in range(len(keys)):
        if keys[i : i + 2] == ["but", "not"] and any(token.kind == "number" for token in found[i + 2 : i + 5]):
            raise PlanningRefused(
                "the topic claims something of one level and denies it of another, and a study sets levels against each other: "
                "ask whether one is better than the other, or, of what helps at one alone, whether the two interact",
                ["learning_rate"],
            )
        if keys[i] == "but" and keys[i + 1 : i + 2] and keys[i + 1] not in _ASKING and _are_two(found, named, i):
            raise _refused(" of two metrics,")
        if (how := _contrasted(keys, i)) is not None:
            raise _refused(how)


def _are_two(found: Sequence[Token], named: Sequence[Mention], i: int) -> bool:
    """`raises the reward but not accuracy`: one metric on either side, and something said of the second."""
    end = next((j for j in range(i, len(found)) if found[j].key in SENTENCE_ENDS), len(found))
    metrics = [m for m in named if isinstance(m.what, Metric) and not m.weak]
    before = {m.what.name for m in metrics if m.start < i}
    behind = {m.what.name for m in metrics if i < m.start < min(end, i + _BEHIND)}
    said = {token.key for token in found[i + 1 : end]} & (_CLAIMS | _DENIALS | {"unchanged", "same"})
    return bool(before and behind - before and said)


def _refused(how: str) -> PlanningRefused:
    return PlanningRefused(
        f"the topic makes two claims{how} and a study tests one of them: ask each by itself", ["learning_rate"]
    )


def _are_opposed(keys: Sequence[str]) -> bool:
    """`faster but slower in wall time`."""
    for i in (i for i, key in enumerate(keys) if key == "but"):
        before, after = (_compared(some) for some in (keys[max(0, i - 6) : i], keys[i + 1 : i + 4]))
        if (before & BETTER and after & WORSE) or (before & WORSE and after & BETTER):
            return True
    return False


def _contrasted(keys: Sequence[str], i: int) -> str | None:
    """How two claims are joined here; None where there are none: `faster, but not more accurate`, `more accurate yet slower`,
    `faster without being more accurate`; with `and` only where one of them is denied."""
    without = list(keys[i : i + 2]) == ["without", "being"]
    while_being = list(keys[i : i + 2]) == ["while", "being"]
    joined = without or while_being or keys[i] in _CONTRASTING | {"and"}
    if not joined or (i + 1 < len(keys) and keys[i + 1] in _ASKING):
        return None
    before = _up_to_an_end(keys[max(0, i - _BEFORE) : i][::-1])
    behind = _up_to_an_end(keys[i + 1 : i + 1 + _BEHIND])
    if not (_compared(before) and _compared(behind)):
        return None
    denied = [bool(_DENIALS & set(before)), without or bool(_DENIALS & set(behind[:4]))]
    if denied[0] != denied[1]:
        return _DENIED
    return None if keys[i] == "and" else ","


def _up_to_an_end(keys: Sequence[str]) -> Sequence[str]:
    return keys[: next((i for i, key in enumerate(keys) if key in SENTENCE_ENDS), len(keys))]


def _compared(keys: Sequence[str]) -> set[str]:
    """Comparatives; not `improve`, `hurt`, which are said of something."""
    return {key for key in keys if (key in _CLAIMS and key.endswith(("er", "worse", "more", "less"))) or key in _SIZED}
