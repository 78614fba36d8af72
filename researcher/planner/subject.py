"""What a topic is about: the one factor that it varies, several whose interaction it asks for, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from researcher.instruments.instrument import STUDY_MODEL, Factor, Instrument, Scalar
from researcher.planner.levels import Level, Placed, off_level
from researcher.planner.mentions import Mention, words_before, words_over
from researcher.planner.modifiers import modifiers
from researcher.planner.sides import AGAINST, BESIDE, is_set_against
from researcher.planner.wording import (
    ARTICLES,
    SENTENCE_ENDS,
    SWITCHED_OFF,
    SWITCHED_ON,
    Token,
    before_articles,
    key_at,
    sentences,
    words,
)
from researcher.refusals import PlanningRefused

_SCENE = words("with at on over for given when under in while keeping holding using")
"""Before a level these make it the scene, not the question, where something else is asked about."""


_CROSSING = words("interact interacts interaction interplay factorial crossed")
_BETWEEN = words("moderate modulate mediate")
"""`does KL moderate the effect of the learning rate?`: with a factor on either side; else `a moderate learning rate`."""
TOGETHER = _CROSSING | _BETWEEN
_NEEDED = words("need require necessary")
"""`does PPO need a KL penalty?`"""
_EFFECTS = words("effect impact influence role")
_DEPENDING = words("change vary depend scale differ")
_COMPARING = words("compare comparing compared comparison")
_DIFFERING = words("differ different difference distinguish")
_RUNS = words("run arm trial training identical")
_MIXING = words("mix mixture mixing blend curriculum")
_JOINING = words("and to with then plus")
_NEAR = 5
"""Between `same`, or `from`, and its level: `the same learning rate of 1e-3`."""
_MOST_CROSSED = 5


def crossed_factors(
    found: Sequence[Token], factors: Sequence[Mention], placed: Placed
) -> list[tuple[Factor, tuple[Scalar, Scalar]]]:
    """The factors whose interaction the topic asks for, with two levels each; empty where it asks for none.

    Raises: PlanningRefused where it does, and levels are missing or too many.
    """
    if not any(_crosses(found, i, factors) for i in range(len(found))):
        return []
    things = list({m.what.name: m.what for m in factors if isinstance(m.what, Factor)}.values())
    levels = {factor.name: [level.value for level in distinct(found, placed.of(factor))] for factor in things}
    if sum(len(values) == 2 for values in levels.values()) > 1:
        # `interact on one-digit sums`: what has one level sets the scene.
        things = [factor for factor in things if len(levels[factor.name]) != 1]
    wrong = [factor.name for factor in things if len(levels[factor.name]) != 2]
    if len(things) < 2 or len(things) > _MOST_CROSSED or wrong:
        raise PlanningRefused(
            "an interaction is asked of two to five factors with two levels each, for example: "
            "do a learning rate of 1e-5 or 4e-5 and a group size of 4 or 8 interact?"
            + (f" (other than two levels: {', '.join(wrong)})" if wrong else ""),
            list(levels),
        )
    return [(factor, (levels[factor.name][0], levels[factor.name][1])) for factor in things]


def _crosses(found: Sequence[Token], i: int, factors: Sequence[Mention]) -> bool:
    if found[i].key in _CROSSING:
        return True
    between = any(m.end <= i for m in factors) and any(m.start > i for m in factors)
    return found[i].key in _BETWEEN and between and key_at(found, i - 1) not in ARTICLES


def asked_about(found: Sequence[Token], factors: Sequence[Mention], placed: Placed, instrument: Instrument) -> Factor:
    """The one factor that the topic varies.

    That with several levels; else one that is raised, doubled or switched; else one of the run's own before the scene's.
    """
    things = _things(factors)
    asked = varied(found, factors, placed)
    if len(asked) > 1:
        raise _several_asked(asked)
    if asked:
        return asked[0]
    ranked = sorted(things, key=lambda factor: _rank(found, factor, factors, placed))
    ranks = [_rank(found, factor, factors, placed)[0] for factor in ranked]
    if len(ranked) > 1 and ranks[0] == ranks[1] and ranks[0] in (0, 2):
        raise _several_asked(ranked[:2])
    return ranked[0]


def varied(found: Sequence[Token], factors: Sequence[Mention], placed: Placed) -> list[Factor]:
    """Those with several levels, then those that are raised, doubled or switched without one."""
    things = _things(factors)
    several = [factor for factor in things if len(distinct(found, placed.of(factor))) > 1]
    different = [factor for factor in several if len({level.value for level in placed.of(factor)}) > 1]
    several = different or several  # `A with 0.8 or B with 0.8`: what is the same on both sides is not asked about
    moved = [
        factor for factor in things
        if not placed.of(factor)
        and any(_is_moved(found, m) and not (several and _stays_off(found, m)) for m in factors if m.what == factor)
    ]  # fmt: skip
    return [*several, *moved]


def _things(factors: Sequence[Mention]) -> list[Factor]:
    return list({m.what.name: m.what for m in factors if isinstance(m.what, Factor)}.values())


def refuse_two_subjects(found: Sequence[Token], factor: Factor, factors: Sequence[Mention], placed: Placed) -> None:
    """Whether one factor matters more than another, or for the levels of another, is a question about both."""
    effects = [m.end for m in factors if m.what == factor and words_before(found, m) & _EFFECTS]
    for mention in factors:
        other = mention.what
        if not isinstance(other, Factor) or other == factor or placed.of(other):
            continue
        start = before_articles(found, mention.start) + 1
        of = keys_of(found, start - 2, start)
        behind = keys_of(found, mention.end, mention.end + 1)
        asked = of[-1:] == ["of"] and of[0] in _EFFECTS
        asked = asked or any(
            found[end].key in _DEPENDING for end in effects if end < start
        )  # `change with the temperature`
        if (
            asked
            or of[-1:] == ["than"]
            or of == ["than", "on"]
            or (behind and behind[0] in ("matter", "affect", "influence"))
        ):
            raise _several_asked([factor, other])
        if any(_moved_together(found, m, mention) or _either(found, m, mention) for m in factors if m.what == factor):
            raise _several_asked([factor, other])


def refuse_mixes(found: Sequence[Token], factor: Factor, placed: Placed) -> None:
    """Raises: PlanningRefused for `a mix of one- and two-digit sums`, `a curriculum from 1 to 2 digits`: an arm has one level."""
    for sentence in sentences(found, SENTENCE_ENDS):
        mix = next((i for i in sentence if found[i].key in _MIXING), None)
        behind = [
            level.at for level in placed.of(factor) if level.at in sentence and mix is not None and level.at > mix
        ]
        if (
            mix is not None
            and len(behind) > 1
            and behind[0] - mix < _NEAR
            and _JOINING & set(keys_of(found, behind[0], behind[1]))
        ):
            raise PlanningRefused(
                f"a {found[mix].text} is no level of {factor.name}, of which an arm has one throughout; compare two levels of it, or "
                "write an instrument whose tasks are mixed (docs/instruments.md)",
                [factor.name],
            )


def _moved_together(found: Sequence[Token], one: Mention, other: Mention) -> bool:
    """`doubling the group size and the learning rate`, `raising both`: what is said of the first is said of the second."""
    first, second = sorted((one, other), key=lambda mention: mention.start)
    between = keys_of(found, first.end, second.start)
    joined = "and" in between and set(between) <= ARTICLES | {"and"}
    return joined and (_is_moved(found, first) or "both" in words_before(found, first))


def _either(found: Sequence[Token], one: Mention, other: Mention) -> bool:
    """`which matters more, the learning rate or the group size?`"""
    first, second = sorted((one, other), key=lambda mention: mention.start)
    between = keys_of(found, first.end, second.start)
    return "or" in between and set(between) <= ARTICLES | {"or"}


def _several_asked(factors: Sequence[Factor]) -> PlanningRefused:
    names = list(dict.fromkeys(factor.name for factor in factors))
    return PlanningRefused(
        f"the topic varies {' and '.join(names)} together, and then neither could be told from the other; "
        "ask about one of them, and set the other for both arms (`with ...`), for one after the other (`which ... is best, "
        "..., and then which ...`), or whether they interact, with two levels of each",
        names,
    )


def _rank(found: Sequence[Token], factor: Factor, factors: Sequence[Mention], placed: Placed) -> tuple[int, int]:
    """Lower is likelier to be the question: levels beside the default, of the run, not as a scene; then by position."""
    own = [m for m in factors if m.what == factor]
    at = min(m.start for m in own)
    levels = placed.of(factor)
    scene = _is_scene(found, min([at, *(level.at for level in levels)]))
    if not factor.target.startswith(("run.", STUDY_MODEL)) and (levels or off_level(factor) is None):
        return (3 if levels else 4), at
    if levels:
        changed = any(level.value != factor.default for level in levels)
        return (0 if changed and not scene else 2), at
    return 1, at


def _is_scene(found: Sequence[Token], at: int) -> bool:
    """Whether one of the three words before it sets the scene; `with A and B` sets both."""
    return bool(words_over(found, at) & _SCENE)


def _is_moved(found: Sequence[Token], mention: Mention) -> bool:
    """Raised, lowered, doubled, added or taken away, without a level."""
    near = words_before(found, mention)
    switched = off_level(mention.what) is not None if isinstance(mention.what, Factor) else False
    return bool(modifiers(found, mention)) or (switched and bool(near & (SWITCHED_ON | SWITCHED_OFF | _NEEDED)))


def _stays_off(found: Sequence[Token], mention: Mention) -> bool:
    """`4 or 8 without a KL penalty`, where there is none by default: nothing is varied."""
    factor = mention.what
    near = words_before(found, mention)
    return isinstance(factor, Factor) and bool(near & SWITCHED_OFF) and off_level(factor) == factor.default


def distinct(found: Sequence[Token], levels: Sequence[Level]) -> list[Level]:
    """Levels without repeats; the same level twice stands when it is set against itself (a null study)."""
    seen: list[Level] = []
    for level in levels:
        if level.value not in [other.value for other in seen]:
            seen.append(level)
    if len(seen) != 1:
        return seen
    if len(levels) == 2 and (
        is_set_against(found, levels[0].at, levels[1].at) or _differs(found, levels[0].at, levels[1].at)
    ):
        return list(levels)
    again = _again(found, seen[0])
    return seen if again is None else [seen[0], again]


def _differs(found: Sequence[Token], first: int, last: int) -> bool:
    """`does 4 differ from 4`, `compare 4 with 4`."""
    near = keys_of(found, max(first, last - _NEAR), last)
    led = _DIFFERING if "from" in near else _COMPARING if "with" in near else set()
    between = set(keys_of(found, first, last))
    return bool(led & set(keys_of(found, 0, last))) and not between & SENTENCE_ENDS


def _again(found: Sequence[Token], level: Level) -> Level | None:
    """The level that `itself` stands for, or the second of `two runs with the same rate of 1e-3`."""
    for i in range(max(0, level.at + 1), len(found)):
        if found[i].key == "itself" and found[i - 1].key in AGAINST | BESIDE | {"from", "with", "to", "as"}:
            return replace(level, at=i)
    same = "same" in keys_of(found, level.at - _NEAR, level.at)
    pair = any(token.key in ("two", "both") and key_at(found, i + 1) in _RUNS for i, token in enumerate(found))
    asked = any(token.key in _COMPARING | _DIFFERING for token in found)
    return level if same and pair and asked else None


def keys_of(found: Sequence[Token], start: int, end: int) -> list[str]:
    """The keys of tokens [start, end), within the topic."""
    return [token.key for token in found[max(0, start) : max(0, end)]]
