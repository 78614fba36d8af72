"""Which levels a topic sets against which: those that it names, else levels on either side of the default.

What the topic leaves open is noted as an assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import STUDY_MODEL, Factor, Scalar
from researcher.planner import sizes
from researcher.planner.levels import Level, Placed, level_text, off_level, on_level, rounded
from researcher.planner.mentions import Mention, words_before
from researcher.planner.modifiers import led_by, modifiers, moved_unnamed
from researcher.planner.notes import Notes
from researcher.planner.remainder import told_apart
from researcher.planner.sides import (
    AGAINST,
    BESIDE,
    CLAIMING,
    Opposition,
    is_marked,
    is_named,
    is_set_against,
    oppose,
    opposed_behind,
    set_together,
)
from researcher.planner.subject import distinct, keys_of
from researcher.planner.wording import (
    ASKING,
    LESS,
    MORE,
    SCALES,
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

_TURNED = words("is are be being was were gets got turned switched set")
_REMOVING = words("remove removing dropping disabling omitting")
_TAKEN_AWAY = words("off removed disabled dropped omitted")

_STRETCHED = words("long lengthy short brief loose looser tight tighter")
_UP = MORE | words("long lengthy loose looser")
_DOWN = LESS | words("short brief tight tighter")
_EXTREMES = words("small large low high big long short tight loose smaller larger shorter longer")
_VARYING = words("rise rising grow growing increase increasing improve fall falling drop decrease decline up down")
"""With a factor, or of one: `accuracy rises with the group size`, `as temperature falls from …`."""


def opposition_of(
    found: Sequence[Token], factor: Factor, factors: Sequence[Mention], placed: Placed, notes: Notes
) -> Opposition:
    """Raises: PlanningRefused where the only level that is named is the default."""
    own = [m for m in factors if m.what == factor and m.choice is None]
    levels = distinct(found, placed.of(factor))
    if len({level.value for level in levels}) == 2:
        named = [i for m in own for i in range(m.start, m.end)]
        claimed = opposed_behind(found, levels, placed.of(factor), named, off_level(factor))
        if claimed is not None:
            return claimed
    if len(levels) > 1:
        return oppose(found, set_together(found, placed.of(factor), levels), factor.default)
    if factor.target == STUDY_MODEL:
        smaller = not levels and _is_lowered(found, own)
        return _opposed_models(factor, levels, notes, smaller=smaller)
    default = Level(-1, factor, factor.default)
    if levels:
        level = levels[0]
        if factor.type == "choice" and factor.off is not None and level.value == factor.off == factor.default:
            others = tuple(Level(-1, factor, choice) for choice in factor.choices if choice != factor.off)
            behind = bool(own) and is_set_against(found, own[0].start, level.at, listed=False)
            return Opposition(others, (level,)) if behind else Opposition((level,), others)
        off = off_level(factor)
        if off is not None and level.value != off and _is_switched_off(found, own[:1]):
            if any(
                found[i].key in SENTENCE_ENDS or (found[i].key == "," and key_at(found, i + 1) in ASKING)
                for i in range(own[0].end, level.at)
            ):  # `without KL it fell. Does 0.05 help?`
                notes.add(f"{factor.name}={level_text(level.value)} is tested against none.")
                return Opposition((level,), (Level(-1, factor, off),))
            notes.add(f"Taking {factor.name} away is tested against {factor.name}={level_text(level.value)}.")
            return Opposition((Level(-1, factor, off),), (level,))
        if level.value == factor.default and factor.off not in (None, factor.default):
            notes.add(
                f"The topic names one level: {factor.name}={level_text(factor.off)}, without it, is the baseline."
            )
            return Opposition((level,), (Level(-1, factor, factor.off),))
        if level.value == factor.default:
            raise PlanningRefused(
                f"{factor.name}={level_text(level.value)} is the default of {factor.name}: name a second level to "
                f"compare it with, for example {level_text(moved_from_default(factor, 1) or moved_from_default(factor, -1) or level.value)}",
                [factor.name],
            )
        notes.add(
            f"The topic names one level: the default, {factor.name}={level_text(factor.default)}, is the baseline."
        )
        return Opposition((level,), (default,))
    off = off_level(factor)
    if off is not None and _is_switched_off(found, own):
        on = on_level(factor)
        so_far = any(found[i].key in SENTENCE_ENDS for i in range(own[0].end, own[-1].start))
        if not so_far and len(own) == 2:
            levels = [
                Level(m.start, factor, off if is_off else on)
                for m, is_off in zip(own, _switched(found, own), strict=True)
            ]
            if levels[0].value != levels[1].value:
                return oppose(found, levels, None)
        asked = own[-1:] if so_far and not is_marked(found, own[-1].start) else own[:1]
        sides = (off, on) if _is_switched_off(found, asked) else (on, off)
        notes.add(f"The topic names no level of {factor.name}: {level_text(sides[0])} against {level_text(sides[1])}.")
        return Opposition((Level(-1, factor, sides[0]),), (Level(-1, factor, sides[1]),))
    if factor.off is not None and factor.default != factor.off and not _asks_for_a_level(found, own):
        notes.add(
            f"The topic names no level of {factor.name}: {level_text(factor.default)} against {level_text(factor.off)}, without it."
        )
        return Opposition((default,), (Level(-1, factor, factor.off),))
    if (apart := _apart(found, factor, own)) is not None:
        treatment, baseline = level_text(apart.treatments[0].value), level_text(apart.baselines[0].value)
        notes.add(f"The topic names no level of {factor.name}: {treatment} against {baseline}.")
        return apart
    chosen = _chosen(found, factor, own)
    shown = ", ".join(level_text(value) for value in chosen)
    notes.add(f"The topic names no level of {factor.name}: {shown} against the default, {level_text(factor.default)}.")
    return Opposition(tuple(Level(-1, factor, value) for value in chosen), (default,))


def _is_stretched(found: Sequence[Token], mention: Mention) -> bool:
    """`long rollouts`, `tighter clipping`."""
    return mention.start > 0 and found[mention.start - 1].key in _STRETCHED


def _apart(found: Sequence[Token], factor: Factor, own: Sequence[Mention]) -> Opposition | None:
    """`small batches against large ones`, `low temperature better than high`: the first side is the treatment."""
    down, up = moved_from_default(factor, -1), moved_from_default(factor, 1)
    sides = [i for i, token in enumerate(found) if token.key in _EXTREMES]
    if len(sides) != 2 or down is None or up is None:
        return None
    first, second = sides
    opposed = (found[first].key in _UP) != (found[second].key in _UP)
    near = any(m.start - 1 in sides or m.start - 2 == first for m in own)
    if not (opposed and near and is_set_against(found, first, second, listed=False)):
        return None
    treatment, baseline = (up, down) if found[first].key in _UP else (down, up)
    return Opposition((Level(-1, factor, treatment),), (Level(-1, factor, baseline),))


def _asks_for_a_level(found: Sequence[Token], own: Sequence[Mention]) -> bool:
    """`a tighter gradient clipping`, `which clipping norm`; not `does gradient clipping help`."""
    return any(modifiers(found, m) or _is_stretched(found, m) for m in own) or any(
        token.key in ("which", "what") for token in found
    )


def _is_lowered(found: Sequence[Token], own: Sequence[Mention]) -> bool:
    """`halving the model size`, `a lower number of layers`."""
    keys = [found[i].key for m in own for i in modifiers(found, m)]
    return any(key in LESS or SCALES.get(key, 1.0) < 1 for key in keys)


def _opposed_models(factor: Factor, levels: Sequence[Level], notes: Notes, *, smaller: bool) -> Opposition:
    opposition = sizes.opposed(factor, levels)
    if smaller:
        opposition = Opposition(opposition.baselines, opposition.treatments)
    baselines, treatments = (
        ", ".join(level_text(level.value) for level in side) for side in (opposition.baselines, opposition.treatments)
    )
    notes.add(f"The topic does not name two models: {treatments} against {baselines}.")
    return opposition


def _chosen(found: Sequence[Token], factor: Factor, own: Sequence[Mention]) -> list[Scalar]:
    """Levels for a factor that has none in the topic: as it is said to be moved, else on either side of the default."""
    if factor.type == "choice":
        return [choice for choice in factor.choices if choice != factor.default]
    if factor.type == "bool":
        return [not factor.default]
    keys = [found[i] for m in own for i in modifiers(found, m)]
    scaled = next(
        (
            SCALES.get(t.key, t.value if t.kind == "times" else None)
            for t in keys
            if t.key in SCALES or t.kind == "times"
        ),
        None,
    )
    if scaled is not None and not isinstance(factor.default, str):
        _refuse_two_scales(found, factor)
        return [_in_range(factor, _as_type(factor, factor.default * _inverse(scaled, keys)))]
    if factor.default == off_level(factor):
        return [on_level(factor)]
    keys += [found[m.start - 1] for m in own if _is_stretched(found, m)]
    keys += [
        found[m.start - 3] for m in own if key_at(found, m.start - 2) == "or" and m.start > 2
    ]  # `a higher or lower rate`
    keys += [found[i] for i in _is_better(found)]
    down = any(token.key in _DOWN for token in keys)
    up = any(token.key in _UP for token in keys)
    signs = [1] if up and not down else [-1] if down and not up else [-1, 1]
    moved = [level for level in (moved_from_default(factor, sign) for sign in signs) if level is not None]
    if not moved:
        raise PlanningRefused(f"{factor.name} cannot go further: its default is at the end of its range", [factor.name])
    return moved


def _refuse_two_scales(found: Sequence[Token], factor: Factor) -> None:
    """Raises: PlanningRefused for `8x beats 4x`, which may be levels."""
    scales = [i for i, token in enumerate(found) if token.kind == "times"]
    other = next(
        (i for i in scales[1:] if key_at(found, before_articles(found, i)) in AGAINST | BESIDE | {"or", "to"}), None
    )
    if other is not None:
        written = f"{found[scales[0]].text} and {found[other].text}"
        raise PlanningRefused(
            f"{written!r} may be levels or multiples of the default: name the levels themselves", [factor.name]
        )


def _is_switched_off(found: Sequence[Token], own: Sequence[Mention]) -> bool:
    """`removing KL`, `without hints`, `turning hints off`; not `dropping the rate tenfold`."""
    if any(found[i].kind == "times" or found[i].key in SCALES for m in own for i in modifiers(found, m)):
        return False
    before = [words_before(found, m) for m in own]
    off = any(keys & SWITCHED_OFF or ("not" in keys and keys & SWITCHED_ON) for keys in before)
    off = off or any(_is_dropped(found, m) for m in own)
    off = off or any(_is_removed(found, i) for m in own for i in range(m.end, len(found)))
    return off or any(_is_taken_away(found, m.end) for m in own)


def _switched(found: Sequence[Token], own: Sequence[Mention]) -> list[bool]:
    """Which are switched off by what stands between them: `from no warmup to warmup`."""
    starts = [0, *(m.end for m in own[:-1])]
    return [
        _is_switched_off(found[at:], [replace(m, start=m.start - at, end=m.end - at)])
        for at, m in zip(starts, own, strict=True)
    ]


def _is_dropped(found: Sequence[Token], mention: Mention) -> bool:
    """`to drop KL`; not `drop KL to 0.01`, `does accuracy drop with KL`."""
    dropped = key_at(found, before_articles(found, mention.start)) == "drop"
    return dropped and key_at(found, mention.end) not in ("to", "from", "by")


def _is_removed(found: Sequence[Token], i: int) -> bool:
    """`KL slows learning; does removing it help?`"""
    return found[i].key in _REMOVING and key_at(found, i + 1) in ("it", "them")


def _is_taken_away(found: Sequence[Token], i: int) -> bool:
    """`off`, `is turned off`, `were removed`, behind a name; not `is dropped to 0.01`."""
    while key_at(found, i) in _TURNED:
        i += 1
    return key_at(found, i) in _TAKEN_AWAY and key_at(found, i + 1) not in ("to", "from", "by")


def _inverse(scale: float, keys: Sequence[Token]) -> float:
    """`10x lower` divides."""
    return 1 / scale if scale > 1 and any(token.key in LESS for token in keys) else scale


def moved_from_default(factor: Factor, sign: int) -> Scalar | None:
    """A level clearly above or below the default: by a factor of two for counts, of four on a wide scale, else half the way."""
    if factor.type not in ("int", "float") or isinstance(factor.default, str):
        return None
    default = float(factor.default)
    bound = factor.high if sign > 0 else factor.low
    wide = factor.scale == "log" or (default > 0 and factor.high is not None and factor.high > 20 * default)
    if wide or factor.type == "int":
        step = 2.0 if factor.type == "int" else 4.0
        level = default * step**sign
        if bound is not None:
            level = min(level, bound) if sign > 0 else max(level, bound)
    else:
        level = default + sign if bound is None else (default + bound) / 2
    moved = _as_type(factor, level)
    return None if (float(moved) - default) * sign <= 0 or level_problem(factor, moved) else moved


def _as_type(factor: Factor, value: float) -> Scalar:
    return max(1, round(value)) if factor.type == "int" else rounded(value)


def _in_range(factor: Factor, level: Scalar) -> Scalar:
    if problem := level_problem(factor, level):
        raise PlanningRefused(problem, [factor.name])
    return level


def oriented(
    found: Sequence[Token], factor: Factor, named: Sequence[Mention], opposition: Opposition, notes: Notes
) -> Opposition:
    """`a higher learning rate, 1e-5 or 4e-5`: the treatment is the higher one.

    Raises: PlanningRefused when the topic says that the factor moves one way, and names levels that go the other.
    """
    ways = _ways(found, factor, named, opposition)
    if len(opposition.treatments) > 1 and len(opposition.baselines) == 1:
        return _trend(found, opposition, ways)
    if len(opposition.treatments) != 1 or len(opposition.baselines) != 1:
        return opposition
    treatment, baseline = opposition.treatments[0], opposition.baselines[0]
    if treatment.at < 0 and baseline.at < 0:
        return opposition
    wrong = told_apart(treatment.value, baseline.value, ways)
    if ways and isinstance(treatment.value, str) and led_by(found, named, [treatment.at, baseline.at]):
        raise PlanningRefused(
            f"which of {level_text(treatment.value)} and {level_text(baseline.value)} is more, the topic does not say; ask whether one "
            "of them beats the other",
            [factor.name],
        )
    if wrong is None:
        return opposition
    first, last = sorted((treatment.at, baseline.at))
    says_which = {"from", "than", "beat"} & set(keys_of(found, 0, last)) or AGAINST & set(keys_of(found, first, last))
    if first < 0 or says_which:
        raise PlanningRefused(
            f"the topic has {factor.name} {wrong}, but {level_text(treatment.value)} against "
            f"{level_text(baseline.value)} goes the other way; name the two levels in the order that you mean",
            [factor.name],
        )
    notes.add(f"The topic has {factor.name} {wrong}: {level_text(baseline.value)} is the treatment.")
    return Opposition(opposition.baselines, opposition.treatments)


def _ways(found: Sequence[Token], factor: Factor, named: Sequence[Mention], opposition: Opposition) -> list[str]:
    """What the topic says of how the factor moves: `a larger group`, `is more better?`, `rises with the group size`.

    Not `improves with a group size of 4 versus 16`, where what follows is the treatment.
    """
    levels = sorted((*opposition.treatments, *opposition.baselines), key=lambda level: level.at)
    asked = _asked(found, levels)
    own = [m for m in named if m.what == factor and m.start in asked]
    led = led_by(found, named, [level.at for level in levels])
    keys = [token.key for token in found]
    ways = [way for i, way in led.items() if i in asked]
    ways += [keys[i] for m in own for i in modifiers(found, m)]
    ways += [keys[i] for i in (*moved_unnamed(found), *_is_better(found)) if i in asked]
    ways += ["less"] * any(words_before(found, m) & _REMOVING for m in own)
    ways += [keys[m.end] for m in own if key_at(found, m.end) in _VARYING & (MORE | LESS) and _goes_on(keys, m.end)]
    with_it = next(
        (m for m in own if "with" in words_before(found, m) and _VARYING & set(keys[max(0, m.start - 4) : m.start])),
        None,
    )
    if ways or with_it is None or not {"and", "or"}.isdisjoint(words_before(found, with_it)):
        return ways
    lists = key_at(found, with_it.end) in ("(", ":", ",") and with_it.end < levels[0].at
    opposed = is_named(found, levels) and not (lists and set(keys[levels[0].at : levels[-1].at]).isdisjoint(AGAINST))
    of_one = key_at(found, with_it.end) == "of" or with_it.end in [level.at for level in levels]
    return [] if opposed or of_one else ["more"]


def _asked(found: Sequence[Token], levels: Sequence[Level]) -> set[int]:
    """The tokens of the sentences that claim something of the levels; all of them where the levels are only listed."""
    own = [each for each in sentences(found, SENTENCE_ENDS) if any(level.at in each for level in levels)]
    claims = any(found[i].key in CLAIMING for each in own for i in each)
    return {i for each in own for i in each} if claims else set(range(len(found)))


def _is_better(found: Sequence[Token]) -> list[int]:
    """`is bigger better?`: how the factor moves."""
    keys = [token.key for token in found]
    return [
        i
        for i in range(1, len(keys) - 1)
        if (keys[i - 1] in ("is", "are") or keys[1] == "is")
        and keys[i] in MORE | LESS
        and keys[i + 1] in ("better", "worse", "faster")
    ]


def _goes_on(keys: Sequence[str], i: int) -> bool:
    """`as temperature rises from 0.7`, behind the verb."""
    return bool(set(keys[i + 1 : i + 2]) & {"from", "over", "through", "across"})


def _trend(found: Sequence[Token], opposition: Opposition, ways: Sequence[str]) -> Opposition:
    """`larger groups learn faster: 2, 4, 8, 16`: each is set against the lowest, or of smaller ones against the highest."""
    levels = sorted((*opposition.treatments, *opposition.baselines), key=lambda level: level.at)
    up, down = bool(set(ways) & MORE), bool(set(ways) & LESS)
    if up == down or any(isinstance(level.value, str | bool) for level in levels) or is_named(found, levels):
        return opposition
    baseline = (min if up else max)(levels, key=lambda level: float(level.value))
    return Opposition(tuple(level for level in levels if level is not baseline), (baseline,))
