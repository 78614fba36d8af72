"""Questions of another shape than one level against another: a bound, a chain, an effect at one level against that at another.

All of them are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from researcher.instruments.instrument import Factor
from researcher.planner.levels import Level, Placed, level_text
from researcher.planner.mentions import Mention
from researcher.planner.sides import AGAINST
from researcher.planner.subject import distinct
from researcher.planner.wording import ARTICLES, ASKING, LESS, MORE, SENTENCE_ENDS, Token, key_at, sentences, words
from researcher.refusals import PlanningRefused

_BEYOND = words("beyond above below exceeding")
_FURTHER = words("more fewer less higher lower above below")
_SCENES = words("with on for in at under using given")
_PROFITING = words("benefit profit gain suffer")
_WORKING = words("help helps hurt harm matter work improve")
_EFFECTS = words("effect impact influence benefit gain advantage harm")
_CHAINING = words("< > <= >= beat beats outperform outperforms exceed exceeds surpass surpasses dominate")


def refuse_shapes(found: Sequence[Token], factor: Factor, factors: Sequence[Mention], placed: Placed) -> None:
    """factor: the one that is varied. Raises: PlanningRefused, with what could be asked instead."""
    levels = placed.of(factor)
    own = distinct(found, levels)
    refuse_bounds(found, placed)
    for level in own:
        if len(own) == 1 or _describes(found, factor, factors, level):
            _refuse_bound(found, level)
    if len(own) > 2:
        _refuse_chain(found, factor, levels)
    if len(own) > 1:
        other = _compared_effect(found, factor, factors, placed)
        if other is not None:
            raise PlanningRefused(
                f"whether {other.name} does more at one level of {factor.name} than at another is asked with two levels of each: "
                f"do {other.name} ... or ... and {factor.name} {level_text(own[0].value)} or {level_text(own[1].value)} interact?",
                [other.name, factor.name],
            )


def refuse_bounds(found: Sequence[Token], placed: Placed) -> None:
    """Raises: PlanningRefused where the only level of a factor, varied or set, is a bound: `with more than 6 steps`."""
    for level in placed.levels:
        number = found[level.at].value is not None
        if number and len(distinct(found, placed.of(level.factor))) == 1:
            _refuse_bound(found, level)


def _refuse_bound(found: Sequence[Token], level: Level) -> None:
    """`do you need more than 4 rollouts?`, `is going beyond 8 tokens worth it?`, `are 16 or more needed?`"""
    i = level.at - 1
    while key_at(found, i) in ARTICLES:
        i -= 1
    side = (
        key_at(found, i - 1) in MORE | LESS and key_at(found, i) == "than" and key_at(found, i - 2) not in ("no", "not")
    )
    side = side or key_at(found, i) in _BEYOND or [key_at(found, i - 1), key_at(found, i)] == ["at", "least"]
    side = side or (key_at(found, level.at + 1) == "or" and key_at(found, level.at + 2) in _FURTHER)
    if side:
        shown = level_text(level.value)
        raise PlanningRefused(
            f"the topic says on which side of {shown} a level of {level.factor.name} lies, and not which level it is: name the level, "
            f"or two, as in 'is {level.factor.name} ... better than {shown}?'",
            [level.factor.name],
        )


def _describes(found: Sequence[Token], factor: Factor, factors: Sequence[Mention], level: Level) -> bool:
    """`a learning rate higher than 1e-4 is better than …`: `higher` belongs to the name, and what is claimed comes behind."""
    named = any(mention.what == factor and mention.end == level.at - 2 for mention in factors)
    return named and any(token.key in AGAINST for token in found[level.at + 1 :])


def _refuse_chain(found: Sequence[Token], factor: Factor, levels: Sequence[Level]) -> None:
    """`8 < 16 < 32`: each against the next."""
    cuts = [i for i in range(levels[0].at, levels[-1].at) if found[i].key in _CHAINING]
    if len(cuts) > 1 and any(cuts[0] < level.at < cuts[-1] for level in levels):
        raise PlanningRefused(
            f"the topic sets levels of {factor.name} in a row, each against the next: ask for one pair, or which of "
            f"{', '.join(level_text(level.value) for level in distinct(found, levels))} is best",
            [factor.name],
        )


def _compared_effect(
    found: Sequence[Token], factor: Factor, factors: Sequence[Mention], placed: Placed
) -> Factor | None:
    """The factor whose effect is compared between levels of the varied one; None where levels themselves are compared.

    `does A=1 help more at B=1 than at B=2?`, `does B=1 benefit more from A=1 than B=2?`, `is the effect of A larger at …`.
    """
    for sentence in sentences(found, SENTENCE_ENDS):
        than = next((i for i in sentence if found[i].key == "than"), None)
        own = [level.at for level in placed.of(factor) if level.at in sentence]
        if than is None or len(own) < 2:
            continue
        others = [(m.start, m.what) for m in factors if isinstance(m.what, Factor) and m.what != factor]
        others = [(start, what) for start, what in others if start in sentence]
        for i in range(sentence.start, than):
            amount = any(found[j].key in ("more", "less", "most") for j in (i - 1, i + 1, i + 2, i + 3) if j < than - 1)
            if found[i].key in _PROFITING and amount:
                from_it = [what for start, what in others if i < start < than]
                if from_it and key_at(found, i - 1) not in ("the", "a"):
                    return from_it[0]
            after = min(own) > i
            if found[i].key in _WORKING and amount and after:
                ahead = [what for start, what in others if start < i and _acts(found, start, i, min(own))]
                ahead = [what for what in ahead if not _brings(what, factor)]
                if ahead:
                    return ahead[-1]
            if found[i].key in _EFFECTS and key_at(found, i + 1) in ("of", "from") and after:
                about = [what for start, what in others if i < start < min(own)]
                if about and {found[j].key for j in range(i, than)} & (MORE | LESS):
                    return about[0]
    return None


def _acts(found: Sequence[Token], start: int, verb: int, level: int) -> bool:
    """Whether what is named at `start` may be what helps; not in `with PPO, does training help more at …`, `does it help more to …`."""
    if key_at(found, verb - 1) == "it" and any(found[j].key == "to" for j in range(verb, level)):
        return False
    i = start - 1
    while key_at(found, i) in ARTICLES or (i >= 0 and found[i].value is not None):
        i -= 1
    opens = key_at(found, i) in _SCENES and (i == 0 or found[i - 1].kind == "mark")
    asked = any(found[j].key == "," and found[j + 1].key in ASKING for j in range(start, verb))
    return not opens and (not asked or key_at(found, verb - 1) == "it")


def _brings(other: Factor, factor: Factor) -> bool:
    """`LoRA` has a rank, and a KL penalty a place: the one is not there without the other."""
    return factor.target.startswith(f"{other.target}.") or factor.needs == other.name
