"""How a reading is laid out in stages: a comparison of all, looks, a race, a fine stage, one factor after the other.

What was asked for and a study of this kind cannot have is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from researcher.design import succession
from researcher.design.arms import arms_between, hypothesis_of
from researcher.design.reading import Reading
from researcher.design.stages import RACE_FROM, compared, raced
from researcher.instruments.instrument import LEARNING_RATE
from researcher.planner.seam import PlanOptions
from researcher.refusals import PlanningRefused
from researcher.study.plan import Arm, Hypothesis, Stage


def laid_out(
    reading: Reading,
    arms: tuple[Arm, ...],
    hypotheses: tuple[Hypothesis, ...],
    seeds: tuple[int, int],
    options: PlanOptions,
) -> tuple[tuple[Arm, ...], tuple[Hypothesis, ...], tuple[Stage, ...]]:
    """A race where many arms are set against one, or a fine stage is asked for; else a comparison of all, or one by one."""
    baselines = list(dict.fromkeys(arm for hypothesis in hypotheses for arm in hypothesis.baselines))
    between = arms_between(reading) if options.fine else ()
    all_compared = bool(reading.crossed or reading.balance or len(baselines) > 1)
    races = not all_compared and len(hypotheses) >= RACE_FROM
    _refuse_extras(reading, options, fits_fine=bool(between) and not all_compared, races=races)
    if reading.following is not None:
        return arms, hypotheses, succession.stages_of(reading, seeds)
    if not races and not between:
        noisy = _noisy_arm(reading, arms, baselines[0])
        return arms, hypotheses, compared([arm.name for arm in arms], noisy, seeds, options.looks)
    treatments = [hypothesis.treatment for hypothesis in hypotheses]
    (baseline,) = (arm for arm in arms if arm.name == baselines[0])
    further = tuple(
        hypothesis_of(reading, number, reading.factor, arm, baseline)
        for number, arm in enumerate(between, start=len(hypotheses) + 1)
    )
    stages = raced(treatments, [arm.name for arm in between], baselines[0], seeds, options.fine)
    return (*arms, *between), (*hypotheses, *further), stages


def _refuse_extras(reading: Reading, options: PlanOptions, *, fits_fine: bool, races: bool) -> None:
    """Raises: PlanningRefused for looks, or a fine stage, where a study of this kind has none."""
    looks = options.looks > 1
    if reading.following is not None and (looks or options.fine):
        unfit = f"a study in sequence has no looks and no fine stage: leave out {'--looks' if looks else '--fine'}"
    elif options.fine and looks:
        unfit = "a study with a fine stage has no looks: leave out --looks or --fine"
    elif options.fine and not fits_fine:
        unfit = f"{_without_fine(reading)}: leave out --fine"
    elif races and looks:
        unfit = f"{RACE_FROM} treatments or more race, and a race has no looks: leave out --looks, or compare fewer"
    else:
        return
    raise PlanningRefused(unfit)


def _without_fine(reading: Reading) -> str:
    if reading.crossed:
        return "an interaction has no fine stage"
    if reading.balance:
        return "the best balance is told among the levels that are named, without a fine stage"
    if arms_between(reading):
        return "a fine stage has one baseline, and these arms are compared with several"
    return f"{reading.factor.name} has no levels between those compared for a fine stage to try"


def _noisy_arm(reading: Reading, arms: Sequence[Arm], baseline: str) -> str:
    """The arm whose noise is measured beforehand: the baseline, but for a control that trains nothing and so hardly varies."""
    trains = {
        arm.name for arm in arms if reading.factor.target != LEARNING_RATE or arm.levels.get(reading.factor.name) != 0
    }
    return baseline if baseline in trains or not trains else next(arm.name for arm in arms if arm.name in trains)
