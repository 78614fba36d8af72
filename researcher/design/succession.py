"""How two comparisons in sequence are laid out: the first factor's levels, then the second's at the level that goes on.

noise floor → compare A → compare B at one level of A

All arms and branches are frozen with the plan: there is a stage for each level of A, and one of them runs. Its arms run on
fresh seeds, also the one that the first comparison has run: that one went on because it looked best, and measured again by
the seeds that chose it, it would look too good, and every other level of B too bad.
"""

from __future__ import annotations

from collections.abc import Sequence

from researcher.design.arms import groups_of, names_of
from researcher.design.question import Question
from researcher.design.stages import COMPARE, NOISE_FLOOR, ending, onward, too_loud, worthless
from researcher.study.plan import Branch, Condition, Hypothesis, Stage, StageKind


def stages_of(question: Question, seeds: tuple[int, int]) -> tuple[Stage, ...]:
    """The noise floor, the first comparison, and one for each level that may go on. seeds: per arm, at least and at most."""
    least, most = seeds
    names = [tuple(arm.name for arm in group) for _, group in groups_of(question)]
    first, following = names[0], names[1:]
    one, second = question.varied
    floor = Stage(id=NOISE_FLOOR, kind=StageKind.NOISE_FLOOR, arms=first[:1], seeds=least, max_seeds=least)
    compare = {"kind": StageKind.COMPARE, "seeds": least, "max_seeds": most}
    return (
        floor,
        Stage(id=f"{COMPARE}-{one.factor.name}", arms=first, **compare),
        *(
            Stage(
                id=f"{COMPARE}-{second.factor.name}-at-{level}",
                arms=arms,
                first_seed=max(least, most),
                **compare,
            )
            for level, arms in zip(names_of(one.factor, one.levels), following, strict=True)
        ),
    )


def branches_of(
    question: Question, stages: Sequence[Stage], hypotheses: Sequence[Hypothesis], *, allow_underpowered: bool
) -> tuple[Branch, ...]:
    """Which level goes on: of those that are supported the one with the largest effect, the baseline where none is."""
    floor, compare, *following = stages
    one, second = question.varied
    decided = {stage.id: [each for each in hypotheses if each.sides <= set(stage.arms)] for stage in stages}
    start, *levels = names_of(one.factor, one.levels)
    found = [] if allow_underpowered else [too_loud()]
    found.append(
        onward(floor, compare, "the noise floor is known: all arms run on as many seeds as it asks for"),
    )
    found += worthless(compare, decided[compare.id])
    for hypothesis, level, stage in zip(decided[compare.id], levels, following[1:], strict=True):
        found.append(
            Branch(
                stage=compare.id,
                when=Condition(kind="leads", hypothesis=hypothesis.id, verdicts=("supported",)),
                then="stage",
                to=stage.id,
                reason=f"{level} is supported against {start}, with the largest effect: {second.factor.name} is compared at it",
            )
        )
    reason = f"no level of {one.factor.name} is supported against {start}: {second.factor.name} is compared at {start}"
    found.append(onward(compare, following[0], reason))
    for stage in following:
        found += ending(stage, decided[stage.id])
    return tuple(found)
