"""Cost of a plan: trials, wall time, the detectable effect; and how many seeds a budget allows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from researcher.analysis.power import power_of, seeds_needed, side_sigma
from researcher.analysis.samples import deciding_stage
from researcher.design.arms import ALPHA
from researcher.design.models import boots_s
from researcher.design.stages import cost, with_most
from researcher.instruments.instrument import Instrument, Scalar
from researcher.refusals import BudgetTooSmall
from researcher.study.plan import Arm, Plan
from researcher.study.spec import StudySpec
from swarm.protocol.runspec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Least and most cost of a plan. Wall time is for the given number of servers.

    seeds_needed: per arm, by the instrument's stated σ; None without one.
    """

    trials: tuple[int, int]
    wall_s: tuple[float, float]
    seeds_needed: int | None = None


def price_of(plan: Plan, instrument: Instrument, *, servers: int) -> Price:
    """Scales the instrument's time per trial with length and episodes per step."""
    seconds = {arm.name: _trial_s(plan, arm, instrument) for arm in plan.arms}
    needed = min(len(stage.arms) for stage in plan.stages[-1:])
    at_once = max(1, min(servers // (1 + len(plan.roles)), needed))
    least, most = (cost(plan, seconds, at_most=at_most) for at_most in (False, True))
    few_s, many_s = (0.0, 0.0) if servers > 1 else (boots_s(plan, at_most=False), boots_s(plan, at_most=True))
    return Price(
        trials=(least[0], most[0]),
        wall_s=(least[1] / at_once + few_s, most[1] / at_once + many_s),
        seeds_needed=_expected_seeds(plan),
    )


def fitted(plan: Plan, instrument: Instrument, spec: StudySpec, *, servers: int) -> Plan:
    """Fit the plan into its budget: fewer most seeds if not all fit; more if a budget but no seeds are given and the
    instrument's σ needs them.

    Raises: BudgetTooSmall when not even the least seeds fit, with what would.
    """
    last = plan.stages[-1]
    affordable = check_budget(plan, instrument, servers=servers, trials=spec.budget.trials)
    most, notes = last.max_seeds, list(plan.assumptions)
    needed = _expected_seeds(plan)
    if needed and spec.seeds.max is None and spec.budget.wall is not None:
        most = max(most, min(needed, affordable))
    if affordable < most:
        notes.append(f"The budget pays for {max(affordable, last.seeds)} seeds per arm at the most, not {most}.")
        most = max(affordable, last.seeds)
    if needed and needed > most:
        notes.append(
            f"By the instrument's own σ about {needed} seeds per arm would be needed, and the plan allows {most}: "
            "the noise floor will probably end the study as underpowered."
        )
    sized = plan.model_copy(update={"stages": with_most(plan.stages, most), "assumptions": tuple(notes)})
    most_trials = price_of(sized, instrument, servers=servers).trials[1]
    return sized.model_copy(update={"budget": plan.budget.model_copy(update={"trials": most_trials})})


def check_budget(plan: Plan, instrument: Instrument, *, servers: int, trials: int | None = None) -> int:
    """Seeds per arm that the budget pays for. trials: how many there may be; None is any number.

    Raises: BudgetTooSmall where it does not pay for the plan's least.
    """
    price, budget_s = price_of(plan, instrument, servers=servers), plan.budget.wall_s
    affordable = _affordable(plan, instrument, servers, trials)
    fewer = "compare fewer levels or take fewer steps" + (f", or at most {affordable} seeds" if affordable >= 2 else "")
    if price.wall_s[0] > budget_s:
        raise BudgetTooSmall(
            "budget",
            f"{price.trials[0]} trials take about {_time(price.wall_s[0])}, and {_time(budget_s)} are given: "
            f"give --budget {math.ceil(price.wall_s[0] / 60)}m, or {fewer}",
        )
    if trials is not None and price.trials[0] > trials:
        raise BudgetTooSmall(
            "budget.trials", f"{price.trials[0]} trials are the least, and {trials} are given: {fewer}"
        )
    return affordable


def _affordable(plan: Plan, instrument: Instrument, servers: int, trials: int | None) -> int:
    """Seeds per arm of the deciding stage that the budget pays for, all other stages at their most."""

    def price(most: int) -> Price:
        stages = tuple(stage.model_copy(update={"seeds": 1}) for stage in plan.stages)
        return price_of(plan.model_copy(update={"stages": with_most(stages, most)}), instrument, servers=servers)

    base = plan.stages[0].seeds
    least, more = price(base), price(base + 1)
    limits = [(plan.budget.wall_s, least.wall_s[1], more.wall_s[1])]
    if trials is not None:
        limits.append((trials, least.trials[1], more.trials[1]))
    paid = [base + math.floor((limit - now) / (then - now) + 1e-9) for limit, now, then in limits if then > now]
    return min(paid, default=base)


def longest_trial_s(plan: Plan, instrument: Instrument) -> float:
    """Expected seconds of the longest trial."""
    return max(_trial_s(plan, arm, instrument) for arm in plan.arms)


def _trial_s(plan: Plan, arm: Arm, instrument: Instrument) -> float:
    """Expected seconds of one trial of this arm."""
    levels = plan.levels_of(arm)
    steps = plan.steps_of(arm.name) / instrument.defaults.steps
    usual, own = _episodes(instrument.defaults.run, {}), _episodes(plan.run, levels)
    return instrument.defaults.trial_s * steps * own / usual


def arm_seconds(plan: Plan) -> dict[str, float]:
    """Expected seconds per trial, by arm; 0 where the plan does not price its slowest arm."""
    work = {arm.name: plan.steps_of(arm.name) * _episodes(plan.run, plan.levels_of(arm)) for arm in plan.arms}
    return {name: (plan.trial_s or 0.0) * own / max(work.values()) for name, own in work.items()}


def _episodes(run: dict[str, Any], levels: dict[str, Scalar]) -> float:
    """Episodes of a step."""
    batch = RunSpec().batch.model_dump() | run.get("batch", {})
    tasks = levels.get("run.batch.tasks", batch["tasks"])
    return float(tasks) * float(levels.get("run.batch.group_size", batch["group_size"]))


def _expected_seeds(plan: Plan) -> int | None:
    """Seeds per arm by the σ that the instrument states, if it states one. A price, never the noise floor itself."""
    asked, metric = plan.hypotheses[0], plan.metric(plan.hypotheses[0].metric)
    if metric.sigma is None or plan.stages[-1].explores:
        return None
    sigma = side_sigma(plan, asked, metric.sigma) if asked.between_arms else metric.sigma
    alpha = ALPHA / max(Counter(deciding_stage(plan, each).id for each in plan.hypotheses).values())
    if power_of(plan.stages[-1].seeds, sigma=sigma, effect=plan.planned_effect, alpha=alpha) >= plan.power:
        return plan.stages[-1].seeds
    return seeds_needed(sigma=sigma, effect=plan.planned_effect, alpha=alpha, power=plan.power)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
