"""A topic, read against an instrument: which factor is varied over which levels, on which metric, claiming what.

Any factor and any metric that the instrument declares. What is ambiguous, out of range or left over is refused with what
could be asked instead; what the topic merely leaves open is filled and stated as an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from researcher.models import RUN_PARAMETERS, STUDY_MODEL, STUDY_STEPS, Factor, Instrument, Metric, Scalar
from researcher.planner import balance, sequence, sizes
from researcher.planner.claims import CHOICES_BETWEEN, Opposition, Stated, claimed, is_set_against, modifiers, oppose
from researcher.planner.clauses import place_by_clause
from researcher.planner.instruments import level_problem
from researcher.planner.levels import Level, Placed, as_level, level_text, off_level, on_level, rounded
from researcher.planner.mentions import (
    Mention,
    a_few,
    inflected,
    is_given,
    mentions,
    misspelt,
    nearest_factors,
    nearest_metrics,
    words_before,
)
from researcher.planner.notes import Notes, better, settings_of
from researcher.planner.outcomes import metric_of, refuse_effect_sizes
from researcher.planner.reading import Reading
from researcher.planner.refusals import PlanningRefused
from researcher.planner.remainder import (
    refuse_idle,
    refuse_missing_data,
    refuse_other_methods,
    refuse_quotients,
    refuse_shifts,
    refuse_unknown_names,
    told_apart,
    unread,
)
from researcher.planner.several import crossed_reading, sequenced_reading
from researcher.planner.subject import asked_about, crossed_factors, distinct, keys_of, refuse_two_subjects
from researcher.planner.wording import (
    LESS,
    MORE,
    SCALES,
    SWITCHED_OFF,
    Token,
    tokens,
)
from researcher.planner.written import taken_out


def read(topic: str, instrument: Instrument) -> Reading:
    """Raises: PlanningRefused, one clear line, with the nearest things that could be asked."""
    instrument = with_steps(instrument)
    written = taken_out(topic, instrument)
    sizes.refuse_models(written.topic, instrument)
    found = tokens(written.topic)
    named = mentions(instrument, found, written.levels)
    _refuse_misspelt(topic, instrument, found, named)
    refuse_other_methods(instrument, found, named)
    if not any(isinstance(m.what, Metric) and not m.weak for m in named):
        named += [m for m in [inflected(instrument, found, named)] if m is not None]
    parts = sequence.parts_of(found, named)
    named = [
        m for m in named if m.start not in {part.start for part in parts[1:]}
    ]  # `second, the rank` counts no seconds
    placed = place_by_clause(found, named, parts)
    factors = [m for m in named if isinstance(m.what, Factor) and _may_vary(m.what, found, placed)]
    refuse_unknown_names(instrument, found, named)
    refuse_missing_data(instrument, placed)
    if not factors:
        raise _nothing_matched(topic, instrument, found)
    if placed.unplaced:
        raise PlanningRefused(
            f"no factor of {instrument.name} could be tied to {placed.unplaced[0].text!r} in the topic; "
            f"factors: {a_few(nearest_factors(instrument, found), instrument)}",
            nearest_factors(instrument, found),
        )
    _refuse_bad_levels(placed.levels)
    _set_against_all_weights(instrument, placed)
    notes = Notes(list(written.notes))
    balanced = balance.is_asked(found)
    metric, assumed = metric_of(instrument, found, balance.gains(named) if balanced else named, placed)
    for line in assumed:
        notes.add(line)
    refuse_effect_sizes(placed, metric)
    refuse_shifts(placed)
    refuse_quotients(found, placed)
    crossed = crossed_factors(found, factors, placed)
    asked = sequence.asked_for(found, factors, placed, parts) if parts else None
    if asked is not None:
        if crossed or balanced:
            beside = "an interaction" if crossed else "a balance"
            raise PlanningRefused(
                f"the topic asks for {beside}, and for two comparisons in sequence; ask for one of them"
            )
        sequence.refuse_two_metrics(named, parts)
        return sequenced_reading(instrument, found, named, asked, metric, placed, notes)
    if crossed:
        refuse_idle(instrument, [each for each, _ in crossed], placed)
        return crossed_reading(instrument, found, named, crossed, metric, placed, notes)
    factor = asked_about(found, factors, placed, instrument)
    refuse_two_subjects(found, factor, factors, placed)
    refuse_idle(instrument, [factor], placed)
    opposition = _opposition(found, factor, factors, placed, notes)
    if not balanced:
        opposition = _oriented(found, factor, factors, opposition, notes)
    reading = _reading(instrument, found, named, factor, opposition, metric, placed, notes)
    return balance.balanced(reading, instrument, named) if balanced else reading


def _may_vary(factor: Factor, found: Sequence[Token], placed: Placed) -> bool:
    """Not what a single family of tasks or file says, which sets the scene."""
    return not is_given(factor) or len(distinct(found, placed.of(factor))) > 1


def with_steps(instrument: Instrument) -> Instrument:
    """Every instrument's trials have a length, declared as a factor or not."""
    if any(factor.target == STUDY_STEPS for factor in instrument.factors):
        return instrument
    steps = Factor(
        name="steps",
        target=STUDY_STEPS,
        type="int",
        default=instrument.defaults.steps,
        low=1,
        aliases=("training steps", "optimiser steps", "optimizer steps", "number of steps", "updates"),
    )
    return instrument.model_copy(update={"factors": (*instrument.factors, steps)})


# -- what cannot be asked -------------------------------------------------------------------------------------------


def _nothing_matched(topic: str, instrument: Instrument, found: Sequence[Token]) -> PlanningRefused:
    near, metrics = nearest_factors(instrument, found), nearest_metrics(instrument, found)
    taking = _taking(instrument, [token for token in found if token.kind == "number"])
    hint = ""
    if taking:
        shown = " and ".join(token.text for token in found if token.kind == "number")
        hint = f" (if {shown} are levels of {taking[0]}, write its name with them)"
        near = list(dict.fromkeys([*taking, *near]))
    return PlanningRefused(
        f"{topic.strip()!r} names nothing that {instrument.name} can vary{hint}. Ask about one of its factors, as "
        f"{a_few(near, instrument)}, and one of its metrics ({', '.join(metrics)}), for example: {example(instrument)!r}",
        [*near, *metrics],
    )


def _taking(instrument: Instrument, numbers: Sequence[Token]) -> list[str]:
    """Factors that could take all of these numbers, the one whose default is nearest first."""
    values = [token.value for token in numbers if token.value is not None]
    fits: list[tuple[float, str]] = []
    for factor in instrument.factors:
        if factor.type not in ("int", "float") or isinstance(factor.default, str) or len(values) < 2:
            continue
        if all(level_problem(factor, as_level(factor, value)) is None for value in values):
            usual = abs(float(factor.default)) or 1.0
            fits.append((sum(abs(math.log(max(abs(value), 1e-12) / usual)) for value in values), factor.name))
    return [name for _, name in sorted(fits)]


def example(instrument: Instrument) -> str:
    """A topic that this instrument can answer."""
    for factor in sorted(instrument.factors, key=lambda factor: factor.name != "learning_rate"):
        if factor.type in ("int", "float"):
            moved = _moved(factor, 1) or _moved(factor, -1)
            if moved is not None:
                name, default = factor.name.replace("_", " "), level_text(factor.default)
                data = " on train.jsonl" if any(each.type == "data" for each in instrument.factors) else ""
                return f"Does a {name} of {level_text(moved)} learn faster than {default}{data}?"
    return f"What does {instrument.factors[0].name.replace('_', ' ')} do?"


def _refuse_misspelt(topic: str, instrument: Instrument, found: Sequence[Token], named: Sequence[Mention]) -> None:
    wrong = misspelt(instrument, found, named)
    if wrong:
        hints = "; ".join(f"{text!r}: did you mean {name}?" for text, name in wrong[:3])
        near = [name for _, name in wrong]
        raise PlanningRefused(f"the topic names what {instrument.name} does not know. {hints}", near)


def _refuse_bad_levels(levels: Sequence[Level]) -> None:
    problems = [p for level in levels if (p := level_problem(level.factor, level.value))]
    if problems:
        raise PlanningRefused(problems[0], list(dict.fromkeys(level.factor.name for level in levels)))


def _set_against_all_weights(instrument: Instrument, placed: Placed) -> None:
    """`LoRA of rank 8 or full fine-tuning?`: adapters of that rank against all weights.

    Raises: PlanningRefused where several ranks or alphas are.
    """
    whole = next((factor for factor in instrument.factors if factor.target == RUN_PARAMETERS), None)
    parts = [level for level in placed.levels if level.factor.target.startswith(f"{RUN_PARAMETERS}.")]
    if whole is None or not parts or {level.value for level in placed.of(whole)} != {"full"}:
        return
    if len({(level.factor.name, level.value) for level in parts}) > len({level.factor.name for level in parts}):
        raise PlanningRefused(
            "full fine-tuning has no rank and no alpha: compare it with LoRA of one rank, or LoRA's ranks with each other",
            [whole.name],
        )
    placed.levels.append(Level(min(level.at for level in parts), whole, "lora"))


# -- the levels -----------------------------------------------------------------------------------------------------


def _opposition(
    found: Sequence[Token], factor: Factor, factors: Sequence[Mention], placed: Placed, notes: Notes
) -> Opposition:
    own = [m for m in factors if m.what == factor and m.choice is None]
    levels = distinct(found, placed.of(factor))
    if len(levels) > 1:
        return oppose(found, levels, factor.default)
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
            notes.add(f"Taking {factor.name} away is tested against {factor.name}={level_text(level.value)}.")
            return Opposition((Level(-1, factor, off),), (level,))
        if level.value == factor.default:
            raise PlanningRefused(
                f"{factor.name}={level_text(level.value)} is the default of {factor.name}: name a second level to "
                f"compare it with, for example {level_text(_moved(factor, 1) or _moved(factor, -1) or level.value)}",
                [factor.name],
            )
        notes.add(
            f"The topic names one level: the default, {factor.name}={level_text(factor.default)}, is the baseline."
        )
        return Opposition((level,), (default,))
    off = off_level(factor)
    if off is not None and _is_switched_off(found, own):
        on = on_level(factor)
        sides = (on, off) if not _is_switched_off(found, own[:1]) else (off, on)
        notes.add(f"The topic names no level of {factor.name}: {level_text(sides[0])} against {level_text(sides[1])}.")
        return Opposition((Level(-1, factor, sides[0]),), (Level(-1, factor, sides[1]),))
    if factor.off is not None and factor.default != factor.off and not _asks_for_a_level(found, own):
        notes.add(
            f"The topic names no level of {factor.name}: {level_text(factor.default)} against {level_text(factor.off)}, without it."
        )
        return Opposition((default,), (Level(-1, factor, factor.off),))
    chosen = _chosen(found, factor, own)
    shown = ", ".join(level_text(value) for value in chosen)
    notes.add(f"The topic names no level of {factor.name}: {shown} against the default, {level_text(factor.default)}.")
    return Opposition(tuple(Level(-1, factor, value) for value in chosen), (default,))


def _asks_for_a_level(found: Sequence[Token], own: Sequence[Mention]) -> bool:
    """`a tighter gradient clipping`, `which clipping norm`; not `does gradient clipping help`."""
    return any(modifiers(found, m) for m in own) or any(token.key in ("which", "what") for token in found)


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
        return [_in_range(factor, _as_type(factor, rounded(factor.default * _inverse(scaled, keys))))]
    if factor.default == off_level(factor):
        return [on_level(factor)]
    down = any(token.key in LESS for token in keys)
    up = any(token.key in MORE for token in keys)
    signs = [1] if up and not down else [-1] if down and not up else [-1, 1]
    moved = [level for level in (_moved(factor, sign) for sign in signs) if level is not None]
    if not moved:
        raise PlanningRefused(f"{factor.name} cannot go further: its default is at the end of its range", [factor.name])
    return moved


def _is_switched_off(found: Sequence[Token], own: Sequence[Mention]) -> bool:
    """`removing KL`, `without hints`, `turning hints off`; not `dropping the rate tenfold`."""
    if any(found[i].kind == "times" or found[i].key in SCALES for m in own for i in modifiers(found, m)):
        return False
    before = {key for m in own for key in words_before(found, m)}
    after = {token.key for m in own for token in found[m.end : m.end + 1]}
    return bool(before & SWITCHED_OFF or after & {"off", "removed", "disabled"})


def _inverse(scale: float, keys: Sequence[Token]) -> float:
    """`10x lower` divides."""
    return 1 / scale if scale > 1 and any(token.key in LESS for token in keys) else scale


def _moved(factor: Factor, sign: int) -> Scalar | None:
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
    moved = _as_type(factor, rounded(level))
    return None if moved == factor.default or level_problem(factor, moved) else moved


def _as_type(factor: Factor, value: float) -> Scalar:
    return max(1, round(value)) if factor.type == "int" else value


def _in_range(factor: Factor, level: Scalar) -> Scalar:
    if problem := level_problem(factor, level):
        raise PlanningRefused(problem, [factor.name])
    return level


def _oriented(
    found: Sequence[Token], factor: Factor, factors: Sequence[Mention], opposition: Opposition, notes: Notes
) -> Opposition:
    """`a higher learning rate, 1e-5 or 4e-5`: the treatment is the higher one.

    Raises: PlanningRefused when the topic says that the factor moves one way, and names levels that go the other.
    """
    if len(opposition.treatments) != 1 or len(opposition.baselines) != 1:
        return opposition
    treatment, baseline = opposition.treatments[0], opposition.baselines[0]
    ways = [found[i].key for m in factors if m.what == factor for i in modifiers(found, m)]
    wrong = told_apart(treatment.value, baseline.value, ways)
    if wrong is None:
        return opposition
    between = keys_of(found, 0, max(treatment.at, baseline.at))
    if baseline.at < 0 or treatment.at < 0 or set(between) & {"from", "than", "beat"}:
        raise PlanningRefused(
            f"the topic has {factor.name} {wrong}, but {level_text(treatment.value)} against "
            f"{level_text(baseline.value)} goes the other way; name the two levels in the order that you mean",
            [factor.name],
        )
    notes.add(f"The topic has {factor.name} {wrong}: {level_text(baseline.value)} is the treatment.")
    return Opposition(opposition.baselines, opposition.treatments)


# -- together -------------------------------------------------------------------------------------------------------


def _reading(
    instrument: Instrument,
    found: Sequence[Token],
    named: Sequence[Mention],
    factor: Factor,
    opposition: Opposition,
    metric: Metric,
    placed: Placed,
    notes: Notes,
) -> Reading:
    arms = [*opposition.baselines, *opposition.treatments]
    pairs = [
        (len(opposition.baselines) + t, b)
        for t in range(len(opposition.treatments))
        for b in range(len(opposition.baselines))
    ]
    first = next((level.at for level in placed.of(factor)), 0)
    ahead = set(keys_of(found, max(0, first - 5), first))
    if "between" in ahead and not ahead & CHOICES_BETWEEN and not balance.is_asked(found):
        notes.add(f"The ends of the range of {factor.name} are compared, and nothing between them.")
        stated = Stated(None)  # "is 4 to 16 better?" sets neither end against the other
    else:
        stated = claimed(found, named, metric, [level.at for level in placed.levels])
    if stated.note is not None:
        notes.add(stated.note)
    if stated.direction is None and stated.note is None:
        notes.add(
            f"The topic claims no direction: tested as {better(metric)} {metric.name}; the other way reads as refuted."
        )
    settings = settings_of(found, (factor,), named, placed, notes)
    notes.add_unread(unread(instrument, found, named))
    return Reading(
        factor=factor,
        levels=tuple(level.value for level in arms),
        pairs=tuple(pairs),
        metric=metric,
        direction=stated.direction or metric.direction,
        direction_assumed=stated.direction is None,
        settings=settings,
        seeds=placed.seeds,
        min_seeds=placed.min_seeds,
        max_seeds=placed.max_seeds,
        budget_s=placed.budget_s,
        assumptions=tuple(notes.lines),
    )
