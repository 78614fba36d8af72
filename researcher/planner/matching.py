"""A topic, read against an instrument: which factor is varied over which levels, on which metric, claiming what.

Any factor and any metric that the instrument declares. What is ambiguous, out of range or left over is refused with what
could be asked instead; what the topic merely leaves open is filled and stated as an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from researcher.design import balance
from researcher.design.reading import Reading
from researcher.instruments.catalogue import level_problem
from researcher.instruments.instrument import RUN_PARAMETERS, STUDY_STEPS, Factor, Instrument, Metric
from researcher.planner import sequence, sizes, untrained
from researcher.planner.asides import put_plainly, set_aside
from researcher.planner.claims import Stated, claimed, equality, opposite
from researcher.planner.clauses import place_by_clause
from researcher.planner.contrasts import refuse_two_claims
from researcher.planner.framing import framed
from researcher.planner.levels import Level, Placed, as_level, level_text
from researcher.planner.mentions import Mention, is_given, mentions, subjects
from researcher.planner.notes import Notes, better, settings_of
from researcher.planner.open_questions import asks_which, favours_none, is_range
from researcher.planner.opposing import moved_from_default, opposition_of, oriented
from researcher.planner.outcomes import metric_of, refuse_effect_sizes, refuse_moved, refuse_unmeasured
from researcher.planner.pointing import pointed
from researcher.planner.remainder import (
    is_english,
    refuse_benchmarks,
    refuse_cut_sampling,
    refuse_idle,
    refuse_missing_data,
    refuse_other_methods,
    refuse_other_owners,
    refuse_quotients,
    refuse_schedules,
    refuse_shifts,
    refuse_unknown_names,
    unread,
)
from researcher.planner.several import crossed_reading, sequenced_reading
from researcher.planner.shapes import refuse_bounds, refuse_shapes
from researcher.planner.sides import Opposition, speaks_of_baseline
from researcher.planner.spelling import a_few, inflected, misspelt, nearest_factors, nearest_metrics, resembled
from researcher.planner.subject import asked_about, crossed_factors, distinct, refuse_mixes, refuse_two_subjects
from researcher.planner.told import set_apart, without_beside, without_told
from researcher.planner.weighing import denied
from researcher.planner.wording import Token, text_of, tokens, words
from researcher.planner.written import taken_out
from researcher.refusals import PlanningRefused

_NUMBER_TYPES = words("float32 float16 bfloat16 fp32 fp16 bf16")


def read(topic: str, instrument: Instrument) -> Reading:
    """Raises: PlanningRefused, one clear line, with the nearest things that could be asked."""
    instrument = with_steps(instrument)
    bare, frame = framed(topic)
    said, aside = set_aside(put_plainly(bare, instrument), instrument)
    written = taken_out(said, instrument)
    sizes.refuse_models(written.topic, instrument)
    found = tokens(written.topic)
    named = mentions(instrument, found, written.levels)
    if uncounted := denied(found, named):
        aside += [f"{text_of(found, each)!r} says what does not count, and is left out." for each in uncounted]
        found = [token for i, token in enumerate(found) if not any(i in each for each in uncounted)]
        named = mentions(instrument, found, written.levels)
    refuse_cut_sampling(found, named)
    _refuse_misspelt(topic, instrument, found, named)
    refuse_other_methods(instrument, found, named)
    metrics = {m.what.name for m in named if isinstance(m.what, Metric) and not m.weak}
    named += [m for m in [inflected(instrument, found, named)] if m is not None and m.what.name not in metrics]
    told = set_apart(found, named)
    found, named = told.found, told.named
    parts = sequence.parts_of(found, named)
    named = [
        m for m in named if m.start not in {part.start for part in parts[1:]}
    ]  # `second, the rank` counts no seconds
    placed, uncompared = without_told(place_by_clause(found, named, parts, subjects(instrument)), told.at)
    placed, beside = without_beside(found, placed)
    factors = [m for m in named if isinstance(m.what, Factor) and _may_vary(m.what, found, placed)]
    _refuse_what_is_no_question(instrument, found, named, placed, is_written=bool(written.levels))
    control = untrained.asked_for(instrument, found, named, factors, placed)
    untrained.refuse_outcomes(instrument, found, factors, placed)
    if not factors and control is None:
        raise _nothing_matched(topic, instrument, found)
    _refuse_unplaced(instrument, found, named, placed)
    _refuse_bad_levels(placed.levels)
    _set_against_all_weights(instrument, placed)
    notes = Notes([*frame, *aside, *written.notes, *told.notes, *uncompared, *beside])
    balanced = balance.is_asked(found)
    metric, assumed = metric_of(instrument, found, balance.gains(named) if balanced else named, placed)
    for line in assumed:
        notes.add(line)
    refuse_effect_sizes(placed, metric)
    refuse_shifts(placed)
    refuse_quotients(found, placed)
    if control is not None and not balanced:
        refuse_bounds(found, placed)
        notes.add(control.note)
        placed, found = untrained.without_rate(placed, control), untrained.set_apart(found, control.named_at)
        return _reading(instrument, found, named, control.factor, control.opposition, metric, placed, notes)
    crossed = crossed_factors(found, factors, placed)
    asked = sequence.asked_for(found, factors, placed, parts) if parts else None
    if crossed or asked is not None:
        refuse_bounds(found, placed)
    if asked is not None:
        if crossed or balanced:
            too = "an interaction" if crossed else "a balance"
            raise PlanningRefused(f"the topic asks for {too}, and for two comparisons in sequence; ask for one of them")
        sequence.refuse_two_metrics(named, parts)
        return sequenced_reading(instrument, found, named, asked, metric, placed, notes)
    if crossed:
        refuse_idle(instrument, [each for each, _ in crossed], placed)
        return crossed_reading(instrument, found, named, crossed, metric, placed, notes)
    factor = asked_about(found, factors, placed, instrument)
    refuse_two_subjects(found, factor, factors, placed)
    refuse_idle(instrument, [factor], placed)
    refuse_mixes(found, factor, placed)
    refuse_shapes(found, factor, factors, placed)
    found, at_one = pointed(found, factor, placed.of(factor))
    opposition = at_one or opposition_of(found, factor, factors, placed, notes)
    if at_one is None and not balanced:
        opposition = oriented(found, factor, named, opposition, notes)
    is_open = at_one is None and asks_which(found, [level.at for level in distinct(found, placed.of(factor))])
    reading = _reading(instrument, found, named, factor, opposition, metric, placed, notes, is_open=is_open)
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


def _refuse_what_is_no_question(
    instrument: Instrument, found: Sequence[Token], named: Sequence[Mention], placed: Placed, *, is_written: bool
) -> None:
    """Raises: PlanningRefused for what no instrument can vary or measure. is_written: the topic names data of its own."""
    refuse_unknown_names(instrument, found, named)
    if not is_written:
        refuse_benchmarks(instrument, found, named)
    refuse_other_owners(instrument, found, named)
    refuse_schedules(found, named)
    refuse_two_claims(found, named)
    refuse_missing_data(instrument, placed)
    refuse_unmeasured(instrument, found, named)
    refuse_moved(instrument, found, named, placed)


def _nothing_matched(topic: str, instrument: Instrument, found: Sequence[Token]) -> PlanningRefused:
    near, metrics = nearest_factors(instrument, found), nearest_metrics(instrument, found)
    meant = resembled(instrument, unread(instrument, found, []))
    taking = _taking(instrument, [token for token in found if token.kind == "number"])
    hint = ""
    if meant:
        hint = f" ({meant[0]!r}: did you mean {meant[1]}?)"
        near = list(dict.fromkeys([meant[1], *near]))
    elif taking:
        shown = " and ".join(token.text for token in found if token.kind == "number")
        hint = f" (if {shown} are levels of {taking[0]}, write its name with them)"
        near = list(dict.fromkeys([*taking, *near]))
    if not is_english(found):
        hint += ". Topics are read in English"
    elif any(token.key in _NUMBER_TYPES for token in found):
        hint += " (what a server computes in is set where it is started: `swarm serve --dtype`)"
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
            moved = moved_from_default(factor, 1) or moved_from_default(factor, -1)
            if moved is not None:
                name, default = factor.name.replace("_", " "), level_text(factor.default)
                data = " on train.jsonl" if any(each.type == "data" for each in instrument.factors) else ""
                return f"Does a {name} of {level_text(moved)} learn faster than {default}{data}?"
    return f"What does {instrument.factors[0].name.replace('_', ' ')} do?"


def _refuse_unplaced(instrument: Instrument, found: Sequence[Token], named: Sequence[Mention], placed: Placed) -> None:
    if placed.unplaced:
        meant = resembled(instrument, unread(instrument, found, named))
        hint = f"{meant[0]!r}: did you mean {meant[1]}? Factors" if meant else "factors"
        near = nearest_factors(instrument, found)
        raise PlanningRefused(
            f"no factor of {instrument.name} could be tied to {placed.unplaced[0].text!r} in the topic; "
            f"{hint}: {a_few(near, instrument)}",
            [meant[1]] if meant else near,
        )


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
    *,
    is_open: bool = False,
) -> Reading:
    arms = [*opposition.baselines, *opposition.treatments]
    pairs = [
        (len(opposition.baselines) + t, b)
        for t in range(len(opposition.treatments))
        for b in range(len(opposition.baselines))
    ]
    if is_range(found, [level.at for level in placed.of(factor)]) and not balance.is_asked(found):
        if factor.type in ("int", "float"):
            notes.add(f"The ends of the range of {factor.name} are compared, and nothing between them.")
        stated = equality(found, named) or Stated(None)  # "is 4 to 16 better?" sets neither end against the other
    elif is_open or favours_none(found):
        stated = Stated(None)
    else:
        asked_at = [level.at for level in placed.of(factor)]
        stated = claimed(found, named, metric, [level.at for level in placed.levels], asked_at)
        if stated.direction is not None and speaks_of_baseline(found, opposition):
            stated = replace(stated, direction=opposite(stated.direction))
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
        assumptions=tuple(notes.lines),
        **placed.limits,
    )
