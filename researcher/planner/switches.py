"""Levels of a factor that stand as switches and defaults in a topic: `with and without KL`, `KL on or off`, `than the default`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from researcher.instruments.instrument import Factor
from researcher.planner.levels import Level, Placed, off_level, on_level
from researcher.planner.mentions import Mention
from researcher.planner.sides import AGAINST, BESIDE
from researcher.planner.wording import (
    ARTICLES,
    ASKING,
    BETTER,
    COPULAS,
    LESS,
    MORE,
    SWITCHED_OFF,
    WORSE,
    Token,
    key_at,
    words,
)

_STATES = words("on off true false")
_BETWEEN = _STATES | words("or and vs versus turned switched set than / = : is are to")
"""Between a factor's name and what switches it: `KL on or off`, `KL is turned off`."""
_FARING = words("learn train reach give get need take perform lead yield make")
_BEHIND = (
    _FARING
    | BETTER
    | WORSE
    | MORE
    | LESS
    | _BETWEEN
    | ASKING
    | AGAINST
    | BESIDE
    | COPULAS
    | words("? . , ; ) -> => when while")
    | {""}
)
"""Behind `on` these say that it switches, and is no preposition: `no KL penalty on sums`."""


def settle_switches(found: Sequence[Token], owner: Mapping[int, Mention], placed: Placed, factor: Factor) -> None:
    """`with and without KL`, `KL on or off`: levels of a factor that can be switched off."""
    off = off_level(factor)
    if off is None:
        return
    switches = _switches(found, owner, factor) or _adjectives(found, owner, factor)
    numbered = [level for level in placed.of(factor) if level.value != off]
    if len({on for _, on in switches}) < 2 and not (numbered and any(not on for _, on in switches)):
        return
    for i, on in switches:
        if not on or not numbered:
            placed.levels.append(Level(i, factor, on_level(factor) if on else off))


def settle_lone_off(found: Sequence[Token], named: Sequence[Mention], placed: Placed) -> None:
    """`with KL off, does a group size of 16 beat 4?`: off in all arms, where another factor is compared."""
    if not any(len({each.value for each in placed.of(level.factor)}) > 1 for level in placed.levels):
        return
    owner = {i: m for m in named if isinstance(m.what, Factor) for i in range(m.start, m.end)}
    for factor in {m.what.name: m.what for m in owner.values() if isinstance(m.what, Factor)}.values():
        off = off_level(factor)
        if off is None or placed.of(factor):
            continue
        lone = [i for i, on in _switches(found, owner, factor) if not on and found[i].key == "off"]
        placed.levels += [Level(i, factor, off) for i in lone[:1]]


def _switches(found: Sequence[Token], owner: Mapping[int, Mention], factor: Factor) -> list[tuple[int, bool]]:
    """Tokens that switch `factor`, and whether on."""
    result = []
    for i, token in enumerate(found):
        if i in owner or token.kind != "word":
            continue
        toward = _toward(found, owner, i)
        if token.key in SWITCHED_OFF | {"with", "using", "adding"} and toward in (factor.name, None):
            if token.key in SWITCHED_OFF or not _is_set_behind(found, owner, i):
                result.append((i, token.key not in SWITCHED_OFF))
        elif token.key in ("on", "off") and not _is_place(found, i) and _about(found, owner, i) == factor.name:
            result.append((i, token.key == "on"))
        elif token.key in ("true", "false") and _about(found, owner, i) == factor.name:
            result.append((i, token.key == "true"))
    if any(not on for _, on in result):
        return result
    return []


def _is_place(found: Sequence[Token], i: int) -> bool:
    """`on sums`; not `on or off`, `is KL on faster than off?`"""
    return found[i].key == "on" and key_at(found, i + 1) not in _BEHIND


def _is_set_behind(found: Sequence[Token], owner: Mapping[int, Mention], i: int) -> bool:
    """`with slippery off`, `using slippery=false`: what stands behind the name switches it."""
    j = next((j for j in range(i + 1, i + 6) if j in owner), len(found))
    while j in owner or key_at(found, j) in _BETWEEN - _STATES - {"or", "and", "vs", "versus", "than", "/"}:
        j += 1
    return key_at(found, j) in _STATES and not _is_place(found, j)


def _adjectives(found: Sequence[Token], owner: Mapping[int, Mention], factor: Factor) -> list[tuple[int, bool]]:
    """`a non-slippery lake than a slippery one`."""
    own = {mention.start for mention in owner.values() if mention.what == factor}
    said = [(i, key_at(found, i - 1) != "non") for i in sorted(own)]
    return said if factor.type == "bool" and any(not on for _, on in said) else []


def _toward(found: Sequence[Token], owner: Mapping[int, Mention], i: int) -> str | None:
    """What a preposition stands before: a factor's name, None for nothing more (`than without`), else other."""
    for j in range(i + 1, min(i + 6, len(found))):
        mention = owner.get(j)
        if mention is not None:
            return mention.what.name
        key = found[j].key
        if key in ("?", ".", "it", "that", "one") or j == len(found) - 1:
            return None
        if key not in ARTICLES | {"and", "or", "with", "without", "vs", "versus", "than", "/"}:
            return "other"
    return None if i == len(found) - 1 else "other"


def _about(found: Sequence[Token], owner: Mapping[int, Mention], i: int) -> str | None:
    for j in range(i - 1, -1, -1):
        if (mention := owner.get(j)) is not None:
            return mention.what.name
        if found[j].key not in _BETWEEN:
            return None
    return None


def settle_default(found: Sequence[Token], owner: Mapping[int, Mention], placed: Placed, factor: Factor) -> None:
    """`than the default`: a level like any other."""
    if any(level.value == factor.default for level in placed.of(factor)):
        return
    for i, token in enumerate(found):
        if token.key in ("default", "usual", "standard") and i not in owner and placed.of(factor):
            mention = owner.get(i + 1)
            if mention is None or mention.what == factor:
                placed.levels.append(Level(i, factor, factor.default))
                return
