"""From a reading to a plan: arms, hypotheses, stages, branches, and what it costs.

    noise floor (baseline, first seeds) → underpowered: stop | compare (all arms, the same seeds and more) → stop

Pure. Everything that decides the study is fixed here and hashed with the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from foundation.strict import explain
from researcher.analysis.power import power_of, seeds_needed
from researcher.analysis.sentinels import SENTINELS
from researcher.models import (
    Arm,
    Branch,
    Budget,
    Condition,
    Factor,
    Finding,
    Hypothesis,
    Instrument,
    Plan,
    PlanModel,
    PlanRole,
    Scalar,
    Stage,
    StageKind,
)
from researcher.planner.instruments import InstrumentFolder, nested
from researcher.planner.matching import Reading, level_text
from researcher.planner.refusals import BudgetTooSmall, PlanningRefused
from researcher.planner.seam import PlanOptions
from swarm.protocol.runspec import RunSpec, merge_patch

PLANNED_EFFECT = 1.5
"""In margins: the effect at which the power must be reached."""
ALPHA, POWER = 0.05, 0.8
DEFAULT_BUDGET_S = 8 * 3600.0
NOISE_FLOOR, COMPARE = "noise-floor", "compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a plan takes at the least and at the most. Wall time for the given number of servers."""

    trials: tuple[int, int]
    wall_s: tuple[float, float]


def design(topic: str, model: str, folder: InstrumentFolder, reading: Reading, options: PlanOptions) -> Plan:
    """The plan, not yet priced or checked."""
    instrument, defaults = folder.instrument, folder.instrument.defaults
    arms = arms_of(reading)
    hypotheses = _hypotheses(reading, arms)
    least, most = _seeds(instrument, reading, options)
    names = tuple(arm.name for arm in arms)
    budget_s = options.budget_s or reading.budget_s or DEFAULT_BUDGET_S
    settings = dict(_by_target(reading.settings))
    plan = Plan(
        question=topic.strip(),
        instrument=instrument.name,
        instrument_version=instrument.version,
        instrument_code=folder.code,
        model=PlanModel(name=model),
        hypotheses=hypotheses,
        arms=arms,
        factors=(reading.factor,),
        stages=(
            Stage(
                id=NOISE_FLOOR, kind=StageKind.NOISE_FLOOR, arms=(hypotheses[0].baseline,), seeds=least, max_seeds=least
            ),
            Stage(id=COMPARE, kind=StageKind.COMPARE, arms=names, seeds=least, max_seeds=most),
        ),
        branches=_branches(hypotheses, options),
        steps=int(settings.pop("study.steps", defaults.steps)),
        run=_run(instrument, settings),
        roles=_roles(instrument, settings, model),
        task=_task(instrument, settings),
        heldout_tasks=defaults.heldout_tasks,
        heldout_episodes=defaults.heldout_episodes,
        heldout_temperature=defaults.heldout_temperature,
        metrics=(reading.metric, *(metric for metric in instrument.metrics if metric != reading.metric)),
        power=POWER,
        planned_effect=PLANNED_EFFECT * reading.metric.margin,
        sentinels=tuple(SENTINELS),
        budget=Budget(wall_s=budget_s, trials=len(arms) * most),
        planner="builtin",
        assumptions=reading.assumptions,
    )
    return plan.model_copy(update={"trial_s": max(_trial_s(plan, arm, instrument) for arm in arms)})


def arms_of(reading: Reading) -> tuple[Arm, ...]:
    """One arm per level, named after it; equal levels make arms with different names (a null study)."""
    arms: list[Arm] = []
    for level in reading.levels:
        name = f"{reading.factor.name}={level_text(level)}".replace(" ", "-").replace("/", "-")
        if name in [arm.name for arm in arms]:
            name += "-again"
        arms.append(Arm(name=name, levels={reading.factor.name: level}))
    return tuple(arms)


def priced(plan: Plan, instrument: Instrument, *, servers: int) -> Price:
    """By the instrument's own figure for a trial, scaled with its length and with the episodes of a step."""
    seconds = {arm.name: _trial_s(plan, arm, instrument) for arm in plan.arms}
    least, most = plan.stages[-1].seeds, plan.stages[-1].max_seeds
    each = sum(seconds.values()) / max(1, min(servers // (1 + len(plan.roles)), len(plan.arms)))
    return Price(trials=(len(plan.arms) * least, len(plan.arms) * most), wall_s=(each * least, each * most))


def fitted(plan: Plan, instrument: Instrument, options: PlanOptions) -> Plan:
    """The plan within its budget: with fewer seeds at the most where all do not fit, with more where the budget was given
    and the instrument's own σ asks for them.

    Raises: PlanningRefused when not even the least seeds fit, saying what would.
    """
    budget_s = plan.budget.wall_s
    price = priced(plan, instrument, servers=options.servers)
    compare = plan.stages[-1]
    per_seed = price.wall_s[0] / compare.seeds
    affordable = int(budget_s / per_seed)
    if affordable < compare.seeds:
        raise BudgetTooSmall(
            f"{price.trials[0]} trials take about {_time(price.wall_s[0])}, the budget is {_time(budget_s)}: "
            f"give --budget {math.ceil(price.wall_s[0] / 60)}m, or ask about fewer levels or fewer steps"
            + (f", or --seeds {affordable}" if affordable >= 2 else "")
        )
    most, notes = compare.max_seeds, list(plan.assumptions)
    needed = _expected_seeds(plan)
    if needed and options.seeds is None and options.budget_s is not None:
        most = max(most, min(needed, affordable))
    if affordable < most:
        notes.append(f"The budget pays for {affordable} seeds per arm at the most, not {most}.")
        most = affordable
    if needed and needed > most:
        notes.append(
            f"By the instrument's own σ about {needed} seeds per arm would be needed, and the plan allows {most}: "
            "the noise floor will probably end the study as underpowered."
        )
    stages = (*plan.stages[:-1], compare.model_copy(update={"max_seeds": most}))
    budget = plan.budget.model_copy(update={"trials": len(plan.arms) * most})
    return plan.model_copy(update={"stages": stages, "budget": budget, "assumptions": tuple(notes)})


def checked(plan: Plan) -> Plan:
    """The plan, if every arm is a run that a server would take and every stage leads somewhere.

    Raises: PlanningRefused.
    """
    for arm in plan.arms:
        levels = {factor.target: arm.levels[factor.name] for factor in plan.factors}
        for role in (None, *plan.roles):
            try:
                RunSpec.model_validate(plan.run_fields(levels, role))
            except ValidationError as error:
                problems = "; ".join(str(problem) for problem in explain(error, RunSpec))
                raise PlanningRefused(f"arm {arm.name} cannot be run: {problems}") from error
    stages = {stage.id for stage in plan.stages}
    for stage in stages:
        ends = [branch for branch in plan.branches if branch.stage == stage]
        if not ends or ends[-1].when.kind != "always":
            raise ValueError(f"after stage {stage!r} the plan may decide nothing")
    astray = [branch.to for branch in plan.branches if branch.then == "stage" and branch.to not in stages]
    if astray:
        raise ValueError(f"branches lead to stages that do not exist: {astray}")
    return Plan.model_validate(plan.model_dump())


def known_ids(known: Sequence[Finding], plan: Plan) -> tuple[str, ...]:
    """Earlier findings on the same instrument and factor."""
    varied = {factor.name for factor in plan.factors}
    return tuple(each.id for each in known if each.instrument == plan.instrument and each.factor in varied)


# -- parts ----------------------------------------------------------------------------------------------------------


def _hypotheses(reading: Reading, arms: Sequence[Arm]) -> tuple[Hypothesis, ...]:
    verb = "a higher" if reading.direction == "increase" else "a lower"
    assumed = " (the direction is assumed: the topic claims none)" if reading.direction_assumed else ""
    return tuple(
        Hypothesis(
            id=f"H{number}",
            statement=f"{arms[treatment].name} has {verb} {reading.metric.name} than {arms[baseline].name}{assumed}",
            factor=reading.factor.name,
            baseline=arms[baseline].name,
            treatment=arms[treatment].name,
            metric=reading.metric.name,
            direction=reading.direction,
            direction_assumed=reading.direction_assumed,
            margin=reading.metric.margin,
            alpha=ALPHA,
        )
        for number, (treatment, baseline) in enumerate(reading.pairs, start=1)
    )


def _seeds(instrument: Instrument, reading: Reading, options: PlanOptions) -> tuple[int, int]:
    """The least and the most seeds per arm; a number that a person gave is both."""
    given = options.seeds if options.seeds is not None else reading.seeds
    if given is None:
        return instrument.defaults.seeds, instrument.defaults.max_seeds
    if given < 2:
        raise PlanningRefused(f"{given} seeds per arm show no spread: at least 2 are needed, 3 or more are better")
    return given, given


def _branches(hypotheses: Sequence[Hypothesis], options: PlanOptions) -> tuple[Branch, ...]:
    branches = []
    if not options.allow_underpowered:
        branches.append(
            Branch(
                stage=NOISE_FLOOR,
                when=Condition(kind="power_below", value=POWER),
                then="underpowered",
                reason="the noise is too loud for the planned effect, even with the most seeds that the plan allows",
            )
        )
    branches.append(
        Branch(
            stage=NOISE_FLOOR,
            when=Condition(kind="always"),
            then="stage",
            to=COMPARE,
            reason="the noise floor is known: all arms run on as many seeds as it asks for",
        )
    )
    decided = ("supported", "refuted", "equivalent")
    for verdicts, reason in (
        (("invalid",), "a sentinel fired: the numbers do not answer the question"),
        (decided, "the question is answered"),
    ):
        if len(hypotheses) == 1 or verdicts == ("invalid",):
            branches += [
                Branch(
                    stage=COMPARE,
                    when=Condition(kind="verdict_in", hypothesis=hypothesis.id, verdicts=verdicts),
                    then="stop",
                    reason=reason,
                )
                for hypothesis in hypotheses
            ]
    branches.append(
        Branch(
            stage=COMPARE,
            when=Condition(kind="always"),
            then="stop",
            reason="every planned trial has ended; what is not decided now stays open",
        )
    )
    return tuple(branches)


def _by_target(settings: Sequence[tuple[Factor, Scalar]]) -> list[tuple[str, Any]]:
    return [(factor.target, level) for factor, level in settings]


def _run(instrument: Instrument, settings: dict[str, Any]) -> dict[str, Any]:
    run: Any = instrument.defaults.run
    for target, level in settings.items():
        if target.startswith("run."):
            run = merge_patch(run, nested(target.removeprefix("run."), level))
    return dict(run)


def _roles(instrument: Instrument, settings: dict[str, Any], model: str) -> dict[str, PlanRole]:
    roles = {}
    for name, role in instrument.roles.items():
        run: Any = role.run
        for target, level in settings.items():
            if target.startswith(f"roles.{name}."):
                run = merge_patch(run, nested(target.removeprefix(f"roles.{name}."), level))
        roles[name] = PlanRole(model=role.model or model, run=run)
    return roles


def _task(instrument: Instrument, settings: dict[str, Any]) -> dict[str, Scalar]:
    own = {target.removeprefix("task."): level for target, level in settings.items() if target.startswith("task.")}
    return {**instrument.defaults.task, **own}


def _trial_s(plan: Plan, arm: Arm, instrument: Instrument) -> float:
    """Expected seconds of one trial of this arm."""
    levels = {factor.target: arm.levels[factor.name] for factor in plan.factors}
    steps = float(levels.get("study.steps", plan.steps)) / instrument.defaults.steps
    usual, own = _episodes(instrument.defaults.run, {}), _episodes(plan.run, levels)
    return instrument.defaults.trial_s * steps * own / usual


def _episodes(run: dict[str, Any], levels: dict[str, Scalar]) -> float:
    """Episodes of a step."""
    batch = RunSpec().batch.model_dump() | run.get("batch", {})
    tasks = levels.get("run.batch.tasks", batch["tasks"])
    return float(tasks) * float(levels.get("run.batch.group_size", batch["group_size"]))


def _expected_seeds(plan: Plan) -> int | None:
    """Seeds per arm by the σ that the instrument states, if it states one. A price, never the noise floor itself."""
    metric = plan.metric(plan.hypotheses[0].metric)
    if metric.sigma is None:
        return None
    alpha = ALPHA / len(plan.hypotheses)
    if power_of(plan.stages[-1].seeds, sigma=metric.sigma, effect=plan.planned_effect, alpha=alpha) >= plan.power:
        return plan.stages[-1].seeds
    return seeds_needed(sigma=metric.sigma, effect=plan.planned_effect, alpha=alpha, power=plan.power)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
