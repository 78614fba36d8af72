"""Lays out each design: its arms, hypotheses and stages, and the decisions after each stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foundation.nearest import MOST_NAMES
from researcher.design.arms import arms_between, arms_of, hypotheses_of, names_of
from researcher.design.question import Question, Varied
from researcher.design.stages import NOISE_FLOOR, POWER, SCREEN, Seeds, compared, in_sequence, raced, stage
from researcher.instruments.instrument import LEARNING_RATE, Instrument
from researcher.instruments.levels import level_text
from researcher.refusals import SpecRefused
from researcher.study.plan import Arm, Branch, Condition, Hypothesis, Relation, Stage, StageKind
from researcher.study.spec import DESIGNS

_COSTS = ("wall_s", "tokens_sampled")
"""Kinds of metrics that measure what a level costs."""
_DECIDED = ("supported", "refuted", "equivalent")
_RELATIONS: tuple[Relation, ...] = ("≪", "≈", "≫")
_TURNED: dict[Relation, Relation] = {"≪": "≫", "≈": "≈", "≫": "≪"}
_KNOWN = "the noise floor is known: all arms run on as many seeds as it asks for"


@dataclass(frozen=True, slots=True)
class Layout:
    question: Question
    arms: tuple[Arm, ...]
    hypotheses: tuple[Hypothesis, ...]
    stages: tuple[Stage, ...]


def laid_out(question: Question, instrument: Instrument, seeds: Seeds) -> Layout:
    """Lay out the question's design. Raises: SpecRefused for levels or options that the design cannot have."""
    if question.spec.design in ("balance", "trend"):
        question = _ordered(question)
    if question.spec.design == "balance":
        question = _balanced(question, instrument)
    arms, fine = arms_of(question), question.spec.fine
    between = arms_between(question.varied[0]) if fine and question.varied else ()
    if fine and not between:
        name = question.factors[0].name
        raise SpecRefused(
            "fine", f"{name} has no values between the compared levels for a fine stage to try; leave it out"
        )
    stages = _stages(question, arms, [arm.name for arm in between], seeds)
    return Layout(question, (*arms, *between), hypotheses_of(question, arms, between), stages)


def _stages(question: Question, arms: Sequence[Arm], between: Sequence[str], seeds: Seeds) -> tuple[Stage, ...]:
    spec, (first, *others) = question.spec, (arm.name for arm in arms)
    if question.screens:
        return (stage(SCREEN, StageKind.SCREEN, (first, *others), (seeds[0], seeds[0])),)
    if spec.design == "sequence":
        return in_sequence(question, seeds)
    if spec.design == "race" or between:
        return raced(others, between, first, seeds, spec.fine, racing=spec.design == "race")
    return compared([first, *others], _noisy_arm(question, arms), seeds, spec.looks, question.alpha)


def _noisy_arm(question: Question, arms: Sequence[Arm]) -> str:
    """Return the arm on which to measure the noise floor.

    Normally the baseline; another arm if the baseline is a control that trains nothing, since it hardly varies; in a trend, the
    middle level.
    """
    if question.spec.design == "trend":
        return arms[len(arms) // 2].name
    rate = next((factor.name for factor in question.factors if factor.target == LEARNING_RATE), "")
    return next((arm.name for arm in arms if arm.levels.get(rate) != 0), arms[0].name)


def _ordered(question: Question) -> Question:
    """Sort the question's levels. A trend on a log scale is a line over the logarithms of the levels.

    Raises: SpecRefused for too few numeric levels, and for a trend with 0 on a log scale.
    """
    (varied,), design = question.varied, question.spec.design
    factor, levels, fewest = varied.factor, varied.numbers, DESIGNS[design].levels.start
    if len(levels) < fewest:
        said = f"a {design} needs at least {fewest} numeric levels of a factor, and {factor.name} has {len(levels) or 'none'}"
        raise SpecRefused("design", f"{said}; compare takes any levels", [factor.name])
    if design == "trend" and factor.scale == "log" and levels[0] <= 0:
        said = f"{level_text(levels[0])} is not on the log scale of {factor.name}: leave it out, or use compare"
        raise SpecRefused(f"compare.{factor.name}.levels", said, [factor.name])
    return replace(question, varied=(Varied(factor=factor, levels=levels),))


def _balanced(question: Question, instrument: Instrument) -> Question:
    """Add a cost metric and a note on the decision rule to the question. Raises: SpecRefused if no metric measures cost."""
    metric, name = question.metric, question.factors[0].name
    named = [each for each in question.secondary if each.kind in _COSTS]
    costs = named or [each for each in instrument.metrics if each.kind in _COSTS]
    if not costs or metric.kind in _COSTS:
        raise SpecRefused(
            "design",
            "a balance weighs a gain against a cost: `metric` must be the gain, and the instrument needs a metric of time or tokens",
            [each.name for each in instrument.metrics if each.kind not in _COSTS][:MOST_NAMES],
        )
    note = (
        f"The best balance is the smallest {name} that no larger one exceeds on {metric.name} by its margin: a larger "
        f"one is taken to cost more. {costs[0].name} is reported beside it."
    )
    reported = named or not (question.secondary or costs[0].on_request)
    return replace(
        question,
        secondary=question.secondary if reported else (*question.secondary, costs[0]),
        notes=(*question.notes, note),
    )


# -- decisions -----------------------------------------------------------------------------------------------------------


def branches_of(
    question: Question, stages: Sequence[Stage], hypotheses: Sequence[Hypothesis], *, allow_underpowered: bool
) -> tuple[Branch, ...]:
    """Return the branches between stages. They stop the study if the noise is too high, a sentinel fires or a look decides."""
    design, last = question.spec.design, stages[-1]
    if question.screens:
        return (_stop(last, "every planned trial has ended; a screen explores and gives no verdict"),)
    too_loud = Branch(
        stage=NOISE_FLOOR,
        when=Condition(kind="power_below", value=POWER),
        then="underpowered",
        reason="the noise is too loud for the planned effect, even with the most seeds that the plan allows",
    )
    found = [] if allow_underpowered else [too_loud]
    if design == "sequence":
        return (*found, *_in_sequence(question, stages, hypotheses))
    racing = "the noise floor is known: the arms race on as many seeds as it asks for"
    found.append(_onward(stages[0], stages[1], racing if stages[1].explores else _KNOWN))
    for before, after in itertools.pairwise(stages[1:]):
        if before.explores:
            found.append(_onward(before, after, "exploring gives no verdict: the best go on"))
            continue
        found += _worthless(before, hypotheses)
        if after.explores:
            found.append(_onward(before, after, "whatever was found of them, levels between those compared are tried"))
        else:
            decided = Condition(kind="verdict_in", verdicts=_DECIDED)
            found.append(_stop(before, "the question is answered, within the alpha that this look may spend", decided))
            found.append(_onward(before, after, "not decided at this look, and alpha is left for the next"))
    return (*found, *_ending(last, hypotheses, _balances(question, last) if design == "balance" else ()))


def _in_sequence(question: Question, stages: Sequence[Stage], hypotheses: Sequence[Hypothesis]) -> list[Branch]:
    """Return the branches of a sequence: continue with the supported level that has the largest effect, else with the baseline."""
    floor, compare, *following = stages
    one, second = (varied.factor.name for varied in question.varied)
    decided = {stage.id: [each for each in hypotheses if each.sides <= set(stage.arms)] for stage in stages}
    start, *levels = names_of(question.varied[0].factor, question.varied[0].levels)
    found = [_onward(floor, compare, _KNOWN), *_worthless(compare, decided[compare.id])]
    for hypothesis, level, after in zip(decided[compare.id], levels, following[1:], strict=True):
        leads = Condition(kind="leads", hypothesis=hypothesis.id, verdicts=("supported",))
        reason = f"{level} is supported against {start}, with the largest effect: {second} is compared at it"
        found.append(_onward(compare, after, reason, leads))
    reason = f"no level of {one} is supported against {start}: {second} is compared at {start}"
    found.append(_onward(compare, following[0], reason))
    return found + [branch for stage in following for branch in _ending(stage, decided[stage.id])]


def _balances(question: Question, stage: Stage) -> list[Branch]:
    """Return one branch per possible ordering of the arms, smallest level first.

    Each stops with the best balance of gain and cost: the smallest level that no larger one beats. `5 ≪ 15 ≈ 25` gives 15: it beats
    5, and 25 does not beat it. Orderings with a gain after a loss give no branch.
    """
    arms, metric, found = stage.arms, question.metric, list[Branch]()
    for relations in itertools.product(_RELATIONS, repeat=len(arms) - 1):
        gains = [place for place, relation in enumerate(relations) if relation == "≪"]
        if gains and "≫" in relations[: gains[-1]]:
            continue
        best = arms[gains[-1] + 1] if gains else arms[0]
        ways = relations if metric.direction == "increase" else tuple(_TURNED[each] for each in relations)
        order = " ".join([arms[0], *(f"{way} {arm}" for way, arm in zip(ways, arms[1:], strict=True))])
        when = Condition(kind="order", arms=arms, relations=ways, metric=metric.name, alpha=question.alpha)
        found.append(_stop(stage, f"{best} is the best balance: {order} on {metric.name}", when))
    return found


def _ending(stage: Stage, hypotheses: Sequence[Hypothesis], at_end: Sequence[Branch] = ()) -> list[Branch]:
    """Return the branches of the last stage. `at_end` are further branches, checked after the sentinels."""
    found = [*_worthless(stage, hypotheses), *at_end]
    reason = "every planned trial has ended"
    if len(hypotheses) == 1:  # with several, some, all or none may be decided
        found.append(_verdict(stage, hypotheses[0], _DECIDED, "the question is answered"))
        reason = f"{reason}; what is not decided now stays open"
    return [*found, _stop(stage, reason)]


def _worthless(stage: Stage, hypotheses: Sequence[Hypothesis]) -> list[Branch]:
    """Return branches that stop the study if a sentinel makes a verdict invalid."""
    reason = "a sentinel fired: the numbers do not answer the question"
    return [_verdict(stage, each, ("invalid",), reason) for each in hypotheses]


def _verdict(stage: Stage, hypothesis: Hypothesis, verdicts: tuple[str, ...], reason: str) -> Branch:
    return _stop(stage, reason, Condition(kind="verdict_in", hypothesis=hypothesis.id, verdicts=verdicts))


_ALWAYS = Condition(kind="always")


def _stop(stage: Stage, reason: str, when: Condition = _ALWAYS) -> Branch:
    return Branch(stage=stage.id, when=when, then="stop", reason=reason)


def _onward(stage: Stage, after: Stage, reason: str, when: Condition = _ALWAYS) -> Branch:
    return Branch(stage=stage.id, when=when, then="stage", to=after.id, reason=reason)
