"""The decisions after each stage: go on, stop, or refuse. Frozen with the plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from researcher.design.arms import names_of
from researcher.design.question import Question
from researcher.design.stages import NOISE_FLOOR, POWER
from researcher.study.plan import Branch, Condition, Hypothesis, Relation, Stage

_DECIDED = ("supported", "refuted", "equivalent")
_RELATIONS: tuple[Relation, ...] = ("≪", "≈", "≫")
_TURNED: dict[Relation, Relation] = {"≪": "≫", "≈": "≈", "≫": "≪"}
_KNOWN = "the noise floor is known: all arms run on as many seeds as it asks for"


def branches_of(
    question: Question, stages: Sequence[Stage], hypotheses: Sequence[Hypothesis], *, allow_underpowered: bool
) -> tuple[Branch, ...]:
    """Branches between stages, with exits for too much noise, a fired sentinel, or a decided look."""
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
    for stage, after in itertools.pairwise(stages[1:]):
        if stage.explores:
            found.append(_onward(stage, after, "exploring gives no verdict: the best go on"))
            continue
        found += _worthless(stage, hypotheses)
        if after.explores:
            found.append(_onward(stage, after, "whatever was found of them, levels between those compared are tried"))
        else:
            decided = Condition(kind="verdict_in", verdicts=_DECIDED)
            found.append(_stop(stage, "the question is answered, within the alpha that this look may spend", decided))
            found.append(_onward(stage, after, "not decided at this look, and alpha is left for the next"))
    return (*found, *_ending(last, hypotheses, _balances(question, last) if design == "balance" else ()))


def _in_sequence(question: Question, stages: Sequence[Stage], hypotheses: Sequence[Hypothesis]) -> list[Branch]:
    """The level to continue with: the supported one with the largest effect, else the baseline."""
    floor, compare, *following = stages
    one, second = (varied.factor.name for varied in question.varied)
    decided = {stage.id: [each for each in hypotheses if each.sides <= set(stage.arms)] for stage in stages}
    start, *levels = names_of(question.varied[0].factor, question.varied[0].levels)
    found = [_onward(floor, compare, _KNOWN), *_worthless(compare, decided[compare.id])]
    for hypothesis, level, stage in zip(decided[compare.id], levels, following[1:], strict=True):
        leads = Condition(kind="leads", hypothesis=hypothesis.id, verdicts=("supported",))
        reason = f"{level} is supported against {start}, with the largest effect: {second} is compared at it"
        found.append(_onward(compare, stage, reason, leads))
    reason = f"no level of {one} is supported against {start}: {second} is compared at {start}"
    found.append(_onward(compare, following[0], reason))
    return found + [branch for stage in following for branch in _ending(stage, decided[stage.id])]


def _balances(question: Question, stage: Stage) -> list[Branch]:
    """For each ordering of the arms, smallest level first: the smallest level that no larger one beats, the best
    balance of gain and cost.

    `5 ≪ 15 ≈ 25` gives 15: it beats 5, and 25 does not beat it. Orderings with a gain after a loss give no level.
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
    """Branches of the last stage. at_end: further ones, checked after a fired sentinel."""
    found = [*_worthless(stage, hypotheses), *at_end]
    reason = "every planned trial has ended"
    if len(hypotheses) == 1:  # of several, some, all or none may be decided
        found.append(_verdict(stage, hypotheses[0], _DECIDED, "the question is answered"))
        reason = f"{reason}; what is not decided now stays open"
    return [*found, _stop(stage, reason)]


def _worthless(stage: Stage, hypotheses: Sequence[Hypothesis]) -> list[Branch]:
    """Out, where a sentinel says that the numbers mean nothing."""
    reason = "a sentinel fired: the numbers do not answer the question"
    return [_verdict(stage, each, ("invalid",), reason) for each in hypotheses]


def _verdict(stage: Stage, hypothesis: Hypothesis, verdicts: tuple[str, ...], reason: str) -> Branch:
    return _stop(stage, reason, Condition(kind="verdict_in", hypothesis=hypothesis.id, verdicts=verdicts))


_ALWAYS = Condition(kind="always")


def _stop(stage: Stage, reason: str, when: Condition = _ALWAYS) -> Branch:
    return Branch(stage=stage.id, when=when, then="stop", reason=reason)


def _onward(stage: Stage, after: Stage, reason: str, when: Condition = _ALWAYS) -> Branch:
    return Branch(stage=stage.id, when=when, then="stage", to=after.id, reason=reason)
