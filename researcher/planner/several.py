"""Readings that vary several factors: together, so that their interaction is seen, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from researcher.design.reading import Crossed, Following, Reading
from researcher.instruments.instrument import Factor, Instrument, Metric, Scalar
from researcher.planner.claims import claimed
from researcher.planner.levels import Placed, level_text
from researcher.planner.mentions import Mention
from researcher.planner.notes import Notes, better, settings_of
from researcher.planner.remainder import unread
from researcher.planner.sequence import SAID, Step
from researcher.planner.subject import TOGETHER
from researcher.planner.wording import Token, phrase
from researcher.refusals import PlanningRefused


def crossed_reading(
    instrument: Instrument,
    found: Sequence[Token],
    named: Sequence[Mention],
    crossed: Sequence[tuple[Factor, tuple[Scalar, Scalar]]],
    metric: Metric,
    placed: Placed,
    notes: Notes,
) -> Reading:
    """Of factors whose interaction is asked for."""
    notes.add(
        f"Of each effect it is tested whether it gives {better(metric)} {metric.name}; the other way reads as refuted."
    )
    notes.add_unread([word for word in unread(instrument, found, named) if word not in TOGETHER])
    return Reading(
        factor=crossed[0][0],
        levels=(),
        pairs=(),
        crossed=tuple(Crossed(factor=factor, levels=levels) for factor, levels in crossed),
        metric=metric,
        direction=metric.direction,
        direction_assumed=True,
        settings=settings_of(found, [factor for factor, _ in crossed], named, placed, notes),
        assumptions=tuple(notes.lines),
        **placed.limits,
    )


def sequenced_reading(
    instrument: Instrument,
    found: Sequence[Token],
    named: Sequence[Mention],
    asked: tuple[Step, Following],
    metric: Metric,
    placed: Placed,
    notes: Notes,
) -> Reading:
    """Of two factors, the second at the level of the first that goes on.

    Raises: PlanningRefused where the topic claims that something is worse: what goes on is what is better.
    """
    first, second = asked
    stated = claimed(found, named, metric, [level.at for level in placed.levels])
    if stated.direction not in (None, metric.direction):
        raise PlanningRefused(
            f"a study in sequence goes on with the better level of {first.factor.name}, and the topic asks for what is worse; "
            f"ask which {first.factor.name} is best, and then which {second.factor.name}",
            [first.factor.name, second.factor.name],
        )
    start, meanwhile = level_text(first.levels[0]), level_text(second.meanwhile)
    usual = ", its default" if second.meanwhile == second.factor.default else ""
    notes.add(
        f"{first.factor.name} is compared first, with {second.factor.name}={meanwhile}{usual}; then {second.factor.name} "
        f"at the level of {first.factor.name} that goes on, all of its arms on fresh seeds."
    )
    notes.add(
        f"Of the levels of {first.factor.name} that are supported against {start}, that with the largest effect goes on; "
        f"{start} where none is."
    )
    notes.add(
        f"Of each level it is tested whether it gives {better(metric)} {metric.name} than {start} or, of "
        f"{second.factor.name}, than {level_text(second.levels[0])}; the other way reads as refuted."
    )
    own = SAID.union(*(phrase(name) for name in (first.factor.name, *first.factor.aliases)))  # `at that ratio`
    notes.add_unread([word for word in unread(instrument, found, named) if word not in own])
    return Reading(
        factor=first.factor,
        levels=first.levels,
        pairs=tuple((number, 0) for number in range(1, len(first.levels))),
        following=second,
        metric=metric,
        direction=metric.direction,
        direction_assumed=True,
        settings=settings_of(found, (first.factor, second.factor), named, placed, notes),
        assumptions=tuple(notes.lines),
        **placed.limits,
    )
