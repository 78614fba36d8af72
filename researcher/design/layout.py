"""The requirements of each design, and the arms, hypotheses and stages it makes of a question.

Options that a design does not have are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foundation.nearest import MOST_NAMES
from researcher.design.arms import arms_between, arms_of, hypotheses_of, pair_hypothesis
from researcher.design.question import Question, Varied
from researcher.design.stages import SCREEN, Seeds, compared, in_sequence, raced, stage
from researcher.instruments.instrument import LEARNING_RATE, Instrument
from researcher.instruments.levels import level_text
from researcher.refusals import SpecRefused
from researcher.study.plan import Arm, Hypothesis, Stage, StageKind

MOST_CROSSED, MOST_IN_SEQUENCE, MOST_IN_BALANCE, FEWEST_IN_TREND = 5, 4, 4, 3
_WITHOUT_LOOKS = ("sequence", "race", "screen")
_COSTS = ("wall_s", "tokens_sampled")
"""Kinds of metrics that say what a level costs."""


@dataclass(frozen=True, slots=True)
class Layout:
    question: Question
    arms: tuple[Arm, ...]
    hypotheses: tuple[Hypothesis, ...]
    stages: tuple[Stage, ...]


def laid_out(question: Question, instrument: Instrument, seeds: Seeds) -> Layout:
    """Raises: SpecRefused for what the design cannot have."""
    _refuse_crossed(question)
    if question.spec.design == "balance":
        question = _balanced(question, instrument)
    if question.spec.design == "trend":
        question = _trend(question)
    spec, arms = question.spec, arms_of(question)
    hypotheses, names = hypotheses_of(question, arms), [arm.name for arm in arms]
    between = arms_between(question.varied[0]) if spec.fine and question.varied else ()
    _refuse_extras(question, fits_fine=bool(between))
    if question.screens:
        return Layout(question, arms, hypotheses, (stage(SCREEN, StageKind.SCREEN, names, (seeds[0], seeds[0])),))
    if spec.design == "sequence":
        _refuse_long_sequence(question)
        return Layout(question, arms, hypotheses, in_sequence(question, seeds))
    if spec.design != "race" and not between:
        return Layout(
            question, arms, hypotheses, compared(names, _noisy_arm(question, arms), seeds, spec.looks, question.alpha)
        )
    further = tuple(
        pair_hypothesis(question, number, question.factors[0].name, arms[0], arm)
        for number, arm in enumerate(between, start=len(hypotheses) + 1)
    )
    tried, racing = [arm.name for arm in between], spec.design == "race"
    stages = raced(names[1:], tried, names[0], seeds, spec.fine, racing=racing)
    return Layout(question, (*arms, *between), (*hypotheses, *further), stages)


def _noisy_arm(question: Question, arms: tuple[Arm, ...]) -> str:
    """The arm for the noise floor: the baseline, unless it is a control that trains nothing and so hardly varies; in a
    trend the middle level.
    """
    if question.spec.design == "trend":
        return arms[len(arms) // 2].name
    rate = next((factor.name for factor in question.factors if factor.target == LEARNING_RATE), "")
    return next((arm.name for arm in arms if arm.levels.get(rate) != 0), arms[0].name)


def _balanced(question: Question, instrument: Instrument) -> Question:
    """The question with ordered levels, a cost metric, and a note on the decision rule.

    Raises: SpecRefused for non-numeric or too many levels, and if no metric measures cost.
    """
    (varied,), metric, name = question.varied, question.metric, question.varied[0].factor.name
    if question.spec.claim != "none":
        raise SpecRefused("claim", "a balance claims nothing: it asks which level is enough; leave the claim out")
    if len(varied.numbers) < 2:
        raise SpecRefused("design", f"a balance needs two or more levels of one number, and {name} has none", [name])
    if len(varied.numbers) > MOST_IN_BALANCE:
        said = f"a balance takes {MOST_IN_BALANCE} levels of {name} at most, not {len(varied.numbers)}"
        raise SpecRefused("design", said, [name])
    named = [each for each in question.secondary if each.kind in _COSTS]
    costs = named or [each for each in instrument.metrics if each.kind in _COSTS]
    if not costs or metric.kind in _COSTS:
        raise SpecRefused(
            "design",
            "a balance sets a gain against a cost: `metric` is the gain, and the instrument needs a metric of time or tokens",
            [each.name for each in instrument.metrics if each.kind not in _COSTS][:MOST_NAMES],
        )
    note = (
        f"The best balance is the smallest {name} that no larger one exceeds on {metric.name} by its margin: a larger "
        f"one is taken to cost more. {costs[0].name} is reported beside it."
    )
    reported = named or not (question.secondary or costs[0].on_request)
    return replace(
        question,
        varied=(Varied(factor=varied.factor, levels=varied.numbers),),
        secondary=question.secondary if reported else (*question.secondary, costs[0]),
        notes=(*question.notes, note),
    )


def _trend(question: Question) -> Question:
    """The question with ordered levels. On a log scale the line is over their logarithm.

    Raises: SpecRefused for non-numeric or too few levels, and for 0 on a log scale.
    """
    (varied,) = question.varied
    factor, levels = varied.factor, varied.numbers
    if len(levels) < FEWEST_IN_TREND:
        said = f"a trend needs {FEWEST_IN_TREND} or more levels of one number, and {factor.name} has {len(levels)}"
        raise SpecRefused("design", f"{said}; compare takes any", [factor.name])
    if factor.scale == "log" and levels[0] <= 0:
        said = f"{level_text(levels[0])} has no place on the log scale of {factor.name}: leave it out, or use compare"
        raise SpecRefused(f"compare.{factor.name}.levels", said, [factor.name])
    return replace(question, varied=(Varied(factor=factor, levels=levels),))


def _refuse_crossed(question: Question) -> None:
    """Raises: SpecRefused for too many crossed factors, and for one that has not two levels: a spec may name more models."""
    spec, wide = question.spec, [each for each in question.varied if len(each.levels) != 2]
    if spec.design == "factorial" and len(question.varied) > MOST_CROSSED:
        said = f"a factorial crosses {MOST_CROSSED} factors at most, and the spec compares {len(question.varied)}; use screen"
        raise SpecRefused("design", said)
    if question.crossed and wide:
        name, count = wide[0].factor.name, len(wide[0].levels)
        said = f"{spec.design} takes two levels of each factor, and {name} has {count}"
        raise SpecRefused(name if name not in spec.compare else f"compare.{name}.levels", said, [name])


def _refuse_long_sequence(question: Question) -> None:
    """Raises: SpecRefused for more levels in sequence than all can be compared."""
    for name, count in ((each.factor.name, len(each.levels)) for each in question.varied):
        if count > MOST_IN_SEQUENCE:
            raise SpecRefused(
                f"compare.{name}.levels",
                f"a sequence compares {MOST_IN_SEQUENCE} levels of a factor at most, and there are {count}; race {name} "
                "first, and compare the other in a study of its own",
                [name],
            )


def _refuse_extras(question: Question, *, fits_fine: bool) -> None:
    """Raises: SpecRefused for looks, or a fine stage, where a design of this kind has none."""
    spec = question.spec
    if spec.design == "race" and len(spec.arms or question.varied[0].levels) < 3:
        raise SpecRefused("design", "a race needs two treatments or more; compare takes one")
    if spec.looks > 1 and (spec.design in _WITHOUT_LOOKS or spec.fine):
        which = f"a {spec.design}" if spec.design in _WITHOUT_LOOKS else "a study with a fine stage"
        raise SpecRefused("looks", f"{which} has no looks; leave them out")
    if spec.fine and (spec.design not in ("compare", "race") or question.bundles):
        what = "arms that set several factors have" if question.bundles else f"a {spec.design} study has"
        raise SpecRefused("fine", f"{what} no fine stage; leave it out")
    if spec.fine and not fits_fine:
        name = question.factors[0].name
        raise SpecRefused("fine", f"{name} has no levels between those compared for a fine stage to try; leave it out")
