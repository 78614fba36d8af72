"""One factor after the other: `which A is best, 1 or 2, and then which B, 3 or 4?`

A topic is cut where it says `then`. A sequence is read only where two parts vary one factor each, over levels of their own; what
says so by half is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from researcher.design.reading import Following
from researcher.instruments.instrument import Factor, Metric, Scalar
from researcher.planner.clauses import cut
from researcher.planner.levels import Level, Placed, level_text
from researcher.planner.mentions import Mention
from researcher.planner.wording import BETTER, LESS, MORE, WORSE, Token, words
from researcher.refusals import PlanningRefused

MOST_LEVELS = 4
_CUTS = (
    ("then",),
    ("after", "that"),
    ("after", "this"),
    ("after", "which"),
    ("afterward",),
    ("thereafter",),
    ("subsequently",),
    ("secondly",),
    ("followed", "by"),
)
_CUTS_AFTER_A_PAUSE = words("next second")
"""`…, next the rank`: elsewhere they say something else."""
_PAUSES = words(", ; . and")
_ASKING = words("which what best optimal optimum ideal find choose pick select tune optimise optimize determine search")
_BEGINNING = words("the is are does do compare test try with")
_VERBS = words("doe do is would will can help beat improve")
SAID = frozenset(
    {"afterwards", "thereafter", "subsequently", "secondly", "followed", "next", "firstly", "winning", "winner"}
)
"""Words that say no more than that there is an order, and what goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is compared first: a factor and its levels, the baseline first."""

    factor: Factor
    levels: tuple[Scalar, ...]


def parts_of(found: Sequence[Token], named: Sequence[Mention]) -> list[range]:
    """The parts of a topic in sequence, as its tokens; none where it is all one. Each names a factor."""
    parts = cut(found, named, [i for i in range(1, len(found)) if _cuts(found, i)])
    return parts if len(parts) > 1 else []


def asked_for(
    found: Sequence[Token], factors: Sequence[Mention], placed: Placed, parts: Sequence[range]
) -> tuple[Step, Following] | None:
    """The two factors and their levels; None where only one part asks, and the others set the scene.

    Raises: PlanningRefused where a part says by half what it varies, and for what no study in sequence answers.
    """
    varied = [_varied(factors, placed, part) for part in parts]
    asked = [(each[0], part) for each, part in zip(varied, parts, strict=True) if each]
    names = list(dict.fromkeys(factor.name for each in varied for factor in each))
    if any(len(each) > 1 for each in varied):
        raise _refused(f"one part of the topic varies {' and '.join(names)} together", names)
    unsaid = [
        factor.name
        for number, part in enumerate(parts)
        if not varied[number]
        for factor in _mentioned(factors, part)
        if factor.name not in names
        and not _levels_in(placed, factor, part)
        and ((bool(asked) and number > 0) or any(found[i].key in _ASKING for i in part))
    ]
    if unsaid:
        raise _refused(f"the topic asks for {unsaid[0]} in a part of its own, and names no levels of it there", unsaid)
    halves = [
        factor.name
        for number, part in enumerate(parts)
        if number > 0 and asked and not varied[number] and any(found[i].key in _VERBS for i in part)
        for factor in _mentioned(factors, part)
        if factor.name not in names and len(_levels_in(placed, factor, part)) == 1
    ]
    if halves:
        raise _refused(f"the topic asks for {halves[0]} in a part of its own, and names one level of it there", halves)
    if len(asked) < 2:
        return None
    if len(asked) > 2:
        raise _refused(f"the topic asks for {len(asked)} comparisons in sequence", names)
    (first, first_part), (second, second_part) = asked
    if first == second:
        raise _refused(f"both parts of the topic vary {first.name}: ask for all of its levels at once", names)
    astray = [level for level in placed.of(first) if level.at not in first_part]
    if astray:
        raise _refused(
            f"the topic sets {first.name}={level_text(astray[0].value)} for a part that has to take what goes on", names
        )
    aside = _distinct(level for level in placed.of(second) if level.at not in second_part)
    if len(aside) > 1 or (not aside and second.default == ""):
        raise _refused(f"the topic does not say at which {second.name} {first.name} is compared", names)
    _refuse_two_settings(factors, placed, (first, second))
    return (
        Step(factor=first, levels=_from_baseline(first, placed, first_part)),
        Following(
            factor=second,
            levels=_from_baseline(second, placed, second_part),
            meanwhile=aside[0] if aside else second.default,
        ),
    )


def refuse_two_metrics(named: Sequence[Mention], parts: Sequence[range]) -> None:
    """Raises: PlanningRefused where each part of a sequence is to be decided by a metric of its own."""
    own = [
        [m.what.name for m in named if isinstance(m.what, Metric) and not m.weak and m.start in part] for part in parts
    ]
    said = [set(names) for names in own if names]
    if len(said) > 1 and not set.intersection(*said):
        names = list(dict.fromkeys(name for each in own for name in each))
        raise PlanningRefused(
            f"the parts of the topic name {' and '.join(names)}; one metric decides both comparisons of a study in sequence",
            names,
        )


def _cuts(found: Sequence[Token], i: int) -> bool:
    """Whether another part begins at token `i`; not in `if …, then …`, nor for `faster then`, which means than."""
    keys = [token.key for token in found[i : i + 2]]
    before = found[i - 1].key
    paused = before in _PAUSES and keys[0] in _CUTS_AFTER_A_PAUSE
    if not paused and not any(tuple(keys[: len(cut)]) == cut for cut in _CUTS):
        return False
    compares = before in BETTER | WORSE | MORE | LESS and (before.endswith("er") or before in ("more", "less", "worse"))
    compares = compares and found[min(i + 1, len(found) - 1)].key not in _ASKING | _BEGINNING
    return not compares and not any(token.key == "if" for token in found[:i])


def _mentioned(factors: Sequence[Mention], part: range) -> list[Factor]:
    return list({m.what.name: m.what for m in factors if isinstance(m.what, Factor) and m.start in part}.values())


def _levels_in(placed: Placed, factor: Factor, part: range) -> list[Scalar]:
    return _distinct(level for level in placed.of(factor) if level.at in part)


def _distinct(levels: Iterable[Level]) -> list[Scalar]:
    return list(dict.fromkeys(level.value for level in levels))


def _varied(factors: Sequence[Mention], placed: Placed, part: range) -> list[Factor]:
    return [factor for factor in _mentioned(factors, part) if len(_levels_in(placed, factor, part)) > 1]


def _from_baseline(factor: Factor, placed: Placed, part: range) -> tuple[Scalar, ...]:
    """The default first, where it is among the levels.

    Raises: PlanningRefused for more levels than all can be compared.
    """
    levels = _levels_in(placed, factor, part)
    if len(levels) > MOST_LEVELS:
        raise PlanningRefused(
            f"a study in sequence compares {MOST_LEVELS} levels of a factor at the most, and the topic names {len(levels)} of "
            f"{factor.name}; ask about {factor.name} alone, where many levels race, and then about the other",
            [factor.name],
        )
    return tuple(sorted(levels, key=lambda level: level != factor.default))


def _refuse_two_settings(factors: Sequence[Mention], placed: Placed, varied: Sequence[Factor]) -> None:
    for other in {m.what.name: m.what for m in factors if isinstance(m.what, Factor)}.values():
        levels = _distinct(placed.of(other))
        if other not in varied and len(levels) > 1:
            shown = " and ".join(map(level_text, levels))
            raise _refused(
                f"the topic sets {other.name} to {shown}, and it has to be the same in both parts", [other.name]
            )


def _refused(why: str, names: Sequence[str]) -> PlanningRefused:
    return PlanningRefused(
        f"{why}; a study in sequence compares one factor and then another, each with levels of its own, for example: which "
        "learning rate is best, 1e-5 or 4e-5, and then which group size, 4, 8 or 16?",
        list(dict.fromkeys(names)),
    )
